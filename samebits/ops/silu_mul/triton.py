"""silu_mul on Hopper: the operations of `reference.py`, so the bits of every platform."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.device import exp32, reciprocal

BLOCK = 1024  # elements in one block; moves no bit
WARPS = 2


@triton.jit
def silu_product(gate, up):
    """(g * s) * u with s = 1 / (1 + exp32(-g)), fp32."""
    return (gate * reciprocal(1.0 + exp32(-gate))) * up


@triton.jit
def _kernel(x_ptr, y_ptr, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = j < F
    at = x_ptr + row * (2 * F) + j
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
    y = silu_product(gate, up)
    tl.store(y_ptr + row * F + j, y.to(y_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2F] bf16 (gate first), contiguous on CUDA -> [..., F] bf16.

    Refuses with SB0420, SB0421.
    """
    gpu.prepare(gate_up.device.index or 0)
    width = gate_up.shape[-1] if gate_up.dim() else 0
    gpu.require("gate_up", gate_up, torch.bfloat16, width > 0 and width % 2 == 0, "[..., 2F]")
    half = width // 2
    y = gate_up.new_empty((*gate_up.shape[:-1], half))
    rows = gate_up.numel() // width
    if rows:
        grid = (rows, triton.cdiv(half, BLOCK))
        _kernel[grid](gate_up, y, half, BLOCK=BLOCK, num_warps=WARPS, **gpu.POLICY)
    return y
