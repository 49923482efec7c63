"""How far apart two streams of log-probabilities are, counted on bit patterns.

All inputs are fp32 log-probabilities of the same tokens: `rollout` as the engine sampled them,
`trainer` as the trainer scored them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from samebits import bits


@dataclass(frozen=True)
class Mismatch:
    """tokens and mismatches are counts; the rest is in nats or dimensionless, computed in float64.

    k3_kl          mean of exp(d) - 1 - d with d = trainer - rollout (Schulman's k3 estimator)
    is_ratio_*     importance ratio exp(d); exactly 1 where the bits agree
    """

    tokens: int
    mismatches: int
    max_abs: float
    mean_abs: float
    k3_kl: float
    is_ratio_max: float
    is_ratio_median: float

    def as_dict(self) -> dict[str, float | int]:
        """For JSON."""
        return asdict(self)


def as_bits(logprobs) -> np.ndarray:
    """uint32 patterns of fp32 log-probabilities: array, tensor, list of floats, or patterns."""
    if isinstance(logprobs, np.ndarray) and logprobs.dtype == np.uint32:
        return logprobs
    if hasattr(logprobs, "detach"):
        logprobs = logprobs.detach().float().cpu().numpy()
    return bits.int_view(np.asarray(logprobs, dtype=np.float32))


def measure(rollout, trainer) -> Mismatch:
    """Compare two equally long streams; an element that is NaN on either side is a mismatch.

    Also where both sides hold the same NaN: it is no number that they agree on. Distances are NaN
    then, so that whoever asks for a finite one sees it.
    """
    left, right = as_bits(rollout).ravel(), as_bits(trainer).ravel()
    if left.size != right.size:
        raise ValueError(f"{left.size} rollout tokens against {right.size} trainer tokens")
    if left.size == 0:
        return Mismatch(0, 0, 0.0, 0.0, 0.0, 1.0, 1.0)
    a, b = left.view(np.float32), right.view(np.float32)
    same = (left == right) & ~np.isnan(a)
    # Equal bits give a difference of exactly zero, also where both are -inf.
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.where(same, 0.0, b.astype(np.float64) - a.astype(np.float64))
        ratio = np.exp(d)
        k3 = np.where(np.isposinf(ratio), np.inf, ratio - 1.0 - d)
    return Mismatch(
        tokens=int(left.size),
        mismatches=int((~same).sum()),
        max_abs=float(np.abs(d).max()),
        mean_abs=float(np.abs(d).mean()),
        k3_kl=float(k3.mean()),
        is_ratio_max=float(ratio.max()),
        is_ratio_median=float(np.median(ratio)),
    )
