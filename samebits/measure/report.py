"""Counts, where the difference sits, and the verdict."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from samebits import mismatch
from samebits.errors import EXIT_DIFFERENT, EXIT_EQUAL, EXIT_NOT_OBSERVED
from samebits.measure.read import Dump, Sequence
from samebits.measure.smells import Smell, Streams, find, within_rounding

MIN_TOKENS = 100
_POSITIONS = (0, 1, 8, 32, 128, 512, 2048, 8192, 32768)
_PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
_WORST = 5
_EXITS = {"EQUAL": EXIT_EQUAL, "DIFFERENT": EXIT_DIFFERENT, "NOT_OBSERVED": EXIT_NOT_OBSERVED}


@dataclass(frozen=True)
class Bucket:
    """One row of a table: `share` is the part of the whole sum of |dlogp|."""

    name: str
    tokens: int
    mismatches: int
    max_abs: float
    mean_abs: float
    share: float


@dataclass(frozen=True)
class Report:
    """`totals` counts tokens that are finite on both sides.

    Of the others, `infinite` counts those that are the same infinity on both sides, which have
    equal bits and no distance, and `unmatched` all that are left.
    """

    files: tuple[str, ...]
    sequences: int
    totals: mismatch.Mismatch
    unmatched: int
    infinite: int
    sequence_ratio_max: float
    sequence_ratio_median: float
    by_position: tuple[Bucket, ...]
    by_probability: tuple[Bucket, ...]
    worst_sequences: tuple[Bucket, ...]
    smells: tuple[Smell, ...]
    verdict: str
    reason: str

    @property
    def exit_code(self) -> int:
        """0 equal, 1 different, 3 nothing compared."""
        return _EXITS[self.verdict]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def measure(dump: Dump, min_tokens: int = MIN_TOKENS) -> Report:
    """Compare the two sides of a dump as fp32 bit patterns.

    verdict: EQUAL, DIFFERENT, or NOT_OBSERVED (no token that is finite on both sides, fewer
    than `min_tokens` equal tokens, or a dump so rounded that its differences say nothing about
    bits).
    """
    rollout = np.concatenate([q.rollout for q in dump.sequences])
    trainer = np.concatenate([q.trainer for q in dump.sequences])
    streams = Streams(dump.sequences, rollout, trainer)
    infinite = int((~streams.finite & (rollout == trainer)).sum())
    unmatched = int((~streams.finite).sum()) - infinite
    totals = mismatch.measure(streams.r, streams.t)
    ratios = [_ratio(q) for q in dump.sequences if q.rollout.size]
    smells = tuple(find(streams))
    if totals.tokens < min_tokens:  # a pattern in a handful of tokens is a guess
        smells = tuple(replace(smell, confidence="low") for smell in smells)
    verdict, reason = _verdict(streams, totals, unmatched, smells, min_tokens)
    if infinite:
        reason += f"; {infinite:,} more are the same infinity on both sides"
    positions = np.concatenate([np.arange(q.rollout.size) for q in dump.sequences])
    owners = np.repeat(np.arange(len(dump.sequences)), [q.rollout.size for q in dump.sequences])
    return Report(
        files=dump.files,
        sequences=len(dump.sequences),
        totals=totals,
        unmatched=unmatched,
        infinite=infinite,
        sequence_ratio_max=max(ratios, default=1.0),
        sequence_ratio_median=float(np.median(ratios)) if ratios else 1.0,
        by_position=_positions(streams, positions[streams.finite]),
        by_probability=_probabilities(streams),
        worst_sequences=_worst(streams, owners[streams.finite]),
        smells=smells,
        verdict=verdict,
        reason=reason,
    )


def _ratio(q: Sequence) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        d = q.trainer - q.rollout
        return float(np.exp(d[np.isfinite(d)].sum()))


def _verdict(streams, totals, unmatched, smells, min_tokens) -> tuple[str, str]:
    if any(smell.name == "other tokens" for smell in smells):
        return "DIFFERENT", "the sides score different tokens"
    if not streams.d.size:
        return "NOT_OBSERVED", "nothing to compare: no token is finite on both sides"
    if within_rounding(streams) and not unmatched:
        return "NOT_OBSERVED", "the dump was rounded: its bits cannot be judged"
    if totals.mismatches or unmatched:
        count = totals.mismatches + unmatched
        return "DIFFERENT", f"{count:,} of {totals.tokens + unmatched:,} tokens differ"
    if totals.tokens < min_tokens:
        return "NOT_OBSERVED", f"{totals.tokens} tokens, fewer than {min_tokens}"
    return "EQUAL", f"all {totals.tokens:,} tokens have equal bits"


def _bucket(name: str, r: np.ndarray, t: np.ndarray, whole: float) -> Bucket:
    found = mismatch.measure(r, t)
    share = found.mean_abs * found.tokens / whole if whole else 0.0
    return Bucket(name, found.tokens, found.mismatches, found.max_abs, found.mean_abs, share)


def _whole(s: Streams) -> float:
    found = mismatch.measure(s.r, s.t)
    return found.mean_abs * found.tokens


def _positions(s: Streams, positions: np.ndarray) -> tuple[Bucket, ...]:
    edges = (*_POSITIONS, np.inf)
    whole = _whole(s)
    rows = []
    for low, high in itertools.pairwise(edges):
        chosen = (positions >= low) & (positions < high)
        if chosen.any():
            name = f"{low:.0f}" if high == low + 1 else f"{low:.0f}..{high - 1:.0f}"
            rows.append(_bucket(name, s.r[chosen], s.t[chosen], whole))
    return tuple(rows)


def _probabilities(s: Streams) -> tuple[Bucket, ...]:
    p = np.exp(np.minimum(s.r, 0.0))
    whole = _whole(s)
    rows = []
    for low, high in itertools.pairwise(_PROBABILITIES):
        chosen = (p >= low) & ((p < high) | (high == 1.0))
        if chosen.any():
            rows.append(_bucket(f"{low:g}..{high:g}", s.r[chosen], s.t[chosen], whole))
    return tuple(rows)


def _worst(s: Streams, owners: np.ndarray) -> tuple[Bucket, ...]:
    sums = np.bincount(owners, np.abs(s.d), minlength=len(s.sequences))
    whole = _whole(s)
    order = [i for i in np.argsort(-sums, kind="stable")[:_WORST] if sums[i] > 0]
    return tuple(
        _bucket(s.sequences[i].id, s.r[owners == i], s.t[owners == i], whole) for i in order
    )
