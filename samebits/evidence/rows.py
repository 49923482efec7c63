"""What a run writes in every row, by leg and name: `gates.prove` writes it, `verify` demands it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from samebits import faults
from samebits import recipe as recipes
from samebits.evidence import pairs

# Stock against itself, or the planted fault where stock happens to agree with itself.
_OF_ITSELF = ("stock", "k_cut_by_rows")


@dataclass(frozen=True)
class Row:
    """controls: names of negative controls, of which it holds one; none where it holds none."""

    controls: tuple[str, ...] = ()


_ROWS: Mapping[str, Row] = {
    "prefill-alone/prefill-batch": Row(_OF_ITSELF),
    "decode-alone/decode-mixed": Row(),
    "decode-batch/decode-mixed": Row(),
    "decode/prefill": Row(_OF_ITSELF),
    "decode-sliced/prefill": Row(_OF_ITSELF),
    "decode-paged/prefill": Row(),
    "decode-one-token-slices/prefill": Row(),
    "decode-sliced/decode-paged": Row(),
    "trainer-padded/prefill": Row(("stock",)),
    "trainer-packed/prefill": Row(),
    "rollout/trainer-after-refits": Row(("stock",)),
    "decode-rows/trainer-rows": Row(("stock",)),
    "prefill-rows/packed-trainer-rows": Row(("stock",)),
}


def controls(
    record: Mapping[str, Any], predicate: Mapping[str, Any], recipe: recipes.Recipe
) -> tuple[str, ...]:
    """Negative controls of a row, of which it holds one; empty where it holds none."""
    leg, name = record["leg"], record["name"]
    if leg == "O":
        named = recipe.legs["O"].control
        return (named if named in faults.PLANTED else "rope_base_doubled",)
    if leg == "D":
        planted = name == pairs.of_layouts(f"tp{max(recipe.trainer_tp)}", "tp1")
        return ("rank_order_sum",) if planted else ()
    if name == "trainer-packed/prefill" and pairs.has_states(predicate["sources"]):
        return ("other_gdn_schedule",)
    return _ROWS[name].controls


def problems(predicate: Mapping[str, Any], recipe: recipes.Recipe) -> Iterator[str]:
    """What no run of the case writes in its rows. Other comparisons than its own are judged."""
    for record in [*predicate["comparisons"], *predicate["oracle"]]:
        leg = record["leg"]
        if leg in recipe.legs and record["name"] in pairs.of(leg, predicate):
            yield from _of(record, predicate, recipe)


def _of(
    record: Mapping[str, Any], predicate: Mapping[str, Any], recipe: recipes.Recipe
) -> Iterator[str]:
    label = f"leg {record['leg']}, {record['name']}"
    allowed = controls(record, predicate, recipe)
    found = record["control"] and record["control"]["name"]
    if found not in (allowed or (None,)):
        yield f"{label}: control {found or 'none'} instead of {' or '.join(allowed) or 'none'}"
