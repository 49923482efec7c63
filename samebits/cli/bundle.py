"""`samebits bundle`: everything that a host without a network needs, in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.output import show_json, show_table

app = typer.Typer(no_args_is_help=True, help="Offline bundles of the whole stack.")


@app.callback()
def _group() -> None:
    """A group of verbs, also while it has one."""


@app.command()
def pack(
    out: Annotated[
        Path | None, typer.Option(help="Folder of the bundle; build/bundle by default.")
    ] = None,
    part_mib: Annotated[
        float, typer.Option("--part-mib", min=0.01, help="Most MiB of a part.")
    ] = 60,
    python: Annotated[str, typer.Option(help="Python version of the host.")] = "3.12",
    only: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP,...",
            help="Pack these groups; what the folder holds of others stays.",
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", help="Case whose trees and weights to pack; repeatable."),
    ] = None,
    all_chips: Annotated[
        bool, typer.Option("--all-chips", help="Keep GPU code of chips other than Hopper.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Write parts, manifest.json and install.py.

    On the host, in the folder that holds them: python3 install.py --into DIR
    """
    from samebits import recipe
    from samebits.bundle import pack as packing
    from samebits.patching.workspace import Workspace

    workspace = Workspace.find()
    folder = out or workspace.build / "bundle"
    options = packing.Options(
        out=folder.absolute(),
        part=int(part_mib * packing.MIB),
        python=python,
        only=None if only is None else tuple(filter(None, only.split(","))),
        cases=tuple(case or recipe.known_cases()),
        chip=None if all_chips else "sm90",
    )
    rows = packing.rows(options.out, packing.pack(workspace, options))
    columns = ("file", "MiB", "group")
    if as_json:
        show_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    show_table(columns, rows, right=("MiB",))
