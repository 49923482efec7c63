"""RMSNorm, one rounding at a time in plain torch."""

from __future__ import annotations

import torch

from samebits.ops.reference import fma32
from samebits.ops.scalar import LANES, reference_narrow
from samebits.plan import ReductionPlan


def sum_of_squares(wide: torch.Tensor) -> torch.Tensor:
    """wide [..., n] fp32 -> [...]: fp32 fma into lanes, ascending, then the fold of the lanes."""
    lanes = [torch.zeros(wide.shape[:-1]) for _ in range(LANES)]
    for j in range(wide.shape[-1]):
        lanes[j % LANES] = fma32(wide[..., j], wide[..., j], lanes[j % LANES])
    return ReductionPlan.fold(lanes)


def inverse_root(total: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(total + eps), each step rounded to fp32; 53 bits suffice for fp32's sqrt."""
    shifted = total + torch.tensor(eps, dtype=torch.float32)
    return torch.tensor(1.0) / shifted.double().sqrt().float()


def inverse_rms(wide: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean of squares + eps) of wide [..., n] fp32 -> [...] fp32."""
    mean = sum_of_squares(wide) / torch.tensor(float(wide.shape[-1]))
    return inverse_root(mean, eps)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False
) -> torch.Tensor:
    """x [..., n] bf16, weight [n] bf16 -> [..., n] bf16; see the package for the order."""
    wide = x.float()
    r = inverse_rms(wide, eps)
    factor = 1 + weight.float() if zero_centred else weight.float()
    return reference_narrow((wide * r[..., None]) * factor)
