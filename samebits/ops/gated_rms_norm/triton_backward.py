"""Gradients of the gated RMSNorm on Hopper, in one pass over the rows; no promise of bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.heads import by_heads
from samebits.ops.sums_backward import summed

ELEMENTS = 1024  # of a tile
TILES = 16  # of one block, one after the other


@triton.jit(do_not_specialize=["rows"])
def _gradients(
    grad_ptr, x_ptr, z_ptr, z_token, z_head, weight_ptr, dx_ptr, dz_ptr, partial_ptr, eps,
    rows, HEADS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, N)
    weight = tl.load(weight_ptr + j).to(tl.float32)[None, :]
    dweight = tl.zeros((ROWS, N), tl.float32)
    for tile in range(TILES):
        i = (block * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = (i < rows)[:, None]
        at = i[:, None] * N + j[None, :]
        z_at = (i // HEADS * z_token + i % HEADS * z_head)[:, None] + j[None, :]
        # Not zero: with an eps of 0 a row that is not there would be no number.
        x = tl.load(x_ptr + at, mask=inside, other=1.0).to(tl.float32)
        z = tl.load(z_ptr + z_at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / N) + eps)[:, None]
        hat = x * r
        s = 1.0 / (1.0 + tl.exp(-z))
        dnorm = grad * (z * s)
        dhat = dnorm * weight
        dweight += dnorm * hat
        dx = (dhat - hat * (tl.sum(dhat * hat, axis=1) * (1.0 / N))[:, None]) * r
        dz = grad * (hat * weight) * (s * (1.0 + z * (1.0 - s)))
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=inside)
    tl.store(partial_ptr + block * N + j, tl.sum(dweight, axis=0))


def gradients(
    grad: torch.Tensor, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, z [..., n] and weight [n], in their dtypes: fp32, one rounding.

    x and weight are contiguous, z has any strides, n is a power of two up to 1024. Order of the
    weight's sums: rows of a tile apart, its 16 tiles ascending, then the rows, then blocks
    (`sums_backward.summed`). Nothing is checked.
    """
    n, grad = weight.numel(), grad.contiguous()
    dx = torch.empty_like(x)
    dz = torch.empty_like(z, memory_format=torch.contiguous_format)
    rows, block = x.numel() // n, ELEMENTS // n
    if not rows:
        return dx, dz, torch.zeros_like(weight)
    blocks = triton.cdiv(rows, block * TILES)
    partial = weight.new_empty((blocks, n), dtype=torch.float32)
    z, heads, token, head = by_heads(z)
    _gradients[(blocks,)](
        grad, x, z, token, head, weight, dx, dz, partial, eps, rows,
        HEADS=heads, N=n, ROWS=block, TILES=TILES, num_warps=4, **gpu.POLICY,
    )  # fmt: skip
    return dx, dz, summed(partial, weight)
