"""CPU kernels of `gemm`: the schedule of `reference.py`, in register tiles.

Tile shapes, block sizes and the choice between widening weights on the fly or once per block are
free: every output keeps its own lanes, so none of them can move a bit.
"""

from __future__ import annotations

import numpy as np
import torch

from samebits.ops import jit
from samebits.ops.jit import kernel
from samebits.ops.scalar import LANES, widen
from samebits.ops.vector import dot_tile, store, widen_row

COLS = 3  # outputs of a full tile along N
X_FLOATS = 16 * 1024  # widened rows of x, and
W_FLOATS = 96 * 1024  # of w, handled at a time: together under a 512 KiB second-level cache
SPAN_PRODUCTS = 1 << 20  # below this (about 0.05 ms) a second thread costs more than it saves
DIRECT_ROWS = 4  # up to this many rows, widening weights on the fly is cheaper

_tile_1x1 = dot_tile(1, 1)
_tile_1x3 = dot_tile(1, 3)
_tile_2x1 = dot_tile(2, 1)
_tile_2x3 = dot_tile(2, 3)


@kernel
def _tiles(x, x_at, x_stride, rows, w, w_at, w_stride, cols, steps, out, out_at, out_stride):
    """Every dot product of `rows` rows of x with `cols` rows of w."""
    i = 0
    while i < rows:
        xa = x_at + i * x_stride
        oa = out_at + i * out_stride
        pair = i + 2 <= rows
        j = 0
        while j < cols:
            wa = w_at + j * w_stride
            if j + 3 <= cols:
                if pair:
                    _tile_2x3(x, xa, x_stride, w, wa, w_stride, steps, out, oa + j, out_stride)
                else:
                    _tile_1x3(x, xa, x_stride, w, wa, w_stride, steps, out, oa + j, out_stride)
                j += 3
            else:
                if pair:
                    _tile_2x1(x, xa, x_stride, w, wa, w_stride, steps, out, oa + j, out_stride)
                else:
                    _tile_1x1(x, xa, x_stride, w, wa, w_stride, steps, out, oa + j, out_stride)
                j += 1
        i += 2 if pair else 1


@kernel
def _widen(source, at, row_stride, rows, leaves, leaf, padded, target):
    """Rows of bf16 bits to fp32, leaf by leaf, each padded with +0 to `padded` terms."""
    whole = leaf // LANES * LANES
    for i in range(rows):
        for g in range(leaves):
            a, b = at + i * row_stride + g * leaf, (i * leaves + g) * padded
            widen_row(source, a, target, b, leaf // LANES)
            for k in range(whole, padded):
                target[b + k] = widen(source[a + k]) if k < leaf else np.float32(0.0)


@kernel
def _fold_leaves(sums, leaves, part):
    """sums holds `leaves` parts of equal length; the first becomes the root of the leaf tree."""
    while leaves > 1:
        leaves //= 2
        for g in range(leaves):
            for i in range(part):
                sums[g * part + i] = sums[2 * g * part + i] + sums[(2 * g + 1) * part + i]


@kernel
def _columns(x, rows, w, bias, length, leaves, padded, direct, tall, wide, out, stride_out, n0, n1):
    """Columns [n0, n1) of the folded sum of `leaves` leaves, plus those of the bias.

    x and w are flat bf16 bits, rows of `length`; bias is bf16 bits, empty where there is none; out
    is flat, bf16 bits or fp32. `tall` rows and `wide` columns are handled at a time; `direct`: w is
    widened inside the tiles.
    """
    leaf = length // leaves
    stride = leaves * padded
    steps = padded // LANES
    part = tall * wide
    xs = np.empty(tall * stride, np.float32)
    ws = np.empty(1 if direct else wide * stride, np.float32)
    sums = np.empty(leaves * part, np.float32)
    for nb in range(n0, n1, wide):
        cols = min(wide, n1 - nb)
        if not direct:
            _widen(w, nb * length, length, cols, leaves, leaf, padded, ws)
        for mb in range(0, rows, tall):
            count = min(tall, rows - mb)
            if nb == n0 or rows > tall:
                _widen(x, mb * length, length, count, leaves, leaf, padded, xs)
            for g in range(leaves):
                at = g * padded
                if direct:
                    wa = nb * length + g * leaf
                    _tiles(xs, at, stride, count, w, wa, length, cols, steps, sums, g * part, wide)
                else:
                    _tiles(xs, at, stride, count, ws, at, stride, cols, steps, sums, g * part, wide)
            _fold_leaves(sums, leaves, part)
            if bias.size:
                for i in range(count):
                    for j in range(cols):
                        sums[i * wide + j] += widen(bias[nb + j])
            for i in range(count):
                for j in range(cols):
                    store(out, (mb + i) * stride_out + nb + j, sums[i * wide + j])


@kernel
def _round(x, out, start, stop):
    for i in range(start, stop):
        store(out, i, x[i])


_NO_BIAS = np.empty(0, np.uint16)


def matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    leaves: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., K] bf16, w [N, K] bf16 contiguous -> [..., N] bf16 or fp32: root of the leaf tree.

    bias   [N] bf16 contiguous, added to the root in fp32
    """
    width, length = w.shape
    out = torch.empty(*x.shape[:-1], width, dtype=dtype)
    if out.numel() == 0:
        return out
    rows = x.numel() // length
    padded = -(-(length // leaves) // LANES) * LANES
    stride = leaves * padded
    direct = rows <= DIRECT_ROWS and stride == length
    tall = min(rows, max(2, min(64, X_FLOATS // stride) // 2 * 2))
    wide = max(COLS, min(96, W_FLOATS // stride) // COLS * COLS)
    xs, ws, outs = (jit.as_numpy(t).reshape(-1) for t in (x.contiguous(), w, out))
    shift = _NO_BIAS if bias is None else jit.as_numpy(bias)
    sizes = length, leaves, padded, direct, tall, wide

    def body(start: int, stop: int) -> None:
        _columns(xs, rows, ws, shift, *sizes, outs, width, start, stop)

    if rows * length * width < 2 * SPAN_PRODUCTS:
        body(0, width)
    else:
        jit.parallel_for(body, width, grain=wide)
    return out


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16 with the rounding of the kernels."""
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    source, target = x.contiguous().view(-1).numpy(), jit.as_numpy(out).reshape(-1)
    jit.parallel_for(lambda a, b: _round(source, target, a, b), target.size, grain=1 << 16)
    return out
