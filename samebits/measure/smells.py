"""What a difference smells of. Each smell names the numbers that say so.

d = trainer - rollout, per token. The thresholds separate the synthetic cases of
`tests/cli/test_measure.py` with room on both sides; a smell is a hint, the counts are the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from samebits.measure.read import Sequence


@dataclass(frozen=True)
class Smell:
    """kind: `semantic` (other quantity), `numeric` (other rounding) or `format` (the dump)."""

    name: str
    kind: str
    confidence: str
    says: str
    fix: str
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Streams:
    """All tokens in one row. `finite` marks those with finite values on both sides."""

    sequences: Many[Sequence]
    rollout: np.ndarray
    trainer: np.ndarray

    def __post_init__(self) -> None:
        finite = np.isfinite(self.rollout) & np.isfinite(self.trainer)
        object.__setattr__(self, "finite", finite)
        object.__setattr__(self, "r", self.rollout[finite])
        object.__setattr__(self, "t", self.trainer[finite])
        object.__setattr__(self, "d", self.t - self.r)
        object.__setattr__(self, "mean", float(np.abs(self.d).mean()) if self.d.size else 0.0)

    finite: np.ndarray = field(init=False)
    r: np.ndarray = field(init=False)
    t: np.ndarray = field(init=False)
    d: np.ndarray = field(init=False)
    mean: float = field(init=False)


def find(streams: Streams) -> list[Smell]:
    """Smells in the order in which to fix them."""
    found = [smell(streams) for smell in (_other_tokens, _not_a_number, _format)]
    if not within_rounding(streams):
        asked = _EXPLANATIONS if streams.d.size else (_infinite,)
        found.append(next(filter(None, (smell(streams) for smell in asked)), None))
    return sorted((s for s in found if s), key=lambda s: _ORDER.index(s.kind))


_FEW = 8  # fewer tokens fit any line
_ORDER = ("semantic", "format", "numeric")


def _other_tokens(s: Streams) -> Smell | None:
    pairs = [
        (q.rollout_tokens, q.trainer_tokens)
        for q in s.sequences
        if q.rollout_tokens is not None and q.trainer_tokens is not None
    ]
    differing = sum(int((a != b).sum()) for a, b in pairs)
    if not differing:
        return None
    total = sum(a.size for a, _ in pairs)
    return Smell(
        "other tokens",
        "semantic",
        "high",
        f"{differing} of {total} token ids differ between the two sides",
        "Pass token ids from rollout to trainer; never tokenise the text again.",
        {"differing": differing, "tokens": total},
    )


def _not_a_number(s: Streams) -> Smell | None:
    left, right = int(np.isnan(s.rollout).sum()), int(np.isnan(s.trainer).sum())
    if not left + right:
        return None
    return Smell(
        "not a number",
        "semantic",
        "high",
        f"{left} rollout and {right} trainer values are NaN or null",
        "Mask tokens without a log-probability; find the layer that overflows otherwise.",
        {"rollout": left, "trainer": right},
    )


def within_rounding(s: Streams) -> bool:
    """A side is rounded, and by enough to explain every difference."""
    step = max(rounding_step(s.r), rounding_step(s.t))
    return step > 0 and bool(np.abs(s.d).max(initial=0.0) <= 2 * step)


def _format(s: Streams) -> Smell | None:
    for side, values in (("rollout", s.r), ("trainer", s.t)):
        if step := rounding_step(values):
            return Smell(
                "rounded dump",
                "format",
                "high",
                f"the {side} values carry a step of about {step:.1g}: bits cannot be judged",
                "Dump fp32 with all digits: `json.dumps(x.float().tolist())`, no bf16, no `%.4f`.",
                {"step": step},
            )
    return None


def rounding_step(values: np.ndarray) -> float:
    """Largest step of values that were rounded to few digits or stored in 16 bits; 0 for fp32."""
    values = values[values != 0]
    if values.size < 8:
        return 0.0
    largest = float(np.abs(values).max())
    sample = values[:: max(1, values.size // 2000)]
    decimals = (d for d in range(1, 7) if _most(np.round(values, d) == values))
    digits = (d for d in range(2, 7) if _most([float(f"{v:.{d}g}") == v for v in sample]))
    steps = [10.0**-d for d in itertools.islice(decimals, 1)]
    steps += [largest * 10.0 ** (1 - d) for d in itertools.islice(digits, 1)]
    narrow = values.astype(np.float32)
    if np.array_equal(narrow.astype(np.float64), values):
        if _most(narrow.view(np.uint32) & 0xFFFF == 0):
            steps.append(largest * 2.0**-7)
        with np.errstate(over="ignore"):
            if _most(narrow.astype(np.float16).astype(np.float32) == narrow):
                steps.append(largest * 2.0**-10)
    return max(steps, default=0.0)


def _most(hits: np.ndarray | list[bool]) -> bool:
    return bool(np.mean(hits) > 0.98)


def _residual(d: np.ndarray) -> float:
    return float(np.abs(d - np.median(d)).mean())


def _shifted(s: Streams) -> Smell | None:
    if s.mean < 0.02:
        return None
    best = (np.inf, 0)
    for shift in (-2, -1, 1, 2):
        gaps = []
        for q in s.sequences:
            a = q.rollout[max(0, -shift) : q.rollout.size - max(0, shift)]
            b = q.trainer[max(0, shift) : q.trainer.size - max(0, -shift)]
            with np.errstate(invalid="ignore"):
                gaps.append(np.abs(b - a))
        gap = np.concatenate(gaps)
        gap = gap[np.isfinite(gap)]
        if gap.size >= 16:
            best = min(best, (float(gap.mean()), shift))
    if best[0] > 0.2 * s.mean:
        return None
    return Smell(
        "shifted tokens",
        "semantic",
        "high" if best[0] < 0.05 * s.mean else "medium",
        f"read {best[1]:+d} token further in the trainer, the mean |dlogp| falls from "
        f"{s.mean:.3g} to {best[0]:.3g}",
        "Align logits with labels: the logits at position i score token i + 1.",
        {"shift": best[1], "mean": s.mean, "mean_moved": best[0]},
    )


def _unrelated(s: Streams) -> Smell | None:
    if s.d.size < 32 or s.mean < 0.5 or s.r.std() == 0 or s.t.std() == 0:
        return None
    correlation = float(np.corrcoef(s.r, s.t)[0, 1])
    if correlation > 0.3:
        return None
    return Smell(
        "unrelated values",
        "semantic",
        "high",
        f"the two sides correlate with only {correlation:.2f}",
        "Check that rows are joined rightly and that both sides hold the same weights.",
        {"correlation": correlation},
    )


def _infinite(s: Streams) -> Smell | None:
    left, right = int(np.isneginf(s.rollout).sum()), int(np.isneginf(s.trainer).sum())
    if left == right:
        return None
    side, count = ("rollout", left) if left > right else ("trainer", right)
    return Smell(
        "truncated support",
        "semantic",
        "high",
        f"{count} {side} values are -inf: top-p, top-k, min-p or a token mask removed the token",
        "Sample with top_p=1, top_k=-1, min_p=0, or score under the same mask on both sides.",
        {"infinite": count},
    )


def _offset(s: Streams) -> Smell | None:
    offset = float(np.median(s.d))
    if s.d.size < _FEW or abs(offset) < 1e-4 or _residual(s.d) > 0.1 * abs(offset):
        return None
    return Smell(
        "constant offset",
        "semantic",
        "high",
        f"trainer = rollout {offset:+.6g} for nearly every token",
        "Normalise both sides over the same vocabulary (padded rows, masked tokens) once.",
        {"offset": offset, "residual": _residual(s.d)},
    )


_BASES = {"base-2 logarithms": 1 / np.log(2), "base-10 logarithms": 1 / np.log(10)}


def _factor(s: Streams) -> Smell | None:
    power = float(s.r @ s.r)
    if s.d.size < _FEW or power == 0:
        return None
    factor = float(s.r @ s.t) / power
    residual = float(np.abs(s.t - factor * s.r).mean())
    if abs(factor - 1) < 1e-3 or residual > 0.1 * s.mean:
        return None
    known = [n for n, b in _BASES.items() if min(abs(factor / b - 1), abs(factor * b - 1)) < 5e-3]
    return Smell(
        "constant factor",
        "semantic",
        "high",
        f"trainer = {factor:.6g} x rollout" + (f": {known[0]} on one side" if known else ""),
        "Use natural logarithms on both sides, and divide logits, not log-probabilities, by T.",
        {"factor": factor, "residual": residual},
    )


def _temperature(s: Streams) -> Smell | None:
    """log softmax(z / T) is steeper than log softmax(z) for T < 1: d grows with the logprob."""
    if s.d.size < 64 or s.mean < 1e-3 or s.r.std() == 0 or s.d.std() == 0:
        return None
    correlation = float(np.corrcoef(s.r, s.d)[0, 1])
    slope = float(np.polyfit(s.r, s.t, 1)[0])
    if abs(correlation) < 0.6 or abs(slope - 1) < 2e-3:
        return None
    cooler, other = ("trainer", "rollout") if slope > 1 else ("rollout", "trainer")
    return Smell(
        "temperature",
        "semantic",
        "high" if abs(correlation) > 0.8 else "medium",
        f"dlogp follows logp (correlation {correlation:.2f}, slope {slope:.3g}): the {cooler} "
        f"looks divided by a lower temperature than the {other}",
        "Use temperature 1, or score with the sampler's temperature and logprobs_mode="
        "processed_logprobs; vLLM's raw mode ignores the temperature.",
        {"correlation": correlation, "slope": slope},
    )


def _padding(s: Streams) -> Smell | None:
    if s.mean < 1e-3:
        return None
    lonely = (s.r == 0) != (s.t == 0)
    if lonely.mean() < 0.005 or np.abs(s.d[lonely]).sum() < 0.8 * np.abs(s.d).sum():
        return None
    return Smell(
        "padding counted",
        "semantic",
        "medium",
        f"{lonely.mean():.1%} of the tokens are exactly 0 on one side only, the rest agrees",
        "Give the response mask with the dump, and apply one mask on both sides.",
        {"share": float(lonely.mean())},
    )


def _renormalised(s: Streams) -> Smell | None:
    moved = s.d[np.abs(s.d) > 1e-4]
    if moved.size < 32 or s.mean < 1e-3:
        return None
    share = float((moved < 0).mean())
    if 0.02 < share < 0.98:
        return None
    side = "rollout" if share >= 0.98 else "trainer"
    kept = float(np.exp(-np.abs(moved).max()))
    return Smell(
        "renormalised support",
        "semantic",
        "medium",
        f"{moved.size} tokens moved, {max(share, 1 - share):.1%} of them higher in the {side}, as "
        f"after top-p, top-k or min-p; the least kept mass would be {kept:.3g}",
        "Sample with top_p=1, top_k=-1, min_p=0, or compare raw log-probabilities on both sides.",
        {"one_sided": max(share, 1 - share), "least_mass": kept},
    )


def _few_sequences(s: Streams) -> Smell | None:
    """A few sequences that are far off, among many that are near."""
    if len(s.sequences) < 10 or s.mean < 1e-3:
        return None
    with np.errstate(invalid="ignore"):
        sums = [np.abs(q.trainer - q.rollout) for q in s.sequences]
    totals = np.array([g[np.isfinite(g)].sum() for g in sums])
    order = np.argsort(-totals, kind="stable")
    shares = np.cumsum(totals[order]) / totals.sum()
    worst = int(np.searchsorted(shares, 0.8)) + 1  # the fewest that carry most of it
    if worst > max(1, len(totals) // 10):
        return None
    share = float(shares[worst - 1])
    names = [s.sequences[i].id for i in order[:worst][:3]]
    return Smell(
        "few sequences",
        "semantic",
        "medium",
        f"{worst} of {len(totals)} sequences carry {share:.0%} of the difference, "
        f"first {', '.join(names)}",
        "Look for stale weights or KV cache after a refit, a preempted request, or a wrong join.",
        {"sequences": worst, "share": share},
    )


def _numeric(s: Streams) -> Smell | None:
    moved = s.d[s.d != 0]
    if not moved.size:
        return None
    up = float((moved > 0).mean())
    largest = float(np.abs(moved).max())
    balanced = 0.3 < up < 0.7 or moved.size < 32
    coarse = s.mean > 1e-5
    return Smell(
        "other rounding" if balanced else "one-sided drift",
        "numeric",
        "high" if balanced and s.mean < 0.05 else "medium" if balanced else "low",
        f"{moved.size} of {s.d.size} tokens moved, {up:.0%} of them up, mean |dlogp| {s.mean:.3g}, "
        f"largest {largest:.3g}: "
        + ("16-bit kernels that round elsewhere" if coarse else "another order of fp32 sums"),
        "Make sure that both sides hold the same weights (no adapter merged on one of them, no "
        "quantisation, no older step); then use one set of kernels: samebits prove CASE"
        if coarse
        else "Fix the order of the log-sum-exp and of row-parallel sums on both sides.",
        {"up": up, "mean": s.mean, "max": largest},
    )


# The first that fits explains the difference; the weaker ones after it are not asked.
_EXPLANATIONS = (
    _shifted,
    _unrelated,
    _infinite,
    _padding,
    _offset,
    _factor,
    _temperature,
    _renormalised,
    _few_sequences,
    _numeric,
)
