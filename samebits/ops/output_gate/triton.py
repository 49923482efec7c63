"""Output gate on Hopper: the operations of `reference.py`, so the CPU's bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.device import sigmoid32

BLOCK = 1024  # elements in one block; moves no bit


@triton.jit
def _kernel(x_ptr, gate_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = x * sigmoid32(gate)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def output_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x, gate [..., N] bf16, contiguous on CUDA -> [..., N] bf16. Refuses with SB0420, SB0421."""
    gpu.prepare(x.device.index or 0)
    gpu.require("x", x, torch.bfloat16, x.dim() > 0 and x.shape[-1] > 0, "[..., N]")
    gpu.require("gate", gate, torch.bfloat16, gate.shape == x.shape, str(list(x.shape)))
    y = torch.empty_like(x)
    count = x.numel()
    if count:
        _kernel[(triton.cdiv(count, BLOCK),)](
            x, gate, y, count, BLOCK=BLOCK, num_warps=4, **gpu.POLICY
        )
    return y
