"""`samebits case list|show`: the model cases and what their evidence says."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="The model cases and their status.")


@app.command("list")
def list_cases(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Status of every case, recomputed from its evidence. Exit code 0 whatever the verdicts are."""
    from samebits.cases import all_statuses

    found = all_statuses()
    if as_json:
        typer.echo(json.dumps([status.as_dict() for status in found], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "verdict", "tokens per leg", "mismatches", "date", "stale", box=None)
    for status in found:
        table.add_row(
            status.case,
            status.verdict,
            "  ".join(f"{leg} {count:,}" for leg, count in status.tokens.items()) or "-",
            str(sum(status.mismatches.values())) if status.tokens else "-",
            status.date or "-",
            "; ".join(status.stale) or "-",
        )
    Console(width=160).print(table)


@app.command()
def show(
    case: Annotated[str, typer.Argument(help="Name of a case.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Recipe digest, series, layouts and status of one case."""
    from samebits import recipe as recipes
    from samebits.cases import status

    recipe = recipes.load(case)
    record = {
        "case": recipe.case,
        "recipe": recipe.digest,
        "architecture": recipe.architecture,
        "series": dict(recipe.series),
        "trainer_tp": list(recipe.trainer_tp),
        "rollout_tp": list(recipe.rollout_tp),
        "legs": sorted(recipe.legs),
        "status": status(recipe.case).as_dict(),
    }
    if as_json:
        typer.echo(json.dumps(record, indent=2))
        return
    for name, value in record.items():
        typer.echo(f"{name:<13}{value if not isinstance(value, dict) else json.dumps(value)}")
