"""Gradient of the l2 norm on Hopper; no promise of bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.heads import by_heads

ELEMENTS = 1024  # in one block


@triton.jit(do_not_specialize=["rows"])
def _gradient(
    grad_ptr, x_ptr, x_token, x_head, dx_ptr, eps, rows,
    HEADS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (i < rows)[:, None]
    j = tl.arange(0, N)
    at = i[:, None] * N + j[None, :]
    x_at = (i // HEADS * x_token + i % HEADS * x_head)[:, None] + j[None, :]
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, axis=1) + eps)[:, None]
    hat = x * r
    dx = (grad - hat * tl.sum(grad * hat, axis=1)[:, None]) * r
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def gradient(grad: torch.Tensor, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Gradient of x [..., n], any strides, for grad [..., n]: fp32, one rounding to x's dtype.

    n is a power of two up to 1024. Nothing is checked.
    """
    n, grad = x.shape[-1], grad.contiguous()
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, block = x.numel() // n, ELEMENTS // n
    if rows:
        x, heads, token, head = by_heads(x)
        _gradient[(triton.cdiv(rows, block),)](
            grad, x, token, head, dx, eps, rows,
            HEADS=heads, N=n, ROWS=block, num_warps=4, **gpu.POLICY,
        )  # fmt: skip
    return dx
