"""l2 norm, one rounding at a time in plain torch."""

from __future__ import annotations

import torch

from samebits.ops.l2_norm.cpu import EPS
from samebits.ops.reference import fma32
from samebits.ops.scalar import LANES, reference_narrow
from samebits.plan import ReductionPlan


def l2_norm(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """x [..., n] bf16 -> [..., n] bf16; see the package for the order."""
    wide = x.float()
    lanes = [torch.zeros(wide.shape[:-1]) for _ in range(LANES)]
    for j in range(wide.shape[-1]):
        lanes[j % LANES] = fma32(wide[..., j], wide[..., j], lanes[j % LANES])
    shifted = ReductionPlan.fold(lanes) + torch.tensor(eps, dtype=torch.float32)
    r = torch.tensor(1.0) / shifted.double().sqrt().float()  # 53 bits suffice for fp32's sqrt
    return reference_narrow(wide * r[..., None])
