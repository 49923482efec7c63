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


# Rows over one set of tokens: all of the main sequences, or all that decode sampled.
_OF_ALL = ("trainer-packed/prefill", "prefill-rows/packed-trainer-rows")
_SAME: Mapping[str, tuple[str, ...]] = {
    "decode/prefill": ("decode-rows/trainer-rows",),
    "decode-sliced/prefill": (
        "decode-paged/prefill",
        "decode-sliced/decode-paged",
        "decode-rows/trainer-rows",
    ),
}
# Rows over a part of what others hold.
_DECODED = ("decode/prefill", "decode-sliced/prefill")
_PARTS: Mapping[str, tuple[str, ...]] = {
    "prefill-alone/prefill-batch": ("trainer-padded/prefill",),
    "decode-alone/decode-mixed": _DECODED,
    "decode-batch/decode-mixed": _DECODED,
    "decode-one-token-slices/prefill": _DECODED,
    **dict.fromkeys(_DECODED, ("trainer-padded/prefill",)),
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
    yield from _counts(predicate)


def _of(
    record: Mapping[str, Any], predicate: Mapping[str, Any], recipe: recipes.Recipe
) -> Iterator[str]:
    label = f"leg {record['leg']}, {record['name']}"
    allowed = controls(record, predicate, recipe)
    found = record["control"] and record["control"]["name"]
    if found not in (allowed or (None,)):
        yield f"{label}: control {found or 'none'} instead of {' or '.join(allowed) or 'none'}"


def _counts(predicate: Mapping[str, Any]) -> Iterator[str]:
    """Rows over one set of tokens that do not count alike, or one over a part that counts more.

    Rows that differ are left out: the first token that differs ends a sequence that was sampled.
    """
    known = {
        record["name"]: record["tokens"]
        for record in predicate["comparisons"]
        if record["mismatches"] == 0
    }
    layouts = [r["name"] for r in predicate["comparisons"] if r["leg"] == "D"]
    for whole, others in {**_SAME, "trainer-padded/prefill": (*_OF_ALL, *layouts)}.items():
        for name in others:
            if whole in known and known.get(name, known[whole]) != known[whole]:
                yield f"{name}: {known[name]} tokens, of {known[whole]} in {whole}"
    for name, wholes in _PARTS.items():
        for whole in wholes:
            if name in known and known[name] > known.get(whole, known[name]):
                yield f"{name}: {known[name]} tokens, of {known[whole]} in {whole}"
    yield from _counts_of_controls(predicate)


def _counts_of_controls(predicate: Mapping[str, Any]) -> Iterator[str]:
    """Controls over the control capsule as a whole, and leg O, count alike; those of it less."""
    held = {
        (record["leg"], record["name"]): record["control"]
        for record in predicate["comparisons"]
        if record["control"] is not None
    }
    whole = held.get(("C", "trainer-padded/prefill"))
    if whole is None:
        return
    for (leg, name), control in held.items():
        same = leg in "CF" and control["tokens"] == whole["tokens"]
        if not (same or leg in "DE" or (leg in "AB" and control["tokens"] <= whole["tokens"])):
            yield f"leg {leg}, {name}: control of {control['tokens']}, C's of {whole['tokens']}"
    for record in predicate["oracle"]:
        for part in (record, record["control"] or record):
            if part["tokens"] != whole["tokens"]:
                yield f"leg O: {part['tokens']} tokens, C's control of {whole['tokens']}"
    for record in predicate["comparisons"]:
        control = record["control"]
        if record["leg"] == "D" and control and control["tokens"] != record["tokens"]:
            yield f"leg D, {record['name']}: control of {control['tokens']} tokens"
