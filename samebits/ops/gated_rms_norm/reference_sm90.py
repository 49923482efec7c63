"""The schedule of `gated_rms_norm` on Hopper, one rounding at a time in plain torch."""

from __future__ import annotations

import torch

from samebits.ops.gate_scalar import reference_sigmoid32
from samebits.ops.rms_norm.reference_sm90 import fold
from samebits.ops.scalar import reference_narrow

NEAR = 4  # neighbours added first


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """x [..., n] bf16 or fp32, z as x and weight [n] bf16, n a power of two -> [..., n] bf16."""
    wide, gate = x.float(), z.float()
    total = fold(wide * wide, NEAR)
    # A Python number as divisor becomes a multiplication by its reciprocal on a GPU.
    mean = total / torch.full_like(total, wide.shape[-1])
    r = 1 / (mean + torch.full_like(mean, eps)).double().sqrt().float()
    normed = (wide * r[..., None]) * weight.float()
    return reference_narrow(normed * (gate * reference_sigmoid32(gate)))
