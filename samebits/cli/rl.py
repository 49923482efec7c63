"""`samebits rl CASE`: a short on-policy RL run, with or without alignment."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from samebits.cli.output import show_json, show_table

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
    """Run a short on-policy RL loop and count differing log-probabilities.

    A step is a rollout in vLLM, a score in Megatron, verl's loss, an optimizer step and, unless it
    is the last, a refit. A sequence is numbered step x 1000 + its place in the step.
    """
    from samebits.gates import locate
    from samebits.gates import rl as gate
    from samebits.gates.prove import locked_run
    from samebits.gates.sizes import Size
    from samebits.gates.streams import compare

    with locked_run(case, Size()) as run:
        count = steps or (run.recipe.rl or {}).get("steps", 1)
        stage = gate.run_rl(run, steps=count, arithmetic=arithmetic.value)
    total = compare(stage.streams["rollout"], stage.streams["trainer"])
    if as_json:
        show_json(stage.facts["steps"])
    else:
        _table(stage.facts["steps"])
        values = total.values
        assert values is not None
        print(
            f"{case}, {arithmetic.value}: {total.mismatches:,} of {total.tokens:,} tokens differ "
            f"in {count} steps; max |dlogp| {values.max_abs:.3g}, K3 KL {values.k3_kl:.3g}, "
            f"IS ratio max {values.is_ratio_max:.6g}"
        )
        if arithmetic is Arm.aligned:  # what --locate computes again
            for step in gate.unmoved(stage):
                print(f"- step {step}: grad_norm 0, so its refit sent the weights as they were")
            for first in gate.firsts(stage):
                print(f"repeat: {locate.command(run, first.sequence, locate.REFITS)}")
    raise typer.Exit(1 if total.mismatches else 0)


def _cell(value: float | None) -> str:
    """A number of a step; nothing refits after the last one."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _table(steps) -> None:
    names = (
        *("tokens", "mismatches", "max_abs", "mean_abs", "k3_kl", "is_ratio_max"),
        *("is_ratio_median", "reward", "loss", "grad_norm"),
        *("repeated_cached_tokens", "dropped_blocks"),
    )
    rows = []
    for record in steps:
        cells = [_cell(record.get(name)) for name in names]
        rows.append([str(record["step"]), *cells])
    show_table(("step", *names), rows, right=names)
