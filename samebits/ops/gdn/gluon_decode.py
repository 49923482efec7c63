"""What one row needs of the state in decoding, without an exchange between warps.

Transposed, as in the scan: a row of a product is a column of V, and the row of the sequence is one
of eight columns on the right. A warp loads 16 or 32 columns of the state from memory into the very
registers in which the tensor core reads its left operand. Of the boundary state only the bf16 plane
is read. Bits are those of `triton_decode._state`.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_wait

from samebits.ops import gpu
from samebits.ops.gdn.gluon_scan import packed
from samebits.ops.gdn.tiles_sm90 import Tile

RIGHT = 8  # columns of a product, of which one or two are alive


@gluon.constexpr_function
def in_memory(rows: int, warps: int, tiles: int) -> gl.DistributedLinearLayout:
    """Of [rows, 16 tiles warps]: a thread has 2 tiles neighbouring columns, so that it loads them
    at once; `tiles` is 1 or 2."""
    bits, shape = range(rows.bit_length() - 1), [rows, 16 * tiles * warps]
    near = [[0, 1], [0, 2]][:tiles]
    across = [[1 << b, 0] for b in bits if b not in (1, 2)]
    lanes = [[2, 0], [4, 0], *([0, 2 * tiles << b] for b in range(3))]
    over = [[0, 16 * tiles << b] for b in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([*near, *across], lanes, over, [], shape)


@gluon.jit
def turned(x, WARPS: gl.constexpr, TILES: gl.constexpr, layout: gl.constexpr):
    """x [rows, columns] of `in_memory` as left operand [columns, rows]: row 16 WARPS r + 16 w +
    8 p + n is column 16 TILES w + 2 TILES n + 2 r + p, which is where its thread has it."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    x = x.reshape([rows, WARPS, 8, TILES, 2]).permute((3, 1, 4, 2, 0)).reshape([columns, rows])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def vector(x, live, layout: gl.constexpr):
    """The column of x [columns, RIGHT] that is alive, as fp32 [columns]: one term of the sum is
    not zero."""
    n = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    return gl.sum(gl.where((n == live)[None, :], x, 0.0), 1)


@gluon.jit
def row_of_state(rs, us, read, weights, high, rest, v, beta, reach, i, product: gl.constexpr):
    """o before its scale, r and u [columns] of row i, and us with it.

    rs, us [columns, CHUNK] are left operands with the rows before i; read [columns, RIGHT] fp32 has
    dot(q, h) and dot(k, h); weights, high, rest [CHUNK, RIGHT] right operands, one column alive.
    """
    lhs: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    here = (gl.arange(0, rs.shape[1], gl.SliceLayout(0, lhs)) == i)[None, :]
    r = packed(beta * (v - reach * vector(read, 1, product)))
    new = gl.convert_layout(r, gl.SliceLayout(1, lhs))
    zero = gl.zeros(read.shape, gl.float32, product)
    u = mma_v2(gl.where(here, new[:, None], rs), weights, zero)
    u = packed(vector(u, 0, product))
    new = gl.convert_layout(u, gl.SliceLayout(1, lhs))
    us = gl.where(here, new[:, None], us)
    o = mma_v2(us, rest, reach * read)
    return vector(mma_v2(us, high, o), 0, product), r, u, us


@gluon.jit
def _state(
    q_ptr, k_ptr, v_ptr, beta_ptr, weights_ptr, scores_ptr, reach_ptr, o_ptr, scale,
    context_ptr, slots_ptr, h_ptr, h_slot, r_ptr, r_slot, u_ptr, u_slot,
    HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, CHUNK: gl.constexpr,
    RIGHT: gl.constexpr, WARPS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """R, u, o of row i for some columns."""
    COLUMNS: gl.constexpr = 16 * TILES * WARPS
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, RIGHT])
    lhs: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    rhs: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    of_h: gl.constexpr = in_memory(K, WARPS, TILES)
    of_rows: gl.constexpr = in_memory(CHUNK, WARPS, TILES)

    left = gl.program_id(0) * COLUMNS
    head = gl.program_id(1)
    n = gl.program_id(2)
    slot = gl.load(slots_ptr + n).to(gl.int64)
    context = gl.load(context_ptr + n)
    row = n * HV + head
    m = gl.arange(0, COLUMNS, gl.SliceLayout(1, product))
    repeat = m // (16 * WARPS)
    mine = left + m // 16 % WARPS * (16 * TILES) + m % 8 * (2 * TILES) + repeat * 2 + m % 16 // 8
    o_at = o_ptr + row * V + mine
    if slot >= 0:
        i = context % CHUNK
        key_head = head // (HV // HK)
        d = gl.arange(0, K, gl.SliceLayout(1, of_h))
        columns = left + gl.arange(0, COLUMNS, gl.SliceLayout(0, of_h))
        element = head * (K * V) + d[:, None] * V + columns[None, :]
        j = gl.arange(0, CHUNK, gl.SliceLayout(1, of_rows))
        columns = left + gl.arange(0, COLUMNS, gl.SliceLayout(0, of_rows))
        rows_at = head * (CHUNK * V) + j[:, None] * V + columns[None, :]
        older = (j < i)[:, None] & (columns >= 0)[None, :]
        every = (d >= 0)[:, None]
        h = gl.load(h_ptr + slot * h_slot + element, mask=every & (context >= CHUNK), other=0.0)
        rs = gl.load(r_ptr + slot * r_slot + rows_at, mask=older, other=0.0)
        us = gl.load(u_ptr + slot * u_slot + rows_at, mask=older, other=0.0)
        on = gl.arange(0, RIGHT, gl.SliceLayout(0, rhs))[None, :]
        d = gl.arange(0, K, gl.SliceLayout(1, rhs))[:, None]
        key_at = (n * HK + key_head) * K + d
        q = gl.load(q_ptr + key_at + on * 0, mask=on == 0, other=0.0)
        k = gl.load(k_ptr + key_at + on * 0, mask=on == 1, other=0.0)
        v = gl.load(v_ptr + row * V + mine).to(gl.float32)
        beta = gl.load(beta_ptr + row)
        zero = gl.zeros([COLUMNS, RIGHT], gl.float32, product)
        snapshot = turned(h, WARPS, TILES, lhs)
        read = mma_v2(snapshot, gl.where(on == 0, q, k), zero)
        rs = turned(rs, WARPS, TILES, lhs)
        us = turned(us, WARPS, TILES, lhs)
        gdc_wait()
        j = gl.arange(0, CHUNK, gl.SliceLayout(1, rhs))[:, None]
        first = on == 0
        weights = gl.load(weights_ptr + row * CHUNK + j + on * 0, mask=first, other=0.0)
        high_at = scores_ptr + row * (2 * CHUNK) + j + on * 0
        high = gl.load(high_at, mask=first, other=0.0)
        rest = gl.load(high_at + CHUNK, mask=first, other=0.0)
        reach = gl.load(reach_ptr + row)
        o, r, u, _ = row_of_state(rs, us, read, weights, high, rest, v, beta, reach, i, product)
        gl.store(o_at, scale * o)
        new_at = head * (CHUNK * V) + i * V + mine
        gl.store(r_ptr + slot * r_slot + new_at, r)
        gl.store(u_ptr + slot * u_slot + new_at, u)
    else:
        gl.store(o_at, gl.zeros([COLUMNS], gl.float32, gl.SliceLayout(1, product)))


def serves() -> bool:
    """Not under the interpreter, which knows no layouts."""
    return not triton.knobs.runtime.interpret


def state(
    operands: tuple[torch.Tensor | float, ...],
    state: list[torch.Tensor | int],
    shape: dict[str, int],
    grid: tuple[int, int],
    tile: Tile,
) -> None:
    """Launch `_state` for `grid` value heads and rows, behind the launch that it waits for.

    `operands` and `state` are those of the kernel up to its constants, `shape` names these.
    """
    warps = min(tile.warps, shape["V"] // 16)
    tiles = min(tile.columns // (16 * warps), shape["V"] // (16 * warps))
    _state[(shape["V"] // (16 * tiles * warps), *grid)](
        *operands, *state, **shape, RIGHT=RIGHT, WARPS=warps, TILES=tiles,
        num_warps=warps, launch_pdl=True, **gpu.POLICY,
    )  # fmt: skip
