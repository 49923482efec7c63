"""Wheels of a bundle: read the lock, fetch through the user's own pip, lay out their files."""

from __future__ import annotations

import fnmatch
import hashlib
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from samebits.errors import Refused, word
from samebits.patching.workspace import Workspace

LOCK = Path("scripts") / "bundle.lock"
# glibc versions that wheels of the lock are tagged with, newest first; pip takes each by name only.
GLIBC = (*range(39, 23, -1), 17, 12, 5)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + [
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
]


@dataclass(frozen=True)
class Locked:
    """One line of the lock: `name==version`, and patterns of files that are left out."""

    line: str
    without: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The line with the name as indexes compare it."""
        name, version = self.line.split("==")
        return f"{normal(name)}=={version}"


def read_lock(workspace: Workspace) -> dict[str, list[Locked]]:
    """Group -> packages of `scripts/bundle.lock`, in file order.

    A line `# [GROUP] ...` begins a group; `# without PATTERN ...` below a package leaves files
    of it out. Refuses SB1106 a line of another form.
    """
    path = workspace.root / LOCK
    groups: dict[str, list[Locked]] = {}
    packages: list[Locked] = []
    for line in path.read_text().splitlines():
        if head := re.match(r"# \[([a-z-]+)\]", line):
            packages = groups.setdefault(head.group(1), [])
        elif line.startswith("# without ") and packages:
            patterns = line.removeprefix("# without ").split()
            packages.append(Locked(packages.pop().line, tuple(patterns)))
        elif re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) and groups:
            packages.append(Locked(line))
        elif line and not line.startswith("#"):
            raise Refused(
                "SB1106",
                seen=f"{LOCK}: {line}",
                required="name==version below a line `# [GROUP] ...`",
                hint=f"git -C {word(workspace.root)} diff {LOCK}",
            )
    return groups


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _present(folder: Path) -> dict[str, Path]:
    """`name==version` -> wheel, of the wheels in a folder."""
    return {
        "{}=={}".format(normal(path.name.split("-")[0]), path.name.split("-")[1]): path
        for path in sorted(folder.glob("*.whl"))
    }


def fetch(workspace: Workspace, python: str, packages: list[Locked]) -> list[Path]:
    """Wheels for Python `python` on Linux x86-64, in order; kept in `build/wheels/<python>`.

    A release without a wheel is built from its source where that needs no compiler (it must give
    a wheel for any platform). Refuses SB1107 what pip cannot supply.
    """
    folder = workspace.build / "wheels" / python
    with workspace.lock(f"wheels-{python}"), workspace.writing():
        folder.mkdir(parents=True, exist_ok=True)
        present = _present(folder)
        for package in packages:
            line = package.line
            if package.key in present:
                continue
            if _pip("download", *_target(python), "--dest", str(folder), line).returncode:
                done = _pip("wheel", "--no-binary=:all:", "--wheel-dir", str(folder), line)
                built = _present(folder).get(package.key)
                if built is None or not built.name.endswith("-none-any.whl"):
                    said = (done.stderr or done.stdout).strip().splitlines()
                    raise Refused(
                        "SB1107",
                        seen=f"{line} for Python {python}: {said[-1] if said else 'no wheel'}",
                        required="a wheel for Linux x86-64 or for any platform",
                        hint=f"pip download --no-deps {word(line)}",
                    )
        present = _present(folder)
    return [present[package.key] for package in packages]


def _target(python: str) -> list[str]:
    tags = [word for name in PLATFORMS for word in ("--platform", name)]
    return ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *tags]


def _pip(verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", verb, "--quiet"]
    return subprocess.run([*command, "--no-deps", *arguments], capture_output=True, text=True)


@dataclass(frozen=True)
class File:
    """One file of an archive: where it goes, its bytes and permissions."""

    path: str
    content: bytes
    mode: int = 0o644

    @property
    def sha256(self) -> str:
        """Hexadecimal sha256 of the content."""
        return hashlib.sha256(self.content).hexdigest()


def layout(wheel: Path, without: tuple[str, ...] = ()) -> list[File]:
    """Files of a wheel below `site-packages/` and `scripts/`; headers and data are left out.

    without   patterns of paths in the wheel that are left out, too
    """
    files = []
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            left_out = any(fnmatch.fnmatch(member.filename, pattern) for pattern in without)
            if member.is_dir() or left_out:
                continue
            path = _place(member.filename)
            if path is not None:
                runs = bool(member.external_attr >> 16 & 0o100) or path.startswith("scripts/")
                files.append(File(path, archive.read(member), 0o755 if runs else 0o644))
    return files


def _place(name: str) -> str | None:
    top, _, rest = name.partition("/")
    if not top.endswith(".data"):
        return f"site-packages/{name}"
    kind, _, rest = rest.partition("/")
    if kind in ("purelib", "platlib"):
        return f"site-packages/{rest}"
    return f"scripts/{rest}" if kind == "scripts" else None
