"""The rounding schedule of `gemm` in plain torch, one rounding at a time. Slow; this is the law.

One dot product of `length` terms, bf16 operands widened to fp32 (exact):
1. both operands are padded with +0 to a multiple of 16 terms;
2. sixteen lanes start at +0; lane l takes the terms k = l, l + 16, l + 32, ... ascending, each by
   one fp32 fma;
3. lanes are folded ((0+1)+(2+3))+((4+5)+(6+7))+..., fp32 additions.
A matrix product with a reduction plan computes one such dot product per leaf of K, folds the leaves
by the plan's tree in fp32, and rounds the root once to bf16, ties to even (`lm_head`: not at all).
A bias (`linear`) is widened to fp32 and added to the root: the last fp32 addition, before the only
rounding to bf16.
"""

from __future__ import annotations

import torch

from samebits.ops.reference import fma32
from samebits.ops.scalar import LANES, reference_narrow
from samebits.plan import ReductionPlan


def dot(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [M, K] and w [N, K] fp32 -> [M, N] fp32."""
    pad = -x.shape[1] % LANES
    x, w = (torch.nn.functional.pad(t, (0, pad)) for t in (x, w))
    lanes = torch.zeros(x.shape[0], w.shape[0], LANES)
    for k in range(0, x.shape[1], LANES):
        lanes = fma32(x[:, None, k : k + LANES], w[None, :, k : k + LANES], lanes)
    return ReductionPlan.fold(lanes.unbind(-1))


def accumulate(x: torch.Tensor, w: torch.Tensor, plan: ReductionPlan) -> torch.Tensor:
    """x [M, K] and w [N, K] bf16 -> [M, N] fp32, the unrounded root."""
    return plan.fold([dot(x[:, a:b].float(), w[:, a:b].float()) for a, b in plan.cuts(x.shape[1])])


def matmul(x: torch.Tensor, w: torch.Tensor, plan: ReductionPlan) -> torch.Tensor:
    """x [M, K] and w [N, K] bf16 -> [M, N] bf16."""
    return reference_narrow(accumulate(x, w, plan))


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x [M, K], w [N, K] and bias [N] bf16 -> [M, N] bf16."""
    return reference_narrow(accumulate(x, w, ReductionPlan(1)) + bias.float())
