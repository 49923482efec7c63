"""l2 norm, one rounding at a time in plain torch."""

from __future__ import annotations

import torch

from samebits.ops.l2_norm.cpu import EPS
from samebits.ops.rms_norm.reference import inverse_root, sum_of_squares
from samebits.ops.scalar import reference_narrow


def l2_norm(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """x [..., n] bf16 or fp32 -> [..., n] bf16; see the package for the order."""
    wide = x.float()
    r = inverse_root(sum_of_squares(wide), eps)
    return reference_narrow(wide * r[..., None])
