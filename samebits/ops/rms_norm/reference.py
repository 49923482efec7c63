"""RMSNorm, one rounding at a time in plain torch."""

from __future__ import annotations

import torch

from samebits.ops.reference import fma32
from samebits.ops.scalar import LANES, reference_narrow
from samebits.plan import ReductionPlan


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False
) -> torch.Tensor:
    """x [..., n] bf16, weight [n] bf16 -> [..., n] bf16; see the package for the order."""
    wide = x.float()
    n = wide.shape[-1]
    lanes = [torch.zeros(wide.shape[:-1]) for _ in range(LANES)]
    for j in range(n):
        lanes[j % LANES] = fma32(wide[..., j], wide[..., j], lanes[j % LANES])
    mean = ReductionPlan.fold(lanes) / torch.tensor(float(n))
    shifted = mean + torch.tensor(eps, dtype=torch.float32)
    r = torch.tensor(1.0) / shifted.double().sqrt().float()  # 53 bits suffice for fp32's sqrt
    factor = 1 + weight.float() if zero_centred else weight.float()
    return reference_narrow((wide * r[..., None]) * factor)
