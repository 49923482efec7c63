"""Causal depthwise convolution and silu, one rounding at a time in plain torch."""

from __future__ import annotations

import torch

from samebits.ops.gate_scalar import reference_sigmoid32
from samebits.ops.reference import fma32
from samebits.ops.scalar import reference_narrow


def conv1d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One whole sequence x [T, C] bf16, weight [C, W] bf16 -> [T, C] bf16; see the package."""
    return reference_narrow(unrounded(x, weight))


def unrounded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`conv1d` before its last rounding, fp32."""
    width = weight.shape[1]
    rows = torch.cat([torch.zeros(width - 1, x.shape[1]), x.float()])
    acc = torch.zeros(x.shape)
    for j in range(width):
        acc = fma32(weight[:, j].float(), rows[j : j + len(x)], acc)
    return acc * reference_sigmoid32(acc)
