"""`samebits trace CASE`: list what both engines really run, by region, and what no region holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebits.cli.output import show_json, show_table

if TYPE_CHECKING:
    from samebits.gates.inventory import Inventory

app = typer.Typer()


@app.command()
def trace(
    case: Annotated[str, typer.Argument(help="Name of a case, see `samebits case list`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the inventory.")] = False,
) -> None:
    """Run one sequence through both engines and list every operator, by region.

    Decode, prefill and the trainer's padded and packed batches are traced, and compared region by
    region. Exit code 1: two of them differ. Exit code 3: an engine summed or multiplied outside of
    all regions, or made a log-probability there, called a region that the contract does not bind,
    never called one that it binds, or no operator of its passes was seen.
    """
    from samebits.casework.inventory import PROBLEMS
    from samebits.gates import inventory
    from samebits.gates.prove import locked_run
    from samebits.gates.sizes import Size

    with locked_run(case, Size.quick()) as run:
        found = inventory.take(run)
    if as_json:
        show_json(found.as_dict())
    else:
        _tables(found)
        for name in PROBLEMS:
            for one in getattr(found, name):
                print(f"- {name}: {one}")
        print(_sentence(run.recipe.case, found))
    problems = any(getattr(found, name) for name in PROBLEMS)
    raise typer.Exit(1 if found.differing else 3 if problems else 0)


def _tables(found: Inventory) -> None:
    arms = list(found.calls)
    regions = dict.fromkeys(region for calls in found.calls.values() for region in calls)
    rows = [
        [region, found.bound.get(region, "none"), *_counts(found.calls, region)]
        for region in regions
    ]
    show_table(("region", "implementation", *arms), rows, right=arms)
    places = sorted({place for calls in found.outside.values() for place in calls})
    rows = [[name, kind, phase, *_counts(found.outside, (phase, kind, name))]
            for phase, kind, name in places]  # fmt: skip
    print("\nTorch operators outside of all regions that make floats:")
    show_table(("operator", "kind", "phase", *arms), rows, right=arms)


def _counts(found: Mapping[str, Mapping[Any, int]], key: Any) -> list[str]:
    """Calls of one row of a table, arm by arm."""
    return [str(calls.get(key, "")) for calls in found.values()]


def _sentence(case: str, found: Inventory) -> str:
    from samebits.trace.operators import POINTWISE, REDUCES

    called = {region for calls in found.calls.values() for region in calls}
    counts = {
        phase: [len(found.outside_of_regions(phase, kind)) for kind in (POINTWISE, REDUCES)]
        for phase in ("forward", "sampling")
    }
    (pointwise, reducing), (chosen, drawn) = counts.values()
    where = f", first in {found.first}" if found.first else ""
    return (
        f"{case}: {len(called)} regions called, {len(found.unbound)} of them not bound; outside "
        f"of regions {pointwise} pointwise operators and {reducing} that reduce, and {chosen} and "
        f"{drawn} while sampling; {len(found.differing)} of {len(found.pairs)} pairs differ{where}"
    )
