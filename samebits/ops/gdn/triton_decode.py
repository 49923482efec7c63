"""Decoding on Hopper by `chunk_row`: one row of each sequence; roundings as in the chunk passes.

    row     all that needs no state [K, V]: gamma, row i of T and of the scores
    state   R, u and o of row i, for some columns
    close   the next boundary state of the rows that fill their chunk

Few rows take one launch for all of it (`gluon_decode_few`). Launches depend on shapes alone and
every row finds its phase by itself, so a CUDA graph replays any mix of phases. A negative slot
marks a row of padding: zeros, no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.device import exp2_32
from samebits.ops.gdn import gluon_close, gluon_decode, gluon_decode_few
from samebits.ops.gdn import tiles_sm90 as tiles
from samebits.ops.gdn import triton_decode_cpr as cpr
from samebits.ops.gdn.cpu import BLOCK, CHUNK
from samebits.ops.gdn.triton_parts import (
    CHAINED,
    NEAR,
    ON_CHIP,
    closed,
    halves,
    kept_keys,
    load_state,
    next_gamma,
    store_state,
    strided,
)

PAIR = 16  # rows of a matrix product in which q and k are rows 0 and 1


@triton.jit
def pair(a, b, PAIR: tl.constexpr):
    """Rows a, b and zeros [PAIR, n]."""
    r = tl.arange(0, PAIR)[:, None]
    zero = tl.zeros((PAIR, a.shape[0]), a.dtype)
    return tl.where(r == 0, a[None, :], tl.where(r == 1, b[None, :], zero))


@triton.jit
def alone(a, row: tl.constexpr, PAIR: tl.constexpr):
    """a as one row of zeros [PAIR, n]."""
    r = tl.arange(0, PAIR)[:, None]
    return tl.where(r == row, a[None, :], tl.zeros((PAIR, a.shape[0]), a.dtype))


@triton.jit
def row_of(x, index, ROWS: tl.constexpr):
    """Row `index` of x [ROWS, n]: one term of the sum is alive."""
    return tl.sum(tl.where((tl.arange(0, ROWS) == index)[:, None], x, 0.0), 0)


@triton.jit
def products(q, k, ok_at, i, K: tl.constexpr, CHUNK: tl.constexpr, PAIR: tl.constexpr):
    """dot(q, k_j) and dot(k, k_j) [PAIR, CHUNK], rows 0 and 1, of the keys up to row i."""
    j = tl.arange(0, CHUNK)
    kt = tl.where((j < i)[None, :], kept_keys(ok_at, i, K, CHUNK), 0.0)
    kt = tl.where((j == i)[None, :], k[:, None], kt.to(k.dtype))
    return tl.dot(pair(q, k, PAIR), kt)


@triton.jit
def row_of_chunk(
    dots, g, beta, gamma_at, x_at, t_at, i,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Row i of T [CHUNK] narrow, of the scores [CHUNK] fp32, and gamma_i."""
    start = i // BLOCK * BLOCK
    j = tl.arange(0, CHUNK)
    r = tl.arange(0, BLOCK)
    before = tl.load(gamma_at + i - 1, mask=i > 0, other=0.0)
    older = tl.load(gamma_at + j, mask=j < i, other=0.0)
    t = tl.load(t_at + j[:, None] * CHUNK + j[None, :], mask=(j < start)[:, None], other=0.0)
    block = tl.load(
        x_at + r[:, None] * CHUNK + j[None, :], mask=(start + r < i)[:, None], other=0.0
    )
    gamma = next_gamma(before, g, i)
    fall = exp2_32(tl.where(j <= i, gamma - tl.where(j == i, gamma, older), 0.0))
    scores = tl.where(j <= i, row_of(dots, 0, PAIR) * fall, 0.0)
    lower = tl.where(j < i, beta * (row_of(dots, 1, PAIR) * fall), 0.0)
    earlier = tl.where(j < start, lower, 0.0).to(t.dtype)
    product = tl.dot(alone(earlier, 0, PAIR), t)
    x = tl.where(j == i, 1.0, 0.0) - row_of(product, 0, PAIR)
    inside = tl.reshape(lower, (CHUNK // BLOCK, BLOCK))
    inside = row_of(inside, i // BLOCK, CHUNK // BLOCK)
    # In fp32 by fma, ascending: the steps of the substitution.
    x = tl.dot(-inside[None, :], block, x[None, :], input_precision="ieee")
    x = tl.reshape(x, (CHUNK,))
    narrow = x.to(t.dtype)
    tl.store(x_at + (i - start) * CHUNK + j, x)
    tl.store(t_at + i * CHUNK + j, narrow)
    tl.store(gamma_at + i, gamma)
    return narrow, scores, gamma


@triton.jit
def _row(
    q_ptr, k_ptr, g_ptr, beta_ptr, weights_ptr, scores_ptr, reach_ptr, context_ptr, slots_ptr,
    x_ptr, x_slot, gamma_ptr, gamma_slot, ok_ptr, ok_slot, t_ptr, t_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, PAIR: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Row i of T, of the two parts of the scores and exp2(gamma_i), for GROUP value heads."""
    group = tl.program_id(0)
    n = tl.program_id(1)
    if ON_CHIP:  # in this order: `_state` reads what came before this kernel without a wait
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + n).to(tl.int64)
    if slot >= 0:
        i = tl.load(context_ptr + n) % CHUNK
        key_head = group * GROUP // (HV // HK)
        j = tl.arange(0, CHUNK)
        d = tl.arange(0, K)
        q = tl.load(q_ptr + (n * HK + key_head) * K + d)
        k = tl.load(k_ptr + (n * HK + key_head) * K + d)
        ok_at = ok_ptr + slot * ok_slot + key_head * (K * CHUNK)
        dots = products(q, k, ok_at, i, K, CHUNK, PAIR)
        for member in tl.static_range(0, GROUP):
            head = group * GROUP + member
            row = n * HV + head
            narrow, scores, gamma = row_of_chunk(
                dots, tl.load(g_ptr + row), tl.load(beta_ptr + row),
                gamma_ptr + slot * gamma_slot + head * CHUNK,
                x_ptr + slot * x_slot + head * (BLOCK * CHUNK),
                t_ptr + slot * t_slot + head * (CHUNK * CHUNK), i, CHUNK, BLOCK, PAIR,
            )  # fmt: skip
            high, rest = halves(scores, k.dtype)
            tl.store(weights_ptr + row * CHUNK + j, narrow)
            tl.store(scores_ptr + row * (2 * CHUNK) + j, high)
            tl.store(scores_ptr + row * (2 * CHUNK) + CHUNK + j, rest)
            tl.store(reach_ptr + row, exp2_32(gamma))
        if group * GROUP % (HV // HK) == 0:
            tl.store(ok_at + d * CHUNK + i, k)


@triton.jit
def outputs(
    h, rs, us, q, k, v, beta, reach, weights, high, rest, i,
    CHUNK: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """o before its scale, r and u [columns] of row i; rs, us hold the rows before it."""
    j = tl.arange(0, CHUNK)[:, None]
    read = tl.dot(pair(q, k, PAIR), h.to(k.dtype))
    r = (beta * (v.to(tl.float32) - reach * row_of(read, 1, PAIR))).to(k.dtype)
    u = tl.dot(alone(weights, 1, PAIR), tl.where(j == i, r[None, :], rs))
    u = row_of(u, 1, PAIR).to(k.dtype)
    us = tl.where(j == i, u[None, :], us)
    o = tl.dot(alone(rest, 0, PAIR), us, reach * read)
    o = tl.dot(alone(high, 0, PAIR), us, o)
    return row_of(o, 0, PAIR), r, u


@triton.jit
def _state(
    q_ptr, k_ptr, v_ptr, beta_ptr, weights_ptr, scores_ptr, reach_ptr, o_ptr, scale,
    context_ptr, slots_ptr, h_ptr, h_slot, r_ptr, r_slot, u_ptr, u_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """R, u, o of row i for some columns; for the interpreter, the chip has `gluon_decode`."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    n = tl.program_id(2)
    slot = tl.load(slots_ptr + n).to(tl.int64)
    row = n * HV + head
    o_at = o_ptr + row * V + columns
    if slot >= 0:
        context = tl.load(context_ptr + n)
        i = context % CHUNK
        key_head = head // (HV // HK)
        j = tl.arange(0, CHUNK)
        d = tl.arange(0, K)
        state_at = d[:, None] * V + columns[None, :]
        h_at = h_ptr + slot * h_slot + head * (K * V) + state_at
        row_at = j[:, None] * V + columns[None, :]
        r_at = r_ptr + slot * r_slot + head * (CHUNK * V)
        u_at = u_ptr + slot * u_slot + head * (CHUNK * V)
        older = (j < i)[:, None]
        h = tl.load(h_at, mask=(context >= CHUNK) & (state_at >= 0), other=0.0)
        rs = tl.load(r_at + row_at, mask=older, other=0.0)
        us = tl.load(u_at + row_at, mask=older, other=0.0)
        q = tl.load(q_ptr + (n * HK + key_head) * K + d)
        k = tl.load(k_ptr + (n * HK + key_head) * K + d)
        v = tl.load(v_ptr + row * V + columns)
        beta = tl.load(beta_ptr + row)
        weights = tl.load(weights_ptr + row * CHUNK + j)
        high = tl.load(scores_ptr + row * (2 * CHUNK) + j)
        rest = tl.load(scores_ptr + row * (2 * CHUNK) + CHUNK + j)
        reach = tl.load(reach_ptr + row)
        o, r, u = outputs(h, rs, us, q, k, v, beta, reach, weights, high, rest, i, CHUNK, PAIR)
        tl.store(o_at, (scale * o).to(o_ptr.dtype.element_ty))
        tl.store(r_at + i * V + columns, r)
        tl.store(u_at + i * V + columns, u)
    else:
        tl.store(o_at, tl.zeros((COLUMNS,), o_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["rows"])  # a captured batch must not need a kernel of its own
def _close(
    context_ptr, slots_ptr, h_ptr, h_slot, rest_ptr, rest_slot, ties_ptr, ties_slot,
    gamma_ptr, gamma_slot, ok_ptr, ok_slot, u_ptr, u_slot, rows,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Boundary states of the rows that are the last of their chunk, shared out among all programs.

    For what `gluon_close` does not serve: head sizes of 32, and the interpreter. Work is numbered
    row by row, head by head, block by block of columns.
    """
    each: tl.constexpr = HV * (V // COLUMNS)
    here = tl.program_id(0)
    if ON_CHIP:
        tl.extra.cuda.gdc_wait()
    done = 0
    for from_ in tl.range(0, rows, TABLE):
        s = from_ + tl.arange(0, TABLE)
        live = s < rows
        last = tl.load(context_ptr + s, mask=live, other=0) % CHUNK == CHUNK - 1
        last = (last & (tl.load(slots_ptr + s, mask=live, other=-1) >= 0)).to(tl.int32)
        before = done + tl.cumsum(last, 0) - last
        count = tl.sum(last, 0)
        # The first piece of work of these rows that is this program's.
        first = (done * each + tl.num_programs(0) - 1 - here) // tl.num_programs(0)
        first = first * tl.num_programs(0) + here
        for work in tl.range(first, (done + count) * each, tl.num_programs(0)):
            n = tl.sum(tl.where((before == work // each) & (last > 0), s, 0), 0)
            head = work % each // (V // COLUMNS)
            columns = work % (V // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
            slot = tl.load(slots_ptr + n).to(tl.int64)
            j = tl.arange(0, CHUNK)
            d = tl.arange(0, K)
            u_at = u_ptr + slot * u_slot + head * (CHUNK * V)
            ok_at = ok_ptr + slot * ok_slot + head // (HV // HK) * (K * CHUNK)
            h = load_state(
                h_ptr, h_slot, rest_ptr, rest_slot, ties_ptr, ties_slot, slot, head,
                d, columns, tl.load(context_ptr + n) >= CHUNK, K, V, COLUMNS, True,
            )  # fmt: skip
            u = tl.load(u_at + j[:, None] * V + columns[None, :])
            kt = tl.load(ok_at + d[:, None] * CHUNK + j[None, :])
            gamma = tl.load(gamma_ptr + slot * gamma_slot + head * CHUNK + j)
            store_state(
                closed(kt, u, gamma, h, CHUNK),
                h_ptr, h_slot, rest_ptr, rest_slot, ties_ptr, ties_slot, slot, head,
                d, columns, True, K, V, COLUMNS, True,
            )  # fmt: skip
        done += count


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: Sequence[torch.Tensor],
    slots: torch.Tensor,
    context: torch.Tensor,
    scale: float,
    raw: bool,
) -> torch.Tensor:
    """o [N, HV, V] of one row of each of N sequences, unchecked; slots and context int32."""
    rows, key_heads, key_size = k.shape
    heads, size = v.shape[1:]
    shape = {"HK": key_heads, "HV": heads, "K": key_size, "CHUNK": CHUNK}
    if raw:
        o = torch.zeros_like(v)
        tile = tiles.DECODE_RECUR
        columns = tile.fitted(size)
        cpr._recur_row[(size // columns, heads, rows)](
            q, k, v, g, beta, o, scale, context, slots, *strided(state),
            **shape, V=size, BLOCK=BLOCK, COLUMNS=columns, NEAR=NEAR,
            num_warps=tile.warps, **gpu.POLICY,
        )  # fmt: skip
        return o
    if rows * heads <= tiles.FEW_PAIRS and gluon_decode_few.serves(key_size, size):
        return gluon_decode_few.step((q, k, v, g, beta), state, slots, context, scale)
    *planes, x, gamma, keys, r, u, t = state
    o = torch.empty_like(v, dtype=torch.float32)
    weights = k.new_empty((rows, heads, CHUNK))
    scores = k.new_empty((rows, heads, 2, CHUNK))
    reach = torch.empty_like(g)
    tile = tiles.DECODE_ROW
    group = math.gcd(tile.heads, heads // key_heads)
    _row[(heads // group, rows)](
        q, k, g, beta, weights, scores, reach, context, slots, *strided([x, gamma, keys, t]),
        **shape, BLOCK=BLOCK, PAIR=PAIR, GROUP=group,
        num_warps=tile.warps, **CHAINED, **gpu.POLICY,
    )  # fmt: skip
    operands = (q, k, v, beta, weights, scores, reach, o, scale, context, slots)
    used, constants = strided([planes[0], r, u]), shape | {"V": size}
    if gluon_decode.serves():
        gluon_decode.state(operands, used, constants, (heads, rows), tiles.DECODE_STATE)
    else:
        _state[(1, heads, rows)](*operands, *used, **constants, COLUMNS=size, PAIR=PAIR)
    if gluon_close.serves(key_size, size):
        gluon_close.close(
            planes, (gamma, keys, u), (context, slots),
            constants, tiles.DECODE_CLOSE, tiles.CLOSE_TABLE, tiles.CLOSING,
        )  # fmt: skip
        return o
    tile = tiles.ODD_CLOSE
    columns = tile.fitted(size)
    work = rows * heads * (size // columns)
    _close[(min(work, tiles.CLOSING),)](
        context, slots, *strided([*planes, gamma, keys, u]), rows,
        **constants, COLUMNS=columns, TABLE=tiles.TABLE,
        num_warps=tile.warps, **CHAINED, **gpu.POLICY,
    )  # fmt: skip
    return o
