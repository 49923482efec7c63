"""Rotary embedding, one rounding at a time in plain torch, with its own table."""

from __future__ import annotations

import math

import torch

from samebits.ops.reference import fma32
from samebits.ops.scalar import reference_narrow


def entry(position: int, i: int, rotary_dim: int, base: float) -> tuple[float, float]:
    """(cos, sin) of one position and frequency, float64."""
    angle = position * base ** (-2.0 * i / rotary_dim)
    return math.cos(angle), math.sin(angle)


def apply(x: torch.Tensor, positions: torch.Tensor, rotary_dim: int, base: float) -> torch.Tensor:
    """x [T, H, D] bf16, positions [T] int64 -> [T, H, D] bf16; see the package for the order."""
    half = rotary_dim // 2
    pairs = [[entry(int(p), i, rotary_dim, base) for i in range(half)] for p in positions]
    turn = torch.tensor(pairs, dtype=torch.float64).reshape(len(pairs), 1, half, 2).float()
    c, s = turn[..., 0], turn[..., 1]
    x1, x2 = x[..., :half].float(), x[..., half:rotary_dim].float()
    y1 = reference_narrow(fma32(x1, c, -(x2 * s)))
    y2 = reference_narrow(fma32(x2, c, x1 * s))
    return torch.cat([y1, y2, x[..., rotary_dim:]], dim=-1)
