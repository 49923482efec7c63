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
ROW_BLOCK = 64  # rows of x handled per visit of a weight block
SCRATCH_FLOATS = 64 * 1024  # widened weights of one block: half of a 512 KiB second-level cache
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
def _columns(
    x, x_stride, rows, w, w_stride, leaves, leaf, padded, direct, block, out, out_stride, n0, n1
):
    """Columns [n0, n1) of the folded sum of `leaves` leaves; out is flat, bf16 bits or fp32.

    x is flat fp32, leaf by leaf padded with +0 to `padded` terms; w is flat bf16 bits.
    """
    steps = padded // LANES
    part = ROW_BLOCK * block
    scratch = np.empty(1 if direct else block * leaves * padded, np.float32)
    sums = np.empty(leaves * part, np.float32)
    for nb in range(n0, n1, block):
        cols = min(block, n1 - nb)
        if not direct:
            for j in range(cols):
                source = (nb + j) * w_stride
                for g in range(leaves):
                    target = (j * leaves + g) * padded
                    at = source + g * leaf
                    widen_row(w, at, scratch, target, leaf // LANES)
                    for k in range(leaf // LANES * LANES, padded):
                        scratch[target + k] = widen(w[at + k]) if k < leaf else np.float32(0.0)
        for mb in range(0, rows, ROW_BLOCK):
            tall = min(ROW_BLOCK, rows - mb)
            for g in range(leaves):
                at = mb * x_stride + g * padded
                if direct:
                    _tiles(
                        x, at, x_stride, tall,
                        w, nb * w_stride + g * leaf, w_stride, cols,
                        steps, sums, g * part, block,
                    )  # fmt: skip
                else:
                    _tiles(
                        x, at, x_stride, tall,
                        scratch, g * padded, leaves * padded, cols,
                        steps, sums, g * part, block,
                    )  # fmt: skip
            width = leaves
            while width > 1:
                width //= 2
                for g in range(width):
                    for i in range(part):
                        sums[g * part + i] = sums[2 * g * part + i] + sums[(2 * g + 1) * part + i]
            for i in range(tall):
                for j in range(cols):
                    store(out, (mb + i) * out_stride + nb + j, sums[i * block + j])


@kernel
def _round(x, out, start, stop):
    for i in range(start, stop):
        store(out, i, x[i])


def matmul(x: torch.Tensor, w: torch.Tensor, leaves: int, dtype: torch.dtype) -> torch.Tensor:
    """x [M, K] bf16, w [N, K] bf16 contiguous -> [M, N] bf16 or fp32: root of the leaf tree."""
    (rows, length), width = x.shape, w.shape[0]
    out = torch.empty(rows, width, dtype=dtype)
    if rows == 0 or width == 0:
        return out
    leaf = length // leaves
    padded = -(-leaf // LANES) * LANES
    wide = x.float().view(rows, leaves, leaf)
    if padded != leaf:
        wide = torch.nn.functional.pad(wide, (0, padded - leaf))
    wide = wide.contiguous()
    direct = rows <= DIRECT_ROWS and padded == leaf
    block = max(COLS, min(96, SCRATCH_FLOATS // (leaves * padded)) // COLS * COLS)
    xs, ws, outs = wide.view(-1).numpy(), jit.as_numpy(w).reshape(-1), jit.as_numpy(out).reshape(-1)

    def body(start: int, stop: int) -> None:
        _columns(
            xs, leaves * padded, rows, ws, length,
            leaves, leaf, padded, direct, block, outs, width, start, stop,
        )  # fmt: skip

    if rows * length * width < 2 * SPAN_PRODUCTS:
        body(0, width)
    else:
        jit.parallel_for(body, width, grain=block)
    return out


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16 with the rounding of the kernels."""
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    source, target = x.contiguous().view(-1).numpy(), jit.as_numpy(out).reshape(-1)
    jit.parallel_for(lambda a, b: _round(source, target, a, b), target.size, grain=1 << 16)
    return out
