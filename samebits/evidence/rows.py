"""What a run writes in every row, by leg and name: `gates.legs` writes it, `verify` demands it."""

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

    sentence: str
    hazards: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()


_ROWS: Mapping[str, Row] = {
    "prefill-alone/prefill-batch": Row(
        "A row computed alone equals the row in a batch.", ("batch_1", "batch_16"), _OF_ITSELF
    ),
    "decode-alone/decode-mixed": Row(
        "A request decoded alone equals the request decoded among others, split and preempted.",
        ("batch_1", "batch_16"),
    ),
    "decode-batch/decode-mixed": Row(
        "Sixteen requests decoded side by side equal the same requests split and preempted.",
        ("batch_16",),
    ),
    "decode/prefill": Row(
        "Decode under splits, prefix hits and preemption equals prefill of the same tokens.",
        (
            "split_mid_prompt",
            "mixed_batch",
            "prefix_hit",
            "preempted",
            "one_token_prompt",
            "exact_block_prompt",
            "same_prompt_two_seeds",
        ),
        _OF_ITSELF,
    ),
    "decode-sliced/prefill": Row(
        "Decode after prefill in slices of any length, and preemption, equals prefill at once.",
        (
            "split_mid_prompt",
            "chunk_crossed_in_decode",
            "prefill_ends_on_chunk",
            "prefill_ends_before_chunk",
            "prefill_ends_after_chunk",
            "slice_inside_chunk",
            "two_cross_in_one_step",
            "state_slot_reused",
            "preempted_inside_chunk",
            "mixed_batch",
            "preempted",
            "one_token_prompt",
            "same_prompt_two_seeds",
        ),
        _OF_ITSELF,
    ),
    "decode-paged/prefill": Row(
        "Decode that starts from cached states equals prefill of the same tokens.",
        ("prefix_hit", "resumed_from_state"),
    ),
    "decode-one-token-slices/prefill": Row(
        "Decode after prefill token by token equals prefill at once.", ("one_token_slice",)
    ),
    "decode-sliced/decode-paged": Row(
        "One request has one decode, however its prompt was cut and whatever was cached."
    ),
    "trainer-padded/prefill": Row(
        "The trainer's score of a padded batch equals the rollout's prefill.",
        ("padded",),
        ("stock",),
    ),
    "trainer-packed/prefill": Row(
        "The trainer's score of a packed batch equals the rollout's prefill.", ("packed",)
    ),
    "rollout/trainer-after-refits": Row(
        "After each optimizer step and refit the rollout still equals the trainer.",
        ("optimizer_step", "refit", "prefix_cache_invalidated"),
        ("stock",),
    ),
    **dict.fromkeys(
        ("decode-rows/trainer-rows", "prefill-rows/packed-trainer-rows"),
        Row(
            "The digest of the whole logit row, not only the sampled token, is equal.",
            ("whole_row",),
            ("stock",),
        ),
    ),
    "prefill/fp32-hugging-face": Row(
        "In the mean, the aligned arm is no further from an fp32 oracle than the stock arm."
    ),
}


def of(leg: str, name: str) -> Row:
    """Sentence, hazards and controls of a row; those of leg D follow from its layouts."""
    if leg != "D":
        return _ROWS[name]
    trainer, rollout = (side.rpartition("-tp")[2] for side in name.split("/"))
    return Row(
        f"The trainer on {trainer} rank(s) equals the rollout on {rollout}.",
        ("trainer_tp2", "rollout_tp2"),
    )


# Rows of decoded requests, whose steps a GPU replays from captured graphs.
_DECODED_ROWS = ("decode/prefill", "decode-sliced/prefill")
GRAPHS = "graph_replay"


def hazards(leg: str, name: str, platform: str) -> tuple[str, ...]:
    """What the hazards of a row count on a platform."""
    graphs = (GRAPHS,) if platform == "sm90" and name in _DECODED_ROWS else ()
    return of(leg, name).hazards + graphs


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
_PARTS: Mapping[str, tuple[str, ...]] = {
    "prefill-alone/prefill-batch": ("trainer-padded/prefill",),
    "decode-alone/decode-mixed": _DECODED_ROWS,
    "decode-batch/decode-mixed": _DECODED_ROWS,
    "decode-one-token-slices/prefill": _DECODED_ROWS,
    **dict.fromkeys(_DECODED_ROWS, ("trainer-padded/prefill",)),
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
    return of(leg, name).controls


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
    row = of(record["leg"], record["name"])
    if record["sentence"] != row.sentence:
        yield f"{label}: sentence {record['sentence']}"
    counted, wanted = record["hazards"], hazards(record["leg"], record["name"], recipe.platform)
    if set(counted) != set(wanted):
        yield f"{label}: counts of {', '.join(sorted(set(counted) ^ set(wanted)))}"
    if record["leg"] == "D":
        layouts = record["layouts"]
        ran = {"trainer_tp2": layouts["left"], "rollout_tp2": layouts["right"]}
        for name, layout in ran.items():
            if counted.get(name) != int(layout == "tp2"):
                yield f"{label}: {name} counted {counted.get(name)} times"


def _counts(predicate: Mapping[str, Any]) -> Iterator[str]:
    """Rows over one set of tokens that do not count alike, or hold other values, where every row
    says that its sides are equal; and a row over a part that counts more.

    Rows that differ are left out: the first token that differs ends a sequence that was sampled.
    """
    known = {
        record["name"]: record["tokens"]
        for record in predicate["comparisons"]
        if record["mismatches"] == 0
    }
    # Streams of log-probabilities; those of leg F hold digests of rows.
    streams = {
        record["name"]: record["streams"]
        for record in predicate["comparisons"]
        if record["mismatches"] == 0 and record["leg"] != "F"
    }
    layouts = [r["name"] for r in predicate["comparisons"] if r["leg"] == "D"]
    for whole, others in {**_SAME, "trainer-padded/prefill": (*_OF_ALL, *layouts)}.items():
        for name in others:
            if whole in known and known.get(name, known[whole]) != known[whole]:
                yield f"{name}: {known[name]} tokens, of {known[whole]} in {whole}"
            if whole in streams and streams.get(name, streams[whole]) != streams[whole]:
                yield f"{name}: other streams than {whole}, over the same tokens"
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
