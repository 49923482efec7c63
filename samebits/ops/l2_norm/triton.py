"""l2 norm on Hopper: the operations of the README, squares summed by `device.fold`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.checks import require_shape
from samebits.ops.device import fold
from samebits.ops.heads import by_heads
from samebits.ops.l2_norm.cpu import EPS
from samebits.ops.l2_norm.reference_sm90 import NEAR

LONGEST = 1024
ELEMENTS = 1024  # in one block; moves no bit


@triton.jit(do_not_specialize=["rows"])
def _kernel(
    x_ptr, x_token, x_head, y_ptr, eps, rows,
    HEADS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (i < rows)[:, None]
    j = tl.arange(0, N)
    at = i[:, None] * N + j[None, :]
    x_at = (i // HEADS * x_token + i % HEADS * x_head)[:, None] + j[None, :]
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    root = tl.sqrt_rn(fold(x * x, ROWS, N, NEAR) + eps)
    r = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), root)
    tl.store(y_ptr + at, (x * r[:, None]).to(y_ptr.dtype.element_ty), mask=inside)


def l2_norm(x: torch.Tensor, eps: float = EPS, *, wide: bool = False) -> torch.Tensor:
    """x [..., n] bf16 on CUDA, any strides, n a power of two up to 1024 -> [..., n] bf16.

    wide: x is fp32. Forward only. Refuses with SB0420, SB0421.
    """
    gpu.prepare(x.device.index or 0)
    n = x.shape[-1] if x.dim() else 0
    fits = NEAR <= n <= LONGEST and n & (n - 1) == 0
    dtype = torch.float32 if wide else torch.bfloat16
    gpu.require_dtype("x", x, dtype)
    require_shape("x", x, fits, f"[..., n], n a power of two up to {LONGEST}")
    return launch(x, eps, torch.bfloat16)


def launch(x: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """`l2_norm` without checks, rounded to `dtype`."""
    n = x.shape[-1]
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    rows = x.numel() // n
    block = ELEMENTS // n
    if rows:
        x, heads, token, head = by_heads(x)
        _kernel[(triton.cdiv(rows, block),)](
            x, token, head, y, eps, rows,
            HEADS=heads, N=n, ROWS=block, NEAR=NEAR, num_warps=4, **gpu.POLICY,
        )  # fmt: skip
    return y
