"""Compiled extensions of an upstream's wheel, placed in patched trees.

`patches/compiled.yaml` pins the wheel and every extension in it by sha256. Nothing is compiled
here: the files are those of the release, whole or with the GPU code of one chip only (`thin`).
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from samebits.errors import Refused, shown, word
from samebits.patching import fetch, thin
from samebits.patching.workspace import Workspace

FILE = "compiled.yaml"


@dataclass(frozen=True)
class Wheel:
    """The pinned wheel of one upstream.

    host     package -> pattern of the version that the extensions were built against
    groups   group -> {path in the wheel -> {`whole`: sha256, chip: sha256 of the thinned file}}
    """

    upstream: str
    distribution: str
    version: str
    filename: str
    sha256: str
    size: int
    host: dict[str, str]
    groups: dict[str, dict[str, dict[str, str]]]

    @property
    def files(self) -> dict[str, dict[str, str]]:
        """Every extension of every group."""
        return {path: hashes for group in self.groups.values() for path, hashes in group.items()}


def load(patches: Path) -> dict[str, Wheel]:
    """Upstream -> its wheel; empty where `patches/compiled.yaml` is not there (Refused SB0126)."""
    path = patches / FILE
    if not path.is_file():
        return {}
    try:
        entries: Any = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
        return {
            name: Wheel(upstream=name, **{**entry, "size": int(entry["size"])})
            for name, entry in entries.items()
        }
    except (yaml.YAMLError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise Refused(
            "SB0126",
            seen=f"{FILE}: {type(error).__name__}: {error}",
            required="the fields that patches/README.md lists",
            hint=f"git -C {word(patches.parent)} diff patches/{FILE}",
        ) from None


def verified(patches: Path, upstream: str, folder: Path) -> set[str]:
    """Paths in a tree that are extensions of the pinned wheel, by sha256; others are left out."""
    wheel = load(patches).get(upstream)
    if wheel is None:
        return set()
    return {
        path
        for path, hashes in wheel.files.items()
        if (folder / path).is_file() and fetch.sha256(folder / path) in hashes.values()
    }


def wheel_file(workspace: Workspace, wheel: Wheel, given: Path | None = None) -> Path:
    """The verified wheel in `build/wheels/`, copied from `given` or fetched where it is missing."""
    target = workspace.build / "wheels" / wheel.filename
    with workspace.lock(f"wheel-{wheel.upstream}"), workspace.writing():
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{wheel.filename}.part")
            if given is not None:
                shutil.copyfile(given, part)
            else:
                found = fetch.find(wheel.distribution, wheel.version, filename=wheel.filename)
                fetch.download(workspace, found, part, wheel.size, "samebits bundle pack")
            _check(part, wheel)
            part.replace(target)
        _check(target, wheel)
    return target


def _check(path: Path, wheel: Wheel) -> None:
    seen = fetch.sha256(path)
    if seen != wheel.sha256:
        raise Refused(
            "SB0127",
            seen=f"{shown(path)}: sha256 {seen}",
            required=f"{wheel.filename}: sha256 {wheel.sha256}",
            hint=f"rm -f {word(path)}",
        )


def extract(
    workspace: Workspace, wheel: Wheel, groups: list[str], chip: str | None, into: Path
) -> list[str]:
    """Write the extensions of some groups below `into`; their paths.

    chip   keep only GPU code that this chip can run (`sm90`), or None for the files as released.
    Refuses SB0127 a file whose sha256 is not the pinned one, before and after thinning.
    """
    written = []
    with zipfile.ZipFile(wheel_file(workspace, wheel)) as archive:
        for group in groups:
            for path, hashes in wheel.groups[group].items():
                content = archive.read(path)
                _check_content(path, content, hashes["whole"])
                if chip is not None and path.endswith(".so") and chip in hashes:
                    content = thin.thin(content, int(chip.removeprefix("sm")))
                    _check_content(path, content, hashes[chip])
                place = into / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
                place.chmod(0o755 if path.endswith(".so") else 0o644)
                written.append(path)
    return written


def place(workspace: Workspace, upstream: str, folder: Path) -> None:
    """Put every extension of the pinned wheel, as released, into a patched tree.

    An upstream without a wheel in `patches/compiled.yaml` has none. Files that are there are kept.
    """
    wheel = load(workspace.patches).get(upstream)
    if wheel is None or verified(workspace.patches, upstream, folder) == set(wheel.files):
        return
    extract(workspace, wheel, list(wheel.groups), None, folder)


def _check_content(path: str, content: bytes, required: str) -> None:
    seen = hashlib.sha256(content).hexdigest()
    if seen != required:
        raise Refused(
            "SB0127",
            seen=f"{path}: sha256 {seen}",
            required=f"sha256 {required}",
            hint="samebits explain SB0127",
        )
