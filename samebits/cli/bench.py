"""`samebits bench`: run the benchmarks, or show the recorded rows."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Ratios against native operators, behind a bit gate.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def run(
    names: Annotated[
        list[str] | None, typer.Argument(help="Benchmarks; default: all.", metavar="NAME...")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write the rows to cases/bench.json.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Time each operator against its native counterpart in one run.

    A benchmark whose bit gate is red prints nothing and ends with exit code 1.
    """
    from samebits import bench

    rows = bench.run(names or [])
    if record:
        bench.record(rows)
    _print(rows, as_json)


@app.command()
def show(as_json: Json = False) -> None:
    """The recorded rows: work, against, ratio, target, met, hardware, date."""
    from samebits import bench

    _print(bench.recorded(), as_json)


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("work", "ours", "against", "ratio", "target", "met", "date", box=None)
    for row in rows:
        table.add_row(
            row["work"],
            f"{row['ours']:,} {row['unit']}",
            f"{row['against']['name']} {row['against']['time']:,}",
            f"{row['ratio']:.2f}",
            "-" if row["target"] is None else f"{row['target']:.2f}",
            {None: "-", True: "yes", False: "no"}[row["met"]],
            row["date"],
        )
    Console(width=160).print(table)
