"""`samebits bench`: run the benchmarks, or show the recorded rows."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from samebits.cli.output import show_json, show_table

app = typer.Typer(no_args_is_help=True, help="Ratios against native operators, behind a bit gate.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def run(
    names: Annotated[
        list[str] | None, typer.Argument(help="Benchmarks; default: all.", metavar="NAME...")
    ] = None,
    record: Annotated[
        bool,
        typer.Option("--record", help="Write the rows to cases/bench.json or bench-h200.json."),
    ] = False,
    case: Annotated[
        str | None,
        typer.Option(help="With `rollout` or `engines`: the case whose engines are timed."),
    ] = None,
    arms: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            metavar="NAME",
            help="With `engines`: a configuration to run beside ours; repeat it for more.",
        ),
    ] = None,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="With `engines`: run ours and stock's fastest kernels only."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Time each operator against its native counterpart.

    Both sides run in turns. A benchmark whose bit gate is red prints nothing and counts as
    different. `engines` needs a GPU and a case: both engines against the fastest stock ones.
    """
    from samebits import bench

    if record:
        bench.refuse_read_only()
    rows = bench.run(names or [], case, arms or (), fast)
    if record:
        bench.record(rows, names or [])
    _print(rows, as_json)


@app.command()
def show(as_json: Json = False) -> None:
    """Show the recorded rows of every machine."""
    from samebits import bench
    from samebits.errors import NotObserved

    try:
        rows = bench.recorded()
    except NotObserved:
        if as_json:
            show_json([])
        raise
    _print(rows, as_json)


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        show_json(rows)
        return
    from samebits import bench

    columns = ("work", "ours", "against", "ratio", "target", "met", "hardware", "date")
    cells = [
        (
            row["work"],
            f"{row['ours']:,} {row['unit']}",
            bench.beside(row),
            bench.ratio(row),
            "-" if row["target"] is None else f"{row['target']:.2f}",
            {None: "-", True: "yes", False: "no"}[row["met"]],
            row["hardware"].partition(" (")[0],
            row["date"],
        )
        for row in rows
    ]
    show_table(columns, cells)
