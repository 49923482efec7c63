"""The table of patches in `patches/README.md`, written from the headers."""

from __future__ import annotations

import re

from samebits import files
from samebits.patching import pins
from samebits.patching.series import Series
from samebits.patching.workspace import Workspace

BEGIN, END = "<!-- index: written by scripts/patch_index.py -->", "<!-- end of index -->"


def render(workspace: Workspace) -> str:
    """The index section, markers included."""
    lines = [BEGIN]
    for pin in pins.patched(workspace):
        series = Series(workspace, pin.name)
        lines += ["", f"### {pin.name}: {pin.distribution} {pin.version} ({pin.tag})", ""]
        if not series.order:
            lines.append("No patches.")
            continue
        lines.append("| patch | class | runs in | models | upstream | remove when |")
        lines.append("|---|---|---|---|---|---|")
        for name in series.order:
            patch = series.files.get(name)
            fields = patch.trailers if patch else {}
            models = [model for model in series.models if name in series.of(model)]
            cells = [
                f"[{name.removesuffix('.patch')}]({pin.name}/{name})",
                fields.get("Patch-Class", ""),
                fields.get("Runs-In", "").partition(",")[0],
                ", ".join(models),
                fields.get("Upstream-Status", ""),
                fields.get("Remove-When", ""),
            ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, "", END])


def updated(workspace: Workspace) -> str:
    """`patches/README.md` with the index as it should be."""
    text = (workspace.patches / "README.md").read_text()
    pattern = re.escape(BEGIN) + ".*" + re.escape(END)
    section = render(workspace)
    if re.search(pattern, text, re.S):
        return re.sub(pattern, lambda _: section, text, flags=re.S)
    return text.rstrip("\n") + "\n\n" + section + "\n"


def current(workspace: Workspace) -> bool:
    """Whether the index is up to date; true where there is no README to hold one."""
    path = workspace.patches / "README.md"
    return not path.is_file() or path.read_text() == updated(workspace)


def write(workspace: Workspace) -> None:
    """Write the index into `patches/README.md`, if there is such a file."""
    path = workspace.patches / "README.md"
    if path.is_file() and not current(workspace):
        files.write_atomic(path, updated(workspace).encode())
