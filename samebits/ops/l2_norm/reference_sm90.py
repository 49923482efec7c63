"""The schedule of `l2_norm` on Hopper, one rounding at a time in plain torch, on any device."""

from __future__ import annotations

import torch

from samebits.ops.rms_norm.reference_sm90 import fold
from samebits.ops.scalar import reference_narrow

NEAR = 4  # neighbours added first


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] bf16 or fp32, n a power of two -> [..., n] bf16; see the README for the order."""
    wide = x.float()
    total = fold(wide * wide, NEAR)
    r = 1 / (total + torch.full_like(total, eps)).double().sqrt().float()
    return reference_narrow(wide * r[..., None])
