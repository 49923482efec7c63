"""Log-probabilities, one rounding at a time in plain torch."""

from __future__ import annotations

import torch

from samebits.ops.reference import fma32
from samebits.ops.scalar import LANES, reference_exp32, reference_log32
from samebits.plan import ReductionPlan

Root = tuple[torch.Tensor, torch.Tensor]


def leaf(x: torch.Tensor) -> Root:
    """(m, s) of one leaf: x fp32 [M, n] without NaN."""
    m = x.amax(dim=1)
    weights = torch.where(m == -torch.inf, 0, reference_exp32(x - m[:, None]).t())
    lanes = [torch.zeros(x.shape[0]) for _ in range(LANES)]
    for j, weight in enumerate(weights):
        lanes[j % LANES] = lanes[j % LANES] + weight
    return m, ReductionPlan.fold(lanes)


def merge(left: Root, right: Root) -> Root:
    """(m, s) of neighbouring parts, each fp32 [M], lower index left; two empty ones stay so."""
    (m1, s1), (m2, s2) = left, right
    m = torch.maximum(m1, m2)
    empty = m == -torch.inf
    e1 = torch.where(empty, 0, reference_exp32(m1 - m))
    e2 = torch.where(empty, 0, reference_exp32(m2 - m))
    return m, fma32(s1, e1, s2 * e2)


def log_softmax(logits: torch.Tensor, plan: ReductionPlan, vocab: int) -> torch.Tensor:
    """logits fp32 [M, V] -> [M, vocab]; see the package for the order."""
    parts = [leaf(logits[:, a:b]) for a, b in plan.cuts(vocab)]
    m, s = ReductionPlan.fold(parts, merge)
    return (logits[:, :vocab] - m[:, None]) - reference_log32(s)[:, None]
