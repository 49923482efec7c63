"""`samebits verify` and `samebits explain`: recompute a verdict; say what an error id means."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer()

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def verify(
    target: Annotated[str, typer.Argument(help="Evidence file, or case.", metavar="FILE|CASE")],
    as_json: Json = False,
) -> None:
    """Recompute the verdict of recorded evidence, or of a reproduction, from its counts.

    Exit codes: 0 EQUAL (or REPRODUCED) and fresh, 1 DIFFERENT, 2 forged, truncated or of another
    schema, 3 NOT_OBSERVED or STALE, 4 internal error.
    """
    from samebits.errors import Refused, word
    from samebits.evidence import reproduction
    from samebits.evidence import verify as check

    path = Path(target)
    if path.suffix == ".json" and not path.is_file():
        raise Refused(
            "SB0303",
            seen=f"no such file: {path}",
            required="an evidence file, or the name of a case",
            hint=f"ls {word(path if path.is_dir() else path.parent)}",
        )
    if path.suffix == ".json" and reproduction.is_one(path):
        checked = reproduction.check(path)
        report = checked.as_dict()
        show = json.dumps(report, indent=2) if as_json else "\n".join(reproduction_lines(report))
        typer.echo(show)
        raise typer.Exit(checked.exit_code)
    result = check(target)
    report = result.as_dict()
    typer.echo(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report)))
    raise typer.Exit(result.exit_code)


def reproduction_lines(report: dict[str, Any]) -> list[str]:
    """What a person reads of a reproduction: counts of both runs, reasons, status."""
    second = {(row["leg"], row["name"]): row for row in report["rerun"]["counts"]}
    lines = [f"{'leg':<5}{'pair':<36}{'recorded':>20}{'second run':>20}"]
    for row in report["recorded"]["counts"]:
        other = second.get((row["leg"], row["name"]))
        cells = [_count(row), "-" if other is None else _count(other)]
        lines.append(f"{row['leg']:<5}{row['name']:<36}{cells[0]:>20}{cells[1]:>20}")
    lines += [f"  - {reason}" for reason in report["reasons"]]
    lines += [f"  stale: {reason}" for reason in report["stale"]]
    same = report["recorded"]["platform"] == report["rerun"]["platform"]
    lines.append(f"  {'the same platform' if same else 'another platform: bits not compared'}")
    return [*lines, "", f"{report['case']}: {report['status']} by {report['operator']}"]


def _count(row: dict[str, Any]) -> str:
    wrong = "distances" if row["mismatches"] is None else f"{row['mismatches']:,}"
    return f"{wrong} of {row['tokens']:,}"


def _lines(report: dict[str, Any]) -> list[str]:
    from samebits.recipe import qualified

    lines = [f"{'leg':<5}{'verdict':<14}{'tokens':>10}{'mismatches':>12}"]
    for leg, row in report["legs"].items():
        mismatches = "oracle" if leg == "O" else f"{row['mismatches']:,}"
        lines.append(f"{leg:<5}{row['verdict']:<14}{row['tokens']:>10,}{mismatches:>12}")
    lines += [f"  - {reason}" for reason in report["reasons"]]
    lines += [f"  stale: {reason}" for reason in report["stale"]]
    by = report["reproductions"]
    lines.append(f"  reproduced by {by} operators" if by else "  not reproduced by anybody")
    return [*lines, "", f"{report['case']}: {qualified(report['status'], report['scope'])}"]


@app.command()
def explain(
    error_id: Annotated[
        str | None, typer.Argument(help="Error id; all ids by default.", metavar="ID")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what an error id means, why it is an error, and what to do."""
    from samebits.errors import Refused, catalog

    known = dict(sorted(catalog().items()))
    if error_id is None:
        rows = [{"id": key, **known[key]} for key in known]
        text = "\n".join(f"{row['id']}  {row['title']}" for row in rows)
        typer.echo(json.dumps(rows, indent=2) if as_json else text)
        return
    record = known.get(error_id.upper())
    if record is None:
        raise Refused(
            "SB0808",
            seen=f"error id {error_id}",
            required=f"one of the {len(known)} ids of the catalog",
            hint="samebits explain",
        )
    if as_json:
        typer.echo(json.dumps({"id": error_id.upper(), **record}, indent=2))
        return
    typer.echo(f"{error_id.upper()} {record['title']}")
    for name in ("why", "fix"):
        body = textwrap.fill(record[name], 96, initial_indent="  ", subsequent_indent="  ")
        typer.echo(f"\n{name}:\n{body}")
