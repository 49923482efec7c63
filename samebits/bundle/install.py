#!/usr/bin/env python3
"""Install a bundle without a network.

    python install.py --into DIR [--groups core,vllm-ext] [--check]

Lies beside `manifest.json` and the parts in a bundle; the same file is `samebits.bundle.install` in
the package. Standard library only. It verifies parts by sha256, makes `DIR/venv` on top of the
interpreter that runs it (whose own packages, torch among them, come after the bundle's), lays out
the workspace `DIR/samebits`, and checks imports. A complete, verified install is reused; a changed
file is moved aside, never overwritten.

Exit codes: 0 done, 2 refused, 4 an import fails after installation.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import hashlib
import importlib.util
import io
import json
import lzma
import os
import runpy
import shlex
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

FORMAT = 1
MARKER = ".samebits-bundle.json"
# Results of runs: a change there is work, and no reason to unpack a group again.
WORK = "samebits/cases/"
TITLES = {
    "SB1101": "the bundle is not whole",
    "SB1102": "this host cannot take the bundle",
    "SB1103": "the folder is not one that this installer made",
    "SB1104": "unknown group of the bundle",
    "SB1105": "an installed package cannot be imported",
}


class Problem(Exception):
    """A refusal: id of TITLES, what was seen, what is required, one command that helps."""

    def __init__(self, error_id: str, seen: str, required: str, hint: str, code: int = 2):
        self.error_id, self.code = error_id, code
        super().__init__(
            f"{error_id} {TITLES[error_id]}\n  seen:     {seen}\n"
            f"  required: {required}\n\nhint: {hint}"
        )


def say(text: str) -> None:
    """Progress, to stderr."""
    print(f"install: {text}", file=sys.stderr, flush=True)


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- the bundle -----------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """`manifest.json` of a bundle; refuses SB1101 one that is missing or of another format."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        seen = f"format {manifest['format']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        manifest, seen = {"format": None}, f"{type(error).__name__}: {error}"
    if manifest["format"] != FORMAT:
        raise Problem(
            "SB1101",
            f"{path}: {seen}",
            f"a manifest of format {FORMAT}, as `samebits bundle pack` writes it",
            f"ls -l {shlex.quote(str(folder))}",
        )
    return manifest


def chosen_groups(manifest: dict[str, Any], asked: str | None) -> list[str]:
    """Groups to install, in the manifest's order: the asked ones and those that all need.

    `model` stands for every `model:CASE`. Refuses SB1104 an unknown name.
    """
    known = list(manifest["groups"])
    if asked is None:
        return known
    wanted = set(manifest["required"])
    for name in filter(None, asked.split(",")):
        found = {group for group in known if group == name or group.startswith(f"{name}:")}
        if not found:
            raise Problem(
                "SB1104", f"group {name}", f"some of {','.join(known)}", "python install.py --help"
            )
        wanted |= found
    return [group for group in known if group in wanted]


def check_parts(folder: Path, group: str, entry: dict[str, Any]) -> None:
    """Refuse SB1101 a group one of whose parts is missing or is not the packed one."""
    for part in entry["parts"]:
        path = folder / part["name"]
        required = f"{part['size']} bytes with sha256 {part['sha256']}"
        hint = f"sha256sum {shlex.quote(str(path))}"
        if not path.is_file():
            raise Problem("SB1101", f"{path} of group {group} is missing", required, hint)
        size = path.stat().st_size
        seen = f"{size} bytes" if size != part["size"] else f"sha256 {sha256(path)}"
        if seen != f"sha256 {part['sha256']}":
            raise Problem("SB1101", f"{path}: {seen}", required, hint)


class _Joined(io.RawIOBase):
    """The parts of a group as one stream."""

    def __init__(self, paths: list[Path]):
        self._paths = list(paths)
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._file is None:
                if not self._paths:
                    return 0
                self._file = self._paths.pop(0).open("rb")
            count = self._file.readinto(buffer)
            if count:
                return count
            self._file.close()
            self._file = None


def members(folder: Path, entry: dict[str, Any]) -> Iterator[tuple[str, bytes, int]]:
    """(path, content, mode) of every file of a group, each compared with the manifest.

    The archive holds a content once, under the first of its paths.
    """
    sharing: dict[str, list[tuple[str, int]]] = {}
    for path, (_, digest, mode) in entry["files"].items():
        sharing.setdefault(digest, []).append((path, mode))
    joined: Any = io.BufferedReader(_Joined([folder / p["name"] for p in entry["parts"]]), 1 << 20)
    compressed = entry["compression"] == "xz"
    stream = lzma.LZMAFile(joined) if compressed else joined  # noqa: SIM115
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            file = archive.extractfile(member)
            content = b"" if file is None else file.read()
            size, digest, _ = entry["files"].get(member.name, (None, None, None))
            if digest != hashlib.sha256(content).hexdigest():
                raise Problem(
                    "SB1101",
                    f"{member.name} of {entry['parts'][0]['name']} is another file",
                    f"{size} bytes with sha256 {digest}",
                    f"ls -l {shlex.quote(str(folder))}",
                )
            for path, mode in sharing[digest]:
                yield path, content, mode


# --- the host -------------------------------------------------------------------------------


def seen_host() -> dict[str, str]:
    """Versions of this interpreter and of its torch and triton; `absent` where there is none.

    torch's is read from its own version file, which names the CUDA build; nothing is imported.
    """
    found = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
    found["machine"] = f"{sys.platform}-{os.uname().machine}"
    spec = importlib.util.find_spec("torch")
    found["torch"] = "absent"
    if spec is not None and spec.origin:
        version = Path(spec.origin).with_name("version.py")
        if version.is_file():
            found["torch"] = str(runpy.run_path(str(version)).get("__version__", "unknown"))
    try:
        found["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        found["triton"] = "absent"
    return found


def check_host(required: dict[str, str], seen: dict[str, str]) -> None:
    """Refuse SB1102 a host whose versions do not match the manifest's patterns."""
    wrong = [name for name, pattern in required.items() if not fnmatch.fnmatch(seen[name], pattern)]
    if wrong:
        raise Problem(
            "SB1102",
            f"{sys.executable} with " + ", ".join(f"{name} {seen[name]}" for name in wrong),
            ", ".join(f"{name} {required[name]}" for name in wrong),
            f"{shlex.quote(sys.executable)} -m pip list",
        )


# --- the folder -----------------------------------------------------------------------------


def open_folder(into: Path) -> dict[str, Any]:
    """The state of an install folder, {} for a new one; refuses SB1103 a folder of others."""
    marker = into / MARKER
    if marker.is_file():
        try:
            state = json.loads(marker.read_text())
            if isinstance(state["groups"], dict):
                return state
        except (ValueError, KeyError, TypeError):
            pass
    elif not into.exists() or (into.is_dir() and not any(into.iterdir())):
        return {}
    raise Problem(
        "SB1103",
        f"{into} is there without a readable {MARKER}",
        "a folder that does not exist yet, or one that this installer made",
        f"ls -la {shlex.quote(str(into))}",
    )


def save_state(into: Path, state: dict[str, Any]) -> None:
    """Write the marker, whole or not at all."""
    draft = into / f"{MARKER}.draft"
    draft.write_text(json.dumps(state))
    draft.replace(into / MARKER)


def target(into: Path, path: str) -> Path:
    """Where a file of an archive goes; refuses SB1101 a path that would leave the folder."""
    top, _, rest = path.partition("/")
    below = {"site-packages": site_packages(into), "scripts": into / "venv" / "bin"}
    place = below.get(top, into / top) / rest
    if top not in (*below, "samebits") or ".." in Path(path).parts or not rest:
        raise Problem(
            "SB1101", f"a file {path}", "paths below the install folder", "python install.py --help"
        )
    return place


def site_packages(into: Path) -> Path:
    """Package folder of the environment."""
    return (
        into
        / "venv"
        / "lib"
        / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        / "site-packages"
    )


def changed_files(into: Path, entry: dict[str, Any]) -> list[str]:
    """Files of an installed group that are missing or differ from what was unpacked."""
    return [
        path
        for path, (size, digest, _) in entry["files"].items()
        if not (place := target(into, path)).is_file()
        or (
            not path.startswith("scripts/")
            and (place.stat().st_size != size or sha256(place) != digest)
        )
    ]


def unpack(
    folder: Path, into: Path, group: str, entry: dict[str, Any], old: dict[str, Any]
) -> None:
    """Unpack one group over an older version of it.

    A file that is no longer what the older version wrote is moved below `DIR/changed-N`; one that
    only the older version had is removed.
    """
    before = old.get("files", {})
    for path, content, mode in members(folder, entry):
        place = target(into, path)
        if path in before and place.is_file() and not path.startswith("scripts/"):
            present = sha256(place)
            if present == entry["files"][path][1]:
                place.chmod(mode)
                continue
            if present != before[path][1]:
                say(f"moved the changed {place} to {move_aside(into, path, place)}")
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.startswith("scripts/") and content.startswith(b"#!python"):
            rest = content.partition(b"\n")[2]
            content = f"#!{into / 'venv' / 'bin' / 'python'}\n".encode() + rest
        place.unlink(missing_ok=True)
        place.write_bytes(content)
        place.chmod(mode)
    for path in before.keys() - entry["files"].keys():
        place = target(into, path)
        if place.is_file() and sha256(place) == before[path][1]:
            place.unlink()


def move_aside(into: Path, path: str, place: Path) -> Path:
    """Move a file to the first `DIR/changed-N` that has none of its path; a tree keeps no trace."""
    number = 1
    while (aside := into / f"changed-{number}" / path).exists():
        number += 1
    aside.parent.mkdir(parents=True, exist_ok=True)
    return place.rename(aside)


# --- the environment ------------------------------------------------------------------------

_SCRIPT = """#!{python}
import sys
from {module} import {name}
sys.exit({attribute}())
"""


def make_environment(into: Path) -> None:
    """`DIR/venv` on this interpreter: no pip; this interpreter's packages come last."""
    if not (into / "venv" / "bin" / "python").exists():
        venv.create(into / "venv", symlinks=True, with_pip=False)
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in folders if Path(path).is_dir()]
    place = site_packages(into)
    place.mkdir(parents=True, exist_ok=True)
    (place / "samebits.pth").write_text(f"{into / 'samebits'}\n")
    (place / "zz-host.pth").write_text("".join(f"{line}\n" for line in lines))


def write_commands(into: Path) -> None:
    """`DIR/venv/bin/NAME` for every console script of the installed packages."""
    for found in metadata.distributions(path=[str(site_packages(into))]):
        for entry in found.entry_points:
            if entry.group != "console_scripts":
                continue
            text = _SCRIPT.format(
                python=into / "venv" / "bin" / "python",
                module=entry.module,
                name=entry.attr.partition(".")[0],
                attribute=entry.attr,
            )
            path = into / "venv" / "bin" / entry.name
            path.write_text(text)
            path.chmod(0o755)


def run_check(into: Path, label: str, code: str) -> None:
    """Run Python code in the environment; refuses SB1105 with the end of what it printed."""
    python = into / "venv" / "bin" / "python"
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_", "SAMEBITS_"))
    }
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, env=kept, cwd=into / "samebits"
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Problem(
            "SB1105",
            f"{label}: " + " | ".join(said[-12:]),
            "every check of the bundle to pass",
            f"cd {shlex.quote(str(into / 'samebits'))} && " + shlex.join([str(python), "-c", code]),
            code=4,
        )


# --- the command ----------------------------------------------------------------------------


def install(
    folder: Path,
    into: Path,
    asked: str | None,
    *,
    only_check: bool,
    host: dict[str, str],
    trials: bool = True,
) -> None:
    """Install the chosen groups of the bundle in `folder` into `into` (see the module's text).

    host        versions as `seen_host` returns them
    only_check  verify parts, host and what is installed; write nothing
    trials      try what was unpacked: imports, extensions, trees
    """
    manifest = read_manifest(folder)
    groups = chosen_groups(manifest, asked)
    check_host(manifest["host"], host)
    state = open_folder(into)
    installed = dict(state.get("groups", {}))
    todo = []
    for group in groups:
        entry, old = manifest["groups"][group], installed.get(group)
        if old is not None and old["sha256"] == entry["sha256"]:
            changed = changed_files(into, old)
            worked = [path for path in changed if path.startswith(WORK)]
            if worked:
                say(f"{group}: {len(worked)} files below {WORK} hold work, left as they are")
            if len(worked) == len(changed):
                say(f"{group}: installed and verified")
                continue
            say(f"{group}: {len(changed)} files are missing or changed, such as {changed[0]}")
        check_parts(folder, group, entry)
        todo.append(group)
    if only_check:
        say("parts and host are as required; to be unpacked: " + (",".join(todo) or "nothing"))
        return
    into.mkdir(parents=True, exist_ok=True)
    with (into / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        save_state(into, {**state, "groups": installed})
        make_environment(into)
        for group in todo:
            entry = manifest["groups"][group]
            started = time.monotonic()
            unpack(folder, into, group, entry, installed.get(group, {}))
            installed[group] = {key: entry[key] for key in ("sha256", "files")}
            save_state(into, {**state, "groups": installed})
            say(f"{group}: {len(entry['files'])} files in {time.monotonic() - started:.1f} s")
        write_commands(into)
        for group in groups if trials else ():
            for check in manifest["groups"][group]["checks"]:
                started = time.monotonic()
                run_check(into, check["label"], check["code"])
                say(f"{check['label']}: done in {time.monotonic() - started:.1f} s")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", required=True, type=Path, help="folder to install into")
    parser.add_argument("--groups", help="groups of the manifest, comma-separated; all by default")
    parser.add_argument("--check", action="store_true", help="verify only, write nothing")
    parser.add_argument(
        "--no-trials",
        action="store_true",
        help="import and load nothing of what was unpacked; parts are verified all the same",
    )
    options = parser.parse_args(arguments)
    into = options.into.absolute()
    try:
        install(
            Path(__file__).resolve().parent,
            into,
            options.groups,
            only_check=options.check,
            host=seen_host(),
            trials=not options.no_trials,
        )
    except Problem as problem:
        print(problem, file=sys.stderr)
        return problem.code
    if not options.check:
        print(f"cd {shlex.quote(str(into / 'samebits'))} && ../venv/bin/samebits case list")
    return 0


if __name__ == "__main__":
    sys.exit(main())
