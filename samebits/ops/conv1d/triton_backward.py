"""Gradients of the causal convolution on Hopper, in one pass over the rows; no promise of bits.

A block walks down its rows with the last W - 1 of them in registers. With `d` the gradient of a
row's sum of taps, it adds `d` to the gradients of the W rows that were read, and to its own sums
for the weight. Twice the same operands give twice the same bits: nothing is added atomically.
"""

# Rows in registers are tuples that grow: Triton adds tuples, and knows no starred ones.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.conv1d.triton import lagged, taps
from samebits.ops.sums_backward import summed

ROWS = 64  # of one block; W - 1 more are read before and behind them
STEP = 4  # rows that are loaded at once
BLOCK = 256  # channels of one block
WARPS = 2


@triton.jit
def _row(
    x_ptr, x_row, wide_ptr, y_ptr, place_ptr, row, T, c, inside, unrounded, rounded, exact, C
):  # fmt: skip
    """x and the gradient of y of one row, fp32, and its place: -1 and zeros without a sequence."""
    here = row < T
    place = tl.load(place_ptr + row, mask=here, other=-1)
    x = tl.load(x_ptr + row * x_row + c, mask=inside & here, other=0.0).to(tl.float32)
    wide = tl.load(wide_ptr + row * exact + c, mask=unrounded & here, other=0.0)
    y = tl.load(y_ptr + row * (C - exact) + c - exact, mask=rounded & here, other=0.0)
    grad = wide + y.to(tl.float32)
    return tl.where(place >= 0, x, 0.0), tl.where(place >= 0, grad, 0.0), place


@triton.jit
def _slope(x, grad, place, before, weight, W: tl.constexpr):
    """(d, the row's x by lag) of one row; `before` are the rows above it, the nearest first."""
    seen = lagged(x, place, before, W)
    acc = x * weight[W - 1]
    for lag in tl.static_range(1, W):
        acc = tl.fma(seen[lag], weight[W - 1 - lag], acc)
    s = 1.0 / (1.0 + tl.exp(-acc))
    return grad * (s * tl.fma(acc, 1.0 - s, 1.0)), seen


@triton.jit
def _spread(d, place, pending, weight, W: tl.constexpr):
    """Gradients of rows t, t - 1, ..., t - (W - 1) behind row t; the last one is complete."""
    found = (d * weight[W - 1],)
    for lag in tl.static_range(1, W):
        near = tl.where(place >= lag, d, 0.0)
        found = found + (tl.fma(near, weight[W - 1 - lag], pending[lag - 1]),)
    return found


@triton.jit(do_not_specialize=["T"])
def _gradients(
    x_ptr, x_row, weight_ptr, wide_ptr, y_ptr, place_ptr, dx_ptr, partial_ptr, T, exact, C,
    W: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1).to(tl.int64)
    first = block * ROWS
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    unrounded = c < exact
    rounded = inside & (c >= exact)
    weight = taps(weight_ptr, c, inside, W)
    before, pending, sums = (), (), ()
    for _ in tl.static_range(0, W):
        sums = sums + (tl.zeros((BLOCK,), tl.float32),)
    for lag in tl.static_range(1, W):
        row = first - lag
        old = tl.load(x_ptr + row * x_row + c, mask=inside & (row >= 0), other=0.0)
        before = before + (old.to(tl.float32),)
        pending = pending + (tl.zeros((BLOCK,), tl.float32),)
    for step in range(0, ROWS, STEP):
        xs, grads, places = (), (), ()
        for i in tl.static_range(0, STEP):  # all loads before any store
            x, grad, place = _row(
                x_ptr, x_row, wide_ptr, y_ptr, place_ptr, first + step + i, T,
                c, inside, unrounded, rounded, exact, C,
            )  # fmt: skip
            xs = xs + (x,)
            grads = grads + (grad,)
            places = places + (place,)
        for i in tl.static_range(0, STEP):
            d, seen = _slope(xs[i], grads[i], places[i], before, weight, W)
            total = ()
            for j in tl.static_range(0, W):
                total = total + (tl.fma(d, seen[W - 1 - j], sums[j]),)
            sums = total
            found = _spread(d, places[i], pending, weight, W)
            done = first + step + i - (W - 1)
            mine = inside & (done >= first) & (done < T)
            dx = found[W - 1].to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + done * C + c, dx, mask=mine)
            before = ((xs[i],) + before)[: W - 1]
            pending = found[: W - 1]
    for i in tl.static_range(0, W - 1):  # rows of the next block, which this one's rows went into
        row = first + ROWS + i
        x, grad, place = _row(
            x_ptr, x_row, wide_ptr, y_ptr, place_ptr, row, T,
            c, inside, unrounded, rounded, exact, C,
        )  # fmt: skip
        d, seen = _slope(x, grad, place, before, weight, W)
        found = _spread(d, place, pending, weight, W)
        done = row - (W - 1)
        dx = found[W - 1].to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + done * C + c, dx, mask=inside & (done < T))
        before = ((x,) + before)[: W - 1]
        pending = found[: W - 1]
    for j in tl.static_range(0, W):
        tl.store(partial_ptr + (block * C + c) * W + j, sums[j], mask=inside)


def gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    place: torch.Tensor,
    wide: torch.Tensor,
    y: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [T, C] and weight [C, W], in their dtypes: fp32, one rounding.

    x                rows of any stride; weight and all others contiguous, on the same device
    place            [T] int32 of `triton.places`
    wide, y          gradients of both parts of `conv1d.varlen`: [T, exact] fp32, [T, C - exact]

    Order: a channel's weight gradient is summed over the rows of a block ascending, then over
    blocks (`sums_backward.summed`). Nothing is checked, and the host reads no table.
    """
    tokens, channels = x.shape
    exact, count = wide.shape[1], weight.shape[1]
    if not tokens:
        return torch.empty_like(x), torch.zeros_like(weight)
    dx = x.new_empty((tokens, channels))
    blocks = triton.cdiv(tokens, ROWS)
    partial = x.new_empty((blocks, weight.numel()), dtype=torch.float32)
    _gradients[(triton.cdiv(channels, BLOCK), blocks)](
        x, x.stride(0), weight, wide, y, place, dx, partial, tokens, exact, channels,
        W=count, ROWS=ROWS, STEP=STEP, BLOCK=BLOCK, num_warps=WARPS, **gpu.POLICY,
    )  # fmt: skip
    return dx, summed(partial, weight)
