"""Which arms stand behind a comparison of the evidence, and where two of them part."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from samebits import trace
from samebits.gates.locate.arms import Arm
from samebits.gates.streams import FirstDifference, Stream, compare
from samebits.trace import RegionDifference, digests

# Pairs of arms that hold the claim of a case together.
PAIRS = (("decode", "prefill"), ("padded", "prefill"), ("packed", "prefill"), ("decode", "padded"))
REFITS = "rollout/trainer-after-refits"

Pairs = Sequence[tuple[str, str]]
# Comparison -> pairs of arms in which its difference may show, the smallest first.
_BEHIND: Mapping[str, Pairs] = {
    "prefill-alone/prefill-batch": [("prefill", "prefill-batch")],
    "decode-alone/decode-mixed": [("decode", "decode-mixed")],
    "decode-batch/decode-mixed": [("decode-batch", "decode-mixed")],
    "decode/prefill": [("decode", "prefill"), ("decode-mixed", "prefill-batch")],
    "decode-sliced/prefill": [("decode", "prefill"), ("decode-mixed", "prefill-batch")],
    "decode-paged/prefill": [("decode", "prefill"), ("decode-paged", "prefill-batch")],
    "decode-one-token-slices/prefill": [
        ("decode", "prefill"),
        ("decode-one-token", "prefill-batch"),
    ],
    "decode-sliced/decode-paged": [("decode-mixed", "decode-paged")],
    "trainer-padded/prefill": [
        ("padded", "prefill"),
        ("padded", "prefill-batch"),
        ("padded-batch", "prefill"),
    ],
    "trainer-packed/prefill": [
        ("packed", "prefill"),
        ("packed", "prefill-batch"),
        ("packed-batch", "prefill"),
    ],
    REFITS: [("decode", "padded"), ("decode-batch", "padded"), ("decode", "padded-batch")],
    "decode-rows/trainer-rows": [
        ("decode", "padded"),
        ("decode-mixed", "padded"),
        ("decode", "padded-batch"),
    ],
    "prefill-rows/packed-trainer-rows": [
        ("prefill", "packed"),
        ("prefill-batch", "packed"),
        ("prefill", "packed-batch"),
    ],
}


def behind(comparison: str) -> Pairs | None:
    """Pairs of arms behind a comparison of the evidence, by its name; None for any other name."""
    layouts = re.fullmatch(r"trainer-tp(\d+)/rollout-tp(\d+)", comparison)
    if layouts is None:
        return _BEHIND.get(comparison)
    trainer, rollout = ("" if tp == "1" else f"-tp{tp}" for tp in layouts.groups())
    return [(f"padded{trainer}", f"prefill{rollout}")]


def names() -> str:
    """What `behind` knows, for a message."""
    return ", ".join([*_BEHIND, "trainer-tpN/rollout-tpN"])


def who(arm: str) -> str:
    """An arm in words."""
    kind, _, among = arm.partition("-")
    side = "trainer" if kind in ("padded", "packed") else "rollout"
    return f"{side}, {kind}" + (f", {among.replace('-', ' ')}" if among else "")


class Found(Protocol):
    """Arms by name."""

    def __getitem__(self, name: str, /) -> Arm: ...


@dataclass(frozen=True)
class Located:
    """Outcome for the pair of arms left and right; first and region are None where all was equal.

    note   why no region was reached
    agree  positions whose log-probabilities agree, and how many were compared; with a `first`
    last   where no region differs and `first` does: what the last step, from logits to
           log-probabilities, was given and what it is in either arm, by name
    """

    left: str
    right: str
    first: FirstDifference | None
    region: RegionDifference | None
    note: str | None = None
    agree: tuple[Sequence[int], int] = ((), 0)
    last: Mapping[str, str] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Whether the two arms differ somewhere."""
        return self.first is not None or self.region is not None


def pair(found: Found, left: str, right: str, position: int | None = None) -> Located:
    """Compare two arms. Rows up to the one that predicts the first token that differs are looked
    at, or `position` where none does; a response that alone came out otherwise ends them."""
    try:
        a, b = found[left], found[right]
    except ValueError as error:
        return Located(left, right, None, None, f"not traced: {error}")
    other = _other_token(a.stream, b.stream)
    if other is not None:
        a, b = (Arm(_before(arm.stream, other), arm.calls) for arm in (a, b))
    first = compare(a.stream, b.stream).first
    agree = _agreeing(a.stream, b.stream) if first else ((), 0)
    limit = first.position if first else position
    if other is not None:
        limit = min(other, limit or other)
    try:
        region = trace.first_difference(a.calls, b.calls, limit)
    except ValueError as error:
        return Located(left, right, first, None, f"not traced: {error}", agree)
    last = _last_step(a, b, first.position) if first and region is None else {}
    return Located(left, right, first, region, agree=agree, last=last)


def _last_step(a: Arm, b: Arm, position: int) -> dict[str, str]:
    """The row of logits that predicts `position`, one digest for both arms, and the calls that made
    log-probabilities of it and of others."""
    found = {"calls": f"{_scored(a)} left, {_scored(b)} right"}
    row, other = (_logits(arm, position - 1) for arm in (a, b))
    if row is not None and other is not None:  # no region differs, so neither do they
        (digest,) = digests.of_rows(row.astype(np.uint64))
        found["input"] = f"{int(digest):016x}"
    return found


def _logits(arm: Arm, position: int) -> np.ndarray | None:
    """Logits [1, V] of the row at `position`, as bit patterns, where the arm recorded them."""
    for call in arm.calls:
        mine = np.flatnonzero(call.positions == position)
        if call.region == "gemm.lm_head" and mine.size:
            return call.output[mine[:1]]
    return None


def _scored(arm: Arm) -> str:
    """`log_softmax of 95 rows`, by function; with several calls, from the fewest rows to most."""
    shown = []
    for function in sorted({one.function for one in arm.scored}):
        calls = [one for one in arm.scored if one.function == function]
        rows, count = sorted(one.rows for one in calls), sum(one.count for one in calls)
        of = f"{rows[0]}" if rows[0] == rows[-1] else f"{rows[0]} to {rows[-1]}"
        shown.append(
            f"{function} of {of} row{'s' * (rows[-1] != 1)}"
            + (f" in {count} calls" if count > 1 else "")
        )
    return ", ".join(shown) or "none of ops.logprob"


def search(found: Found, pairs: Pairs, position: int | None = None) -> Located:
    """The first of `pairs` that differs, or else the last of those that could be compared."""
    tried = []
    for left, right in pairs:
        tried.append(pair(found, left, right, position))
        if tried[-1].differs:
            return tried[-1]
    compared = [one for one in tried if one.note is None]
    return (compared or tried)[-1]


def _other_token(a: Stream, b: Stream) -> int | None:
    """First position at which the arms hold different tokens (a sampled response may change)."""
    left, right = a.columns(), b.columns()
    _, i, j = np.intersect1d(left["position"], right["position"], return_indices=True)
    wrong = np.flatnonzero(left["token"][i] != right["token"][j])
    return int(left["position"][i][wrong[0]]) if wrong.size else None


def _agreeing(a: Stream, b: Stream) -> tuple[Sequence[int], int]:
    left, right = a.columns(), b.columns()
    both, i, j = np.intersect1d(left["position"], right["position"], return_indices=True)
    return both[left["bits"][i] == right["bits"][j]].tolist(), len(both)


def _before(stream: Stream, position: int) -> Stream:
    columns = stream.columns()
    keep = columns["position"] < position
    return Stream({name: column[keep] for name, column in columns.items()})
