"""RMSNorm's schedule on Hopper, one rounding at a time in plain torch, on any device."""

from __future__ import annotations

import torch

from samebits.ops.scalar import reference_narrow

NEAR = 8  # neighbours added first: what one thread loads at once


def fold(x: torch.Tensor, near: int) -> torch.Tensor:
    """Sum over the last dimension: zeros up to a power of two, neighbours, then halves."""
    width = max(near, 1 << max(0, x.shape[-1] - 1).bit_length())
    x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    while near > 1:
        x = x[..., 0::2] + x[..., 1::2]
        near //= 2
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False
) -> torch.Tensor:
    """x [..., n] bf16, weight [n] bf16 -> [..., n] bf16; see the README for the order."""
    wide = x.float()
    total = fold(wide * wide, NEAR)
    # A Python number as divisor becomes a multiplication by its reciprocal on a GPU.
    mean = total / torch.full_like(total, wide.shape[-1])
    r = 1 / (mean + torch.full_like(mean, eps)).double().sqrt().float()
    factor = 1 + weight.float() if zero_centred else weight.float()
    return reference_narrow((wide * r[..., None]) * factor)
