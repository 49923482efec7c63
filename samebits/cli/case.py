"""`samebits case list|show`: the model cases and what their evidence says."""

from __future__ import annotations

from typing import Annotated

import typer

from samebits.cli.output import show_json, show_table

app = typer.Typer(no_args_is_help=True, help="The model cases and their status.")


@app.command("list")
def list_cases(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the status of every case, recomputed from its evidence.

    Verdicts do not move the exit code; `samebits verify CASE` is for that.
    """
    from samebits.cases import all_statuses

    found = all_statuses()
    if as_json:
        show_json([status.as_dict() for status in found])
        return
    columns = ("case", "verdict", "mismatches of tokens, per leg", "date", "stale")
    rows = [
        (
            status.case,
            status.verdict,
            "\n".join(status.legs()) or "-",
            status.date or "-",
            _first(status.stale),
        )
        for status in found
    ]
    show_table(columns, rows)


def _first(reasons: list[str]) -> str:
    more = f"\nand {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return reasons[0] + more if reasons else "-"


@app.command()
def show(
    case: Annotated[str, typer.Argument(help="Name of a case.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show series, layouts and status of one case."""
    from samebits import recipe as recipes
    from samebits.cases import status

    recipe = recipes.load(case)
    found = status(recipe.case)
    record = {
        "case": recipe.case,
        "recipe": recipe.digest,
        "architecture": recipe.architecture,
        "series": dict(recipe.series),
        "trainer_tp": list(recipe.trainer_tp),
        "rollout_tp": list(recipe.rollout_tp),
        "legs": sorted(recipe.legs),
        "status": found.as_dict(),
    }
    if as_json:
        show_json(record)
        return
    lines = {
        "case": [recipe.case],
        "architecture": [recipe.architecture],
        "recipe": [recipe.digest],
        "series": [f"{upstream}: {name}" for upstream, name in recipe.series.items()],
        "trainer TP": [", ".join(map(str, recipe.trainer_tp))],
        "rollout TP": [", ".join(map(str, recipe.rollout_tp))],
        "legs": [", ".join(sorted(recipe.legs))],
        "verdict": [f"{found.verdict}, {found.date}" if found.date else found.verdict],
        "mismatches": found.legs(),
        "stale": found.stale,
        "not shown": found.not_shown,
    }
    show_table(
        ("", ""),
        [(name, "\n".join(texts)) for name, texts in lines.items() if texts],
        header=False,
    )
