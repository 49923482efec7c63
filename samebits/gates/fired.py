"""Hazards by the stage that counts them: rows of a statement are made of these counts, and a stage
that lacks one says so as it ends, long before the verdict would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samebits.evidence import rows
from samebits.gates import capsule
from samebits.gates.run import Stage
from samebits.recipe import Recipe

# Hazard of leg B -> the counter of `hooks.vllm.hazards` that has another name.
_COUNTERS = {
    "mixed_batch": "mixed_steps",
    "preempted": "resumed",
    "one_token_prompt": "one_token_prompts",
    "exact_block_prompt": "exact_block_prompts",
    "prefix_hit": "prefix_hit_requests",
}
_SAMPLED = "same_prompt_two_seeds"  # what was sampled decides it, not the scheduler
# Stage -> its row of leg B, with and without states.
ROWS_OF_STATES = {
    "rollout_stress": "decode-sliced/prefill",
    "rollout_paged": "decode-paged/prefill",
}
ROWS = {"rollout_stress": "decode/prefill"}
# Hazards of slices whose counters have their names.
ALIKE = tuple(
    name
    for name in rows.of("B", ROWS_OF_STATES["rollout_stress"]).hazards
    if name not in (*_COUNTERS, _SAMPLED)
)


def scheduled(row: str, counters: Mapping[str, Any]) -> dict[str, int]:
    """Hazards of a row of leg B that vLLM's scheduler decides, from the counters of an engine."""
    names = (name for name in rows.of("B", row).hazards if name != _SAMPLED)
    return {name: counters.get(_COUNTERS.get(name, name), 0) for name in names}


def decoded(row: str, stage: Stage) -> dict[str, int]:
    """All hazards of a row of leg B whose left side `stage` decoded."""
    found = scheduled(row, stage.facts["hazards"])
    if _SAMPLED in rows.of("B", row).hazards:
        first, second = (stage.facts["sequences"][i] for i in capsule.TWINS)
        found[_SAMPLED] = int(first != second)
    # Steps that an engine on a GPU replayed; there are none to replay elsewhere.
    if row != ROWS_OF_STATES["rollout_paged"] and "graph_replays" in stage.facts["hazards"]:
        found[rows.GRAPHS] = stage.facts["hazards"]["graph_replays"]
    return found


def batched(plain: Stage, stress: Stage) -> dict[str, dict[str, int]]:
    """Hazards of leg A by row: counted where the streams of a pair came from, prefill and decode
    apart."""
    together, single = plain.facts["batch_hazards"], plain.facts["alone_hazards"]
    mixed = stress.facts["hazards"]["batch_sizes"].get("16", 0)

    def steps(hazards: Mapping[str, Any], call: str, size: str) -> int:
        return hazards["batch_sizes_of"][call].get(size, 0)

    return {
        "prefill-alone/prefill-batch": {
            "batch_1": steps(single, "score", "1"),
            "batch_16": steps(together, "score", "16"),
        },
        "decode-alone/decode-mixed": {
            "batch_1": steps(single, "generate", "1"),
            "batch_16": mixed,
        },
        "decode-batch/decode-mixed": {"batch_16": steps(together, "generate", "16")},
    }


def refitted(stage: Stage) -> dict[str, int]:
    """Hazards of leg E, from the steps of the aligned RL run."""
    steps = stage.facts["steps"]
    late = steps[1:]
    return {
        "optimizer_step": sum(step["grad_norm"] > 0 for step in steps[:-1]),
        "refit": len(late),
        "prefix_cache_invalidated": sum(step["cache_invalidated"] for step in late),
    }


def missing(recipe: Recipe, name: str, done: Mapping[str, Stage]) -> list[str]:
    """What the verdict will say of hazards that the stage `name` should have fired and did not."""
    stage = done[name]
    wanted = ROWS if recipe.gdn_schedule is None else ROWS_OF_STATES
    leg, counts = "B", dict[str, int]()
    if name in wanted:
        counts = decoded(wanted[name], stage)
    elif name == "rollout_slices":
        counts = {"one_token_slice": stage.facts["one_token_slices"]}
    elif name == "rollout_plain":
        leg = "A"
        for found in batched(stage, done["rollout_stress"]).values():
            counts |= {hazard: counts.get(hazard, 0) + n for hazard, n in found.items()}
    elif name == "rl_aligned":
        leg, counts = "E", refitted(stage)
    return never(recipe, leg, counts)


def never(recipe: Recipe, leg: str, counts: Mapping[str, int]) -> list[str]:
    """A reason, as of the verdict, for each count of 0 whose hazard the recipe asks of a leg."""
    asked = recipe.legs[leg].hazards if leg in recipe.legs else ()
    return [
        f"leg {leg}: hazard {hazard} never fired"
        for hazard, count in counts.items()
        if hazard in asked and not count
    ]
