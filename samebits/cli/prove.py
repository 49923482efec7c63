"""`samebits prove CASE`: run the legs of a case, its ladder, or locate where a sequence differs."""

from __future__ import annotations

from typing import Annotated

import typer

from samebits.cli.output import show_json, show_table

app = typer.Typer()


@app.command()
def prove(
    case: Annotated[str, typer.Argument(help="Name of a case, see `samebits case list`.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer tokens and RL steps; cannot be recorded.")
    ] = False,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Write evidence and report to the case folder, name it in the contract.",
        ),
    ] = False,
    locate: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="SEQUENCE",
            help="Compute one sequence of the run alone and say where engines part.",
        ),
    ] = None,
    pair: Annotated[
        str | None,
        typer.Option(
            metavar="LEFT/RIGHT",
            help="With --locate: look behind one comparison of the evidence only.",
        ),
    ] = None,
    ladder: Annotated[
        bool,
        typer.Option(
            "--ladder",
            help="Align one region after the other; write counts and costs to the case folder.",
        ),
    ] = False,
    order: Annotated[
        str | None,
        typer.Option(metavar="REGION,...", help="With --ladder: regions that are aligned first."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="With --ladder: reuse no rung that was measured.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the statement, or the ladder.")
    ] = False,
) -> None:
    """Run every leg with its negative control, and judge the counts.

    Finished stages of an interrupted run are reused. On a difference, `difference.json` beside the
    evidence says which layer, region and element differ first.

    With --ladder, regions are aligned one by one in both engines, from all stock: what still
    differs, and what a token costs, go into `ladder.json` and `broke.md` of the case (with --quick
    beside its runs). Exit code 0 when the last rung is at 0 and stock is not, 1 when the last rung
    differs, 3 when stock does not.
    """
    from samebits.errors import Refused, shown, word

    if record and quick:
        raise Refused(
            "SB0903",
            seen="--record with --quick",
            required="one of them",
            hint=f"samebits prove {word(case)} --record",
        )
    if pair is not None and locate is None:
        raise Refused(
            "SB0926",
            seen="--pair without --locate",
            required="the sequence that differs",
            hint=f"samebits prove {word(case)} --locate 0 --pair {word(pair)}",
        )
    if (order is not None or fresh) and not ladder:
        raise typer.BadParameter("--order and --fresh belong to --ladder")
    if ladder and locate is not None:
        raise typer.BadParameter("give one of --ladder and --locate")
    if ladder:
        raise typer.Exit(_ladder(case, quick, order, fresh, as_json))
    if locate is not None:
        raise typer.Exit(_locate(case, locate, pair, quick, record, as_json))
    from samebits import env
    from samebits.gates import page
    from samebits.gates.prove import Listener
    from samebits.gates.prove import prove as run

    listener = Listener() if as_json else Listener(_judged, _located)
    outcome = run(case, quick=quick, record=record, listener=listener)
    statement = outcome.statement
    chip, scope = env.chip(), outcome.run.recipe.scope
    html = page.write(
        statement,
        outcome.stages,
        chip,
        outcome.path.with_name("report.html"),
        outcome.differences,
        scope,
    )
    if as_json:
        show_json(statement.data)
    else:
        print(f"report:   {shown(html)}")
        if record:
            print("next:     .venv/bin/python scripts/pages.py  # README.md from evidence")
        print(page.sentence(statement, scope))
    raise typer.Exit({"EQUAL": 0, "DIFFERENT": 1, "NOT_OBSERVED": 3}[statement.verdict])


def _judged(statement, path) -> None:
    """Table, reasons and the evidence's path, before any difference is traced."""
    from samebits.errors import shown
    from samebits.evidence.verdict import judge
    from samebits.gates import advice

    _table(statement.predicate)
    flag = statement.predicate["comparisons"][0]["command"].partition(" --")[2]
    for reason in judge(statement.predicate).reasons:
        print(f"- {reason}")
        if hint := advice.of(reason, recorded=flag == "record"):
            print(f"  {hint}")
    print(f"evidence: {shown(path)}", flush=True)


def _located(report) -> None:
    print(f"\n{report}\n", flush=True)


def _locate(
    case: str, sequence: int, pair: str | None, quick: bool, record: bool, as_json: bool
) -> int:
    """Exit code 1 when a pair of arms differs, 3 when a note is all there is, else 0."""
    from samebits.gates import locate
    from samebits.gates.prove import locked_run
    from samebits.gates.sizes import Size
    from samebits.recipe import load

    recipe = load(case)
    if recipe.refits_only:
        pair = pair or locate.REFITS
    with locked_run(case, Size.of(recipe, quick=quick, record=record)) as run:
        found = locate.one_sequence(run, sequence, pair)
    if as_json:
        show_json([report.as_dict() for report in found])
    else:
        for report in found:
            print(f"{report}\n")
        pairs = pair or ", ".join("/".join(arms) for arms in locate.PAIRS)
        differ = sum(report.note not in locate.GONE for report in found)
        gone = ", the run's difference is gone" if len(found) > differ else ""
        print(f"{case}, sequence {sequence}: {differ} pairs of {pairs} differ{gone}")
    told = any(
        report.note is None or (report.left.bits != "-" and report.note not in locate.GONE)
        for report in found
    )
    return 1 if told else 3 if found else 0


def _ladder(case: str, quick: bool, order: str | None, fresh: bool, as_json: bool) -> int:
    """The exit code of a ladder."""
    from dataclasses import asdict

    from samebits.casework.ladder import COLUMNS, rows
    from samebits.gates.ladder import climb

    found = climb(case, quick=quick, order=order.split(",") if order else (), fresh=fresh)
    if as_json:
        show_json(asdict(found))
    else:
        show_table(COLUMNS, rows(found), right=COLUMNS[1:])
        for leg in found.silent:
            print(f"- leg {leg}: stock does not differ, its column says nothing")
        print(found.summary())
    return found.exit_code


def _table(predicate) -> None:
    from samebits.gates import page

    numbers = ("tokens", "mismatches", "max |dlogp|", "its mismatches")
    columns = ("leg", "pair", *numbers[:3], "control", numbers[3])
    rows = []
    for record in predicate["comparisons"]:
        largest, control = record["max_abs"], record["control"]
        row = (
            record["leg"],
            record["name"],
            f"{record['tokens']:,}",
            f"{record['mismatches']:,}",
            "-" if largest is None else f"{float(largest['decimal']):.3g}",
            "-" if control is None else control["name"],
            "" if control is None else f"{control['mismatches']:,} of {control['tokens']:,}",
        )
        rows.append(row)
    for record in predicate["oracle"]:
        means, largest = (
            [float(record[f"{arm}_{of}"]["decimal"]) for arm in ("aligned", "stock")]
            for of in ("mean", "max")
        )
        control = record["control"]
        row = (
            "O",
            record["name"],
            f"{record['tokens']:,}",
            "-",
            f"mean {means[0]:.3g}, stock {means[1]:.3g} (max {largest[0]:.3g}, {largest[1]:.3g})",
            control["name"],
            f"mean {float(control['mean']['decimal']):.3g}",
        )
        rows.append(row)
    show_table(columns, rows, right=numbers)
    if predicate["rl"]:
        show_table(page.RL_COLUMNS, page.rl_rows(predicate), right=page.RL_COLUMNS[1:])
    print(page.in_total(predicate))
