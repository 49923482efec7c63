"""Which comparisons a run of a case makes: their names are fixed by leg and architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Legs of a model without Gated DeltaNet, but for D.
DENSE: Mapping[str, tuple[str, ...]] = {
    "A": (
        "prefill-alone/prefill-batch",
        "decode-alone/decode-mixed",
        "decode-batch/decode-mixed",
    ),
    "B": ("decode/prefill",),
    "C": ("trainer-padded/prefill", "trainer-packed/prefill"),
    "E": ("rollout/trainer-after-refits",),
    "F": ("decode-rows/trainer-rows", "prefill-rows/packed-trainer-rows"),
    "O": ("prefill/fp32-hugging-face",),
}
# Leg B where layers keep a state.
_OF_STATES = (
    "decode-sliced/prefill",
    "decode-paged/prefill",
    "decode-one-token-slices/prefill",
    "decode-sliced/decode-paged",
)


def has_states(sources: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the recorded sources bind Gated DeltaNet."""
    return any(source["name"].startswith("implementation/gdn.core.") for source in sources)


def of_layouts(trainer: str, rollout: str) -> str:
    """Name of the comparison of two layouts (`tp1`, `tp2` ...) in leg D."""
    return f"trainer-{trainer}/rollout-{rollout}"


def of(leg: str, predicate: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of all comparisons of a leg: none more, none less."""
    if leg == "D":
        sizes = predicate["parameters"].get("layouts", {"trainer_tp": [1], "rollout_tp": [1]})
        return tuple(
            of_layouts(f"tp{a}", f"tp{b}") for a in sizes["trainer_tp"] for b in sizes["rollout_tp"]
        )
    if leg == "B" and has_states(predicate["sources"]):
        return _OF_STATES
    return DENSE[leg]
