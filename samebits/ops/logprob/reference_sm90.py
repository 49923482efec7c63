"""The schedule of log-probabilities on Hopper, one rounding at a time in plain torch."""

from __future__ import annotations

import torch

from samebits.ops.logprob.reference import Root, merge
from samebits.ops.rms_norm.reference_sm90 import fold
from samebits.ops.scalar import reference_exp32, reference_log32
from samebits.plan import ReductionPlan

PIECE = 128  # columns of a leaf that are summed against one maximum
NEAR = 2  # neighbours added first


def leaf(x: torch.Tensor) -> Root:
    """(m, s) of one leaf: x fp32 [M, n]."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % PIECE), value=-torch.inf)
    x = x.unflatten(1, (-1, PIECE))
    m = x.amax(dim=2)
    e = torch.where(x == -torch.inf, 0, reference_exp32(x - m[..., None]))
    s = fold(e, NEAR)
    top = m.amax(dim=1)
    scaled = torch.where(m == -torch.inf, s, s * reference_exp32(m - top[:, None]))
    return top, fold(scaled, 1)


def selected(
    logits: torch.Tensor, targets: torch.Tensor, plan: ReductionPlan, vocab: int
) -> torch.Tensor:
    """logits fp32 [M, V], targets [M] -> log-probabilities fp32 [M]; see the README."""
    m, s = plan.fold([leaf(logits[:, a:b]) for a, b in plan.cuts(vocab)], merge)
    x = logits.gather(1, targets[:, None])[:, 0]
    return (x - m) - reference_log32(s)
