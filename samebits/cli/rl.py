"""`samebits rl CASE`: a short on-policy RL run, with or without alignment."""

from __future__ import annotations

import enum
import json
from typing import Annotated

import typer

app = typer.Typer()


class Arm(enum.StrEnum):
    """Arithmetic of the run: `aligned`, or `stock` for the control."""

    aligned = "aligned"
    stock = "stock"


@app.command()
def rl(
    case: Annotated[str, typer.Argument(help="Name of a case, see `samebits case list`.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Steps; default: the recipe's.")] = None,
    arithmetic: Annotated[Arm, typer.Option(help="Which operators both engines use.")] = (
        Arm.aligned
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the records of all steps.")
    ] = False,
) -> None:
    """Rollout in vLLM, score in Megatron, verl's loss, optimizer step, refit, and again.

    Exit code: 0 when no log-probability of the run differs in a bit, else 1.
    """
    from samebits.gates.prove import Size, locked_run
    from samebits.gates.rl import run_rl
    from samebits.gates.streams import compare

    with locked_run(case, Size()) as run:
        count = steps or (run.recipe.rl or {}).get("steps", 1)
        stage = run_rl(run, steps=count, arithmetic=arithmetic.value)
    total = compare(stage.streams["rollout"], stage.streams["trainer"])
    if as_json:
        print(json.dumps(stage.facts["steps"], indent=1))
    else:
        _table(stage.facts["steps"])
        values = total.values
        assert values is not None
        print(
            f"{case}, {arithmetic.value}: {total.mismatches:,} of {total.tokens:,} tokens differ "
            f"in {count} steps; max |dlogp| {values.max_abs:.3g}, K3 KL {values.k3_kl:.3g}, "
            f"IS ratio max {values.is_ratio_max:.6g}"
        )
    raise typer.Exit(1 if total.mismatches else 0)


def _table(steps) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("step", box=None, pad_edge=False)
    names = ("tokens", "mismatches", "max_abs", "mean_abs", "k3_kl", "is_ratio_max")
    for name in (*names, "is_ratio_median", "reward", "loss", "grad_norm"):
        table.add_column(name, justify="right")
    for record in steps:
        row = [record[name] for name in (*names, "is_ratio_median", "reward", "loss", "grad_norm")]
        cells = [f"{v:,}" if isinstance(v, int) else f"{v:.4g}" for v in row]
        table.add_row(str(record["step"]), *cells)
    Console(width=140).print(table)
