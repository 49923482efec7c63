"""Gated RMSNorm on Hopper: the operations of the README, squares summed by `device.fold`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.checks import require_shape
from samebits.ops.device import fold
from samebits.ops.gated_rms_norm.reference_sm90 import NEAR
from samebits.ops.heads import by_heads
from samebits.ops.silu_mul.triton import silu_product

LONGEST = 1024
ELEMENTS = 1024  # in one block; moves no bit


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x_ptr, z_ptr, z_token, z_head, weight_ptr, y_ptr, eps, rows,
    HEADS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.arange(0, N)
    inside = (i < rows)[:, None]
    at = i[:, None] * N + j[None, :]
    z_at = (i // HEADS * z_token + i % HEADS * z_head)[:, None] + j[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + z_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + j).to(tl.float32)
    mean = tl.div_rn(fold(x * x, ROWS, N, NEAR), tl.full((ROWS,), N, tl.float32))
    r = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    y = silu_product(z, (x * r[:, None]) * weight[None, :])
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, *, wide: bool = False
) -> torch.Tensor:
    """x, z [..., n] bf16, weight [n] bf16, on CUDA, n a power of two up to 1024 -> [..., n] bf16.

    wide: x is fp32. Forward only. Contiguous x and weight, z of any strides, else SB0420, SB0421.
    """
    gpu.prepare(x.device.index or 0)
    n = weight.numel()
    fits = weight.dim() == 1 and NEAR <= n <= LONGEST and n & (n - 1) == 0
    gpu.require("weight", weight, torch.bfloat16, fits, f"[n], a power of two up to {LONGEST}")
    dtype = torch.float32 if wide else torch.bfloat16
    gpu.require("x", x, dtype, x.shape[-1:] == (n,), f"[..., {n}]")
    gpu.require_dtype("z", z, torch.bfloat16)
    require_shape("z", z, z.shape == x.shape, str(list(x.shape)))
    return launch(x, z, weight, eps)


def launch(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`gated_rms_norm` without checks."""
    n = weight.numel()
    y = torch.empty_like(z, memory_format=torch.contiguous_format)
    rows = x.numel() // n
    block = ELEMENTS // n
    if rows:
        z, heads, token, head = by_heads(z)
        _kernel[(triton.cdiv(rows, block),)](
            x, z, token, head, weight, y, eps, rows,
            HEADS=heads, N=n, ROWS=block, NEAR=NEAR, num_warps=4, **gpu.POLICY,
        )  # fmt: skip
    return y
