"""Rotary embedding on Hopper: the operations of `reference.py`, so the bits of every platform."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu

PAIRS = 2048  # in one block; moves no bit
WARPS = 4


@triton.jit
def turn(x1, x2, c, s):
    """(fma(x1, c, -(x2 * s)), fma(x2, c, x1 * s)), fp32.

    Triton's unary minus is 0 - x, which makes +0 of a +0; a product by -1 changes the sign alone.
    """
    return tl.fma(x1, c, (x2 * s) * -1.0), tl.fma(x2, c, x1 * s)


@triton.jit(do_not_specialize=["rows"])  # a captured batch must not need a kernel of its own
def _kernel(
    x_ptr,
    position_ptr,
    table_ptr,
    y_ptr,
    rows,
    heads,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """BLOCK rows of x [tokens * heads, D], turned, or back."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, WIDTH)
    present = (row < rows)[:, None]
    inside = present & (i < HALF)[None, :]
    position = tl.load(position_ptr + row // heads, mask=row < rows, other=0)
    angle = table_ptr + position[:, None] * (2 * HALF) + i[None, :]
    c = tl.load(angle, mask=inside, other=0.0)
    s = tl.load(angle + HALF, mask=inside, other=0.0)
    if INVERSE:
        s = s * -1.0
    at = row[:, None] * D + i[None, :]
    x1 = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    y1, y2 = turn(x1, x2, c, s)
    tl.store(y_ptr + at, y1.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptr + at + HALF, y2.to(y_ptr.dtype.element_ty), mask=inside)
    for start in tl.static_range(2 * HALF, D, WIDTH):  # dimensions beyond the table's are copied
        rest = present & (start + i < D)[None, :]
        tail = tl.load(x_ptr + at + start, mask=rest, other=0.0)
        tl.store(y_ptr + at + start, tail, mask=rest)


def apply(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    """x [T, H, D] bf16, positions [T] int64, table fp32 [P, rotary] -> [T, H, D] bf16.

    `inverse` turns by the negative angle.

    All contiguous on one CUDA device; `table` is that of `samebits.ops.rotary.table`. Positions
    must lie inside the table: the caller checks, since reading them back would stop the GPU.
    Refuses with SB0420, SB0421.
    """
    gpu.prepare(x.device.index or 0)
    gpu.require("table", table, torch.float32, table.dim() == 2, "[P, rotary]")
    rotary = table.shape[-1]
    gpu.require("x", x, torch.bfloat16, x.dim() == 3 and x.shape[-1] >= rotary, "[T, H, D]")
    gpu.require("positions", positions, torch.int64, positions.shape == x.shape[:1], "[T]")
    y = torch.empty_like(x)
    tokens, heads, length = x.shape
    width = triton.next_power_of_2(rotary // 2)
    block = max(1, PAIRS // width)
    if x.numel():
        rows = tokens * heads
        _kernel[(triton.cdiv(rows, block),)](
            x, positions, table, y, rows, heads, BLOCK=block, D=length, HALF=rotary // 2,
            WIDTH=width, INVERSE=inverse, num_warps=WARPS, **gpu.POLICY,
        )  # fmt: skip
    return y
