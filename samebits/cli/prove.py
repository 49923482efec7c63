"""`samebits prove CASE` and `samebits rl CASE`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def prove(
    case: Annotated[str, typer.Argument(help="Name of a case, see `samebits case list`.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer tokens and two RL steps; cannot be recorded.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Write evidence and report to the case folder.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statement.")] = False,
) -> None:
    """Run every leg with its negative control, and judge the counts.

    Finished stages of an interrupted run are reused. Exit code: 0 equal, 1 different, 2 refused,
    3 not observed.
    """
    from samebits.errors import Refused

    if quick and record:
        raise Refused(
            "SB0903",
            seen="--quick and --record",
            required="one of them",
            hint=f"samebits prove {case} --record",
        )
    from samebits import env
    from samebits.evidence.verdict import judge
    from samebits.gates import page
    from samebits.gates.prove import prove as run

    outcome = run(case, quick=quick, record=record)
    statement = outcome.statement
    chip = env.chip()
    html = page.write(statement, outcome.stages, chip, outcome.path.with_name("report.html"))
    if as_json:
        print(json.dumps(statement.data, indent=1))
    else:
        _table(statement.predicate)
        for reason in judge(statement.predicate).reasons:
            print(f"- {reason}")
        print(f"evidence: {outcome.run.workspace.show(outcome.path)}")
        print(f"report:   {outcome.run.workspace.show(html)}")
        print(page.sentence(statement))
    raise typer.Exit({"EQUAL": 0, "DIFFERENT": 1, "NOT_OBSERVED": 3}[statement.verdict])


def _table(predicate) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("leg", "pair", box=None, pad_edge=False)
    for name in ("tokens", "mismatches", "max |dlogp|"):
        table.add_column(name, justify="right")
    table.add_column("control")
    table.add_column("its mismatches", justify="right")
    for record in predicate["comparisons"]:
        largest, control = record["max_abs"], record["control"]
        table.add_row(
            record["leg"],
            record["name"],
            f"{record['tokens']:,}",
            f"{record['mismatches']:,}",
            "-" if largest is None else f"{float(largest['decimal']):.3g}",
            "-" if control is None else control["name"],
            "" if control is None else f"{control['mismatches']:,} of {control['tokens']:,}",
        )
    for record in predicate["oracle"]:
        aligned, stock = (float(record[f"{a}_mean"]["decimal"]) for a in ("aligned", "stock"))
        control = record["control"]
        table.add_row(
            "O",
            record["name"],
            f"{record['tokens']:,}",
            "-",
            f"mean {aligned:.3g}, stock {stock:.3g}",
            control["name"],
            f"mean {float(control['mean']['decimal']):.3g}",
        )
    Console(width=140).print(table)
