"""`samebits measure`: how far a user's own rollout and trainer log-probabilities are apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebits.cli.output import show_json, show_table

if TYPE_CHECKING:
    from samebits.measure import Report

app = typer.Typer()


@app.command()
def measure(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="One file with both sides, or a rollout file and a trainer file; `-` is stdin."
        ),
    ],
    min_tokens: Annotated[
        int, typer.Option(min=1, help="Fewer equal tokens than this prove nothing.")
    ] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how far two dumps of log-probabilities are apart.

    The report counts tokens whose bits differ, and says where they are and what it looks like.

    FILES are JSON Lines, plain or .gz, one line per sequence, natural logarithms of the sampled
    tokens:

    \b
        {"id": "7", "rollout_logprobs": [-0.1, ..], "trainer_logprobs": [-0.1, ..]}

    `tokens` (ids) and `mask` (0 or 1) are optional lists. verl's names work too:
    rollout_log_probs, old_log_probs, responses, response_mask. Two files (rollout first) are
    joined by `id`.

    Too few tokens, none that is finite, or a rounded dump count as not observed.
    """
    from samebits.measure import measure as compare
    from samebits.measure import read

    report = compare(read(files), min_tokens)
    if as_json:
        show_json(_plain({**report.as_dict(), "exit_code": report.exit_code}))
    else:
        _show(report)
    raise typer.Exit(report.exit_code)


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _show(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    totals = report.totals
    tokens = totals.tokens + report.unmatched + report.infinite
    lines = {
        "tokens": f"{tokens:,} in {report.sequences:,} sequences",
        "different bits": f"{totals.mismatches:,}, and {report.unmatched:,} not finite",
        **({"infinite": f"{report.infinite:,}, the same on both sides"} if report.infinite else {}),
        "|dlogp|": f"max {totals.max_abs:.3g}, mean {totals.mean_abs:.3g}",
        "K3 KL": f"{totals.k3_kl:.3g}",
        "IS ratio": f"max {totals.is_ratio_max:.6g}, median {totals.is_ratio_median:.6g}",
        "per sequence": f"max {report.sequence_ratio_max:.6g}, "
        f"median {report.sequence_ratio_median:.6g}",
    }
    for name, text in lines.items():
        console.print(f"{name:<15} {text}", markup=False)
    if totals.mismatches:
        tables = {
            "position in the sequence": report.by_position,
            "probability in the rollout": report.by_probability,
            "worst sequences": report.worst_sequences,
        }
        for title, rows in tables.items():
            names = ("tokens", "different", "max |dlogp|", "mean |dlogp|", "share")
            cells = [
                (
                    row.name,
                    f"{row.tokens:,}",
                    f"{row.mismatches:,}",
                    f"{row.max_abs:.3g}",
                    f"{row.mean_abs:.3g}",
                    f"{row.share:.0%}",
                )
                for row in rows
            ]
            console.print()
            show_table((title, *names), cells, right=names)
    for number, smell in enumerate(report.smells, start=1):
        head = f"{number}. {smell.kind}: {smell.name} ({smell.confidence} confidence)"
        console.print(f"\n{head}\n   {smell.says}\n   fix: {smell.fix}", markup=False)
    console.print(f"\n{report.verdict}: {report.reason}", markup=False)
    if report.verdict == "EQUAL":
        note = "A trainer that copies the rollout's values (verl's bypass mode) is equal by itself."
        console.print(note, markup=False)
