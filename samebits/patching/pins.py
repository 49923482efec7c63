"""`patches/pins.yaml`: which upstream files everything starts from, and which trees come out."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from samebits import files
from samebits.errors import Refused, word
from samebits.patching.workspace import Workspace

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_ID = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Pin:
    """One upstream.

    `tree` is the git tree id of the unpacked sdist, every file added. `trees` maps a model to the
    tree id after its series, or None where none is recorded yet; an upstream without a `trees`
    entry is a plain dependency and has no series. `license_file` (relative to `patches/`) holds
    upstream's licence text where the sdist lacks it.
    """

    name: str
    distribution: str
    version: str
    sdist: str
    sha256: str
    size: int
    repository: str
    tag: str
    commit: str | None
    license: str
    tree: str
    license_file: str | None = None
    trees: dict[str, str | None] | None = None


class _Bad(Exception):
    """What is wrong with the file: seen, required."""


def _pin(name: str, entry: Any) -> Pin:
    known = {f.name for f in fields(Pin)} - {"name"}
    needed = known - {"license_file", "trees"}
    if not isinstance(entry, dict) or set(entry) - known or needed - set(entry):
        keys = set(entry) if isinstance(entry, dict) else set()
        raise _Bad(
            f"{name}: unknown {sorted(keys - known)}, missing {sorted(needed - keys)}",
            f"the fields {sorted(needed)}",
        )
    plain: dict[str, Any] = {
        key: None if value == "null" else value for key, value in entry.items()
    }
    if not re.fullmatch(r"[1-9][0-9]*", str(plain["size"])):
        raise _Bad(f"{name}.size: {plain['size']}", "a number of bytes")
    plain["size"] = int(plain["size"])
    if "trees" in plain:
        plain["trees"] = {m: None if t == "null" else t for m, t in (plain["trees"] or {}).items()}
    pin = Pin(name=name, **plain)
    ids = {"tree": pin.tree, **{f"trees.{m}": t for m, t in (pin.trees or {}).items() if t}}
    if pin.commit is not None:
        ids["commit"] = pin.commit
    for key, value in ids.items():
        if not isinstance(value, str) or not _GIT_ID.fullmatch(value):
            raise _Bad(f"{name}.{key}: {value}", "40 hexadecimal digits")
    if not isinstance(pin.sha256, str) or not _SHA256.fullmatch(pin.sha256):
        raise _Bad(f"{name}.sha256: {pin.sha256}", "64 hexadecimal digits")
    if Path(pin.sdist).name != pin.sdist or not pin.sdist.endswith(".tar.gz"):
        raise _Bad(f"{name}.sdist: {pin.sdist}", "the name of a .tar.gz file")
    return pin


def load(workspace: Workspace) -> dict[str, Pin]:
    """All pins by upstream name, in file order."""
    path = workspace.patches / "pins.yaml"
    if not path.is_file():
        raise Refused(
            "SB0124",
            seen=f"{workspace.root} has no patches/pins.yaml",
            required="a checkout of the project",
            hint="samebits patch check",  # of the checkout that the package lies in
        )
    try:
        return _parsed(path)
    except _Bad as bad:
        seen, required = bad.args
        raise Refused(
            "SB0101",
            seen=seen,
            required=required,
            hint=f"git -C {word(workspace.root)} diff patches/pins.yaml",
        ) from None


def _parsed(path: Path) -> dict[str, Pin]:
    try:
        # Every value stays text: an id made of digits, or of digits around an e, is no number.
        content = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    except (OSError, yaml.YAMLError) as error:
        raise _Bad(f"{path.name}: {error}", "a readable YAML file") from error
    if not isinstance(content, dict):
        raise _Bad(f"{path.name} is no mapping", "one entry per upstream")
    return {name: _pin(name, entry) for name, entry in content.items()}


def get(workspace: Workspace, name: str) -> Pin:
    """The pin of an upstream; Refused SB0102 for an unknown name."""
    pins = load(workspace)
    if name not in pins:
        raise Refused(
            "SB0102",
            seen=f"upstream {name}",
            required=", ".join(pins),
            hint="samebits patch apply --help",
        )
    return pins[name]


def patched(workspace: Workspace) -> list[Pin]:
    """The upstreams that have a patch series."""
    return [pin for pin in load(workspace).values() if pin.trees is not None]


def record_tree(workspace: Workspace, name: str, model: str, tree: str) -> bool:
    """Write one tree id, leaving every other byte of the file alone; True when it changed.

    The entry is `<name>:` / `  trees:` / `    <model>: <id>`; a new model is added at the end of
    `trees`. An empty `trees: {}` becomes a block.
    """
    path = workspace.patches / "pins.yaml"
    lines = path.read_text().splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if line.rstrip() == f"{name}:")
    end = next((i for i in range(start + 1, len(lines)) if re.match(r"\S", lines[i])), len(lines))
    head = next(i for i in range(start, end) if re.match(r"  trees:", lines[i]))
    entries = head + 1
    while entries < end and re.match(r"    \S", lines[entries]):
        found = re.match(r"    ([^\s:#]+):\s*(\S+)(.*)$", lines[entries])
        if found and found.group(1) == model:
            if found.group(2) == tree:
                return False
            lines[entries] = f"    {model}: {tree}{found.group(3)}\n"
            break
        entries += 1
    else:
        lines[head] = re.sub(r"trees:\s*\{\}", "trees:", lines[head])
        lines.insert(entries, f"    {model}: {tree}\n")
    files.write_atomic(path, "".join(lines).encode())
    return True
