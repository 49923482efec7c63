"""Gradients of weights on Hopper: sums over blocks of rows, added in a fixed order, no atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu

PARTS, COLUMNS = 256, 16  # of a tile


@triton.jit(do_not_specialize=["parts"])
def _sum(partial_ptr, out_ptr, parts, N, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((PARTS, COLUMNS), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (n < N)[None, :]
        at = part[:, None].to(tl.int64) * N + n[None, :]
        total += tl.load(partial_ptr + at, mask=inside, other=0.0)
    y = tl.sum(total, axis=0)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


def summed(partial: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """partial [parts, like.numel()] fp32, contiguous -> its sum over parts, in like's shape, dtype.

    Order: parts p, p + 256, p + 512, ... ascending, then a tree over the 256. One rounding to the
    dtype. Nothing is checked.
    """
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    parts, n = partial.shape
    grid = (triton.cdiv(n, COLUMNS),)
    shape = {"PARTS": PARTS, "COLUMNS": COLUMNS, "num_warps": 4}
    _sum[grid](partial, out, parts, n, **shape, **gpu.POLICY)
    return out
