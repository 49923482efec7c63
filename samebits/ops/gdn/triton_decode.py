"""Decode kernels of `gdn` on Hopper: one row of each sequence; roundings as in `triton_chunk`.

A row is the only row of its chunk in this step (low = i, high = i + 1), so every piece of the chunk
kernels serves here too. The row that fills a chunk closes it in the same kernel, by its own
position: no work for the host, so a CUDA graph replays any mix of phases. A negative slot marks
a row of padding: zeros, no state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.device import exp2_32
from samebits.ops.gdn import tiles_sm90 as tiles
from samebits.ops.gdn.cpu import BLOCK, CHUNK
from samebits.ops.gdn.triton_chunk import strided, zeros
from samebits.ops.gdn.triton_parts import (
    NEAR,
    closed,
    decays,
    halves,
    inverse,
    load_keys,
    load_rows,
    load_scalars,
    log_decays,
    next_gamma,
    recur,
    residuals,
)

PAIR = 16  # rows of a matrix product in which q and k are rows 0 and 1


@triton.jit
def _pair(a, b, PAIR: tl.constexpr):
    """Rows a, b and zeros [PAIR, n]."""
    r = tl.arange(0, PAIR)[:, None]
    zero = tl.zeros((PAIR, a.shape[0]), a.dtype)
    return tl.where(r == 0, a[None, :], tl.where(r == 1, b[None, :], zero))


@triton.jit
def _row_of(x, index, ROWS: tl.constexpr):
    """Row `index` of x [ROWS, n]: one term of the sum is alive."""
    return tl.sum(tl.where((tl.arange(0, ROWS) == index)[:, None], x, 0.0), 0)


@triton.jit
def _row(
    q_ptr, k_ptr, g_ptr, beta_ptr, weights_ptr, scores_ptr, context_ptr, slots_ptr,
    x_ptr, x_slot, gamma_ptr, gamma_slot, ok_ptr, ok_slot, t_ptr, t_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """chunk_row, all that needs no state [K, V]: row i of gamma, T and the scores."""
    head = tl.program_id(0)
    n = tl.program_id(1)
    slot = tl.load(slots_ptr + n).to(tl.int64)
    if slot >= 0:
        i = tl.load(context_ptr + n) % CHUNK
        start = i // BLOCK * BLOCK
        key_head = head // (HV // HK)
        j = tl.arange(0, CHUNK)
        r = tl.arange(0, BLOCK)
        d = tl.arange(0, K)
        row = n * HV + head
        q = tl.load(q_ptr + (n * HK + key_head) * K + d)
        k = tl.load(k_ptr + (n * HK + key_head) * K + d)
        beta = tl.load(beta_ptr + row)
        ok_at = ok_ptr + slot * ok_slot + key_head * (K * CHUNK)
        kt = load_keys(k_ptr, ok_at, n - i, i, i + 1, key_head, HK, K, CHUNK, True)
        gamma_at = gamma_ptr + slot * gamma_slot + head * CHUNK
        before = tl.load(gamma_at + i - 1, mask=i > 0, other=0.0)
        gamma = next_gamma(before, tl.load(g_ptr + row), i)
        older = tl.load(gamma_at + j, mask=j < i, other=0.0)
        fall = exp2_32(tl.where(j <= i, gamma - tl.where(j == i, gamma, older), 0.0))
        dots = tl.dot(_pair(q, k, PAIR), kt)
        scores = tl.where(j <= i, _row_of(dots, 0, PAIR) * fall, 0.0)
        lower = tl.where(j < i, beta * (_row_of(dots, 1, PAIR) * fall), 0.0)

        t_at = t_ptr + slot * t_slot + head * (CHUNK * CHUNK)
        square = j[:, None] * CHUNK + j[None, :]
        t = tl.load(t_at + square, mask=(j < start)[:, None], other=0.0)
        earlier = tl.where(j < start, lower, 0.0).to(t.dtype)
        product = tl.dot(_pair(earlier, tl.zeros_like(earlier), PAIR), t)
        x = tl.where(j == i, 1.0, 0.0) - _row_of(product, 0, PAIR)
        x_at = x_ptr + slot * x_slot + head * (BLOCK * CHUNK)
        block = tl.load(
            x_at + r[:, None] * CHUNK + j[None, :], mask=(start + r < i)[:, None], other=0.0
        )
        inside = tl.reshape(lower, (CHUNK // BLOCK, BLOCK))
        inside = _row_of(inside, i // BLOCK, CHUNK // BLOCK)
        # In fp32 by fma, ascending: the steps of `inverse`.
        x = tl.dot(-inside[None, :], block, x[None, :], input_precision="ieee")
        x = tl.reshape(x, (CHUNK,))

        tl.store(x_at + (i - start) * CHUNK + j, x)
        tl.store(t_at + i * CHUNK + j, x.to(t.dtype))
        tl.store(weights_ptr + row * CHUNK + j, x.to(t.dtype))
        tl.store(scores_ptr + row * CHUNK + j, scores)
        tl.store(gamma_at + i, gamma)
        if head % (HV // HK) == 0:
            tl.store(ok_at + d * CHUNK + i, k)


@triton.jit
def _state(
    q_ptr, k_ptr, v_ptr, beta_ptr, weights_ptr, scores_ptr, o_ptr, scale, context_ptr, slots_ptr,
    h_ptr, h_slot, gamma_ptr, gamma_slot, ok_ptr, ok_slot, r_ptr, r_slot, u_ptr, u_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """chunk_row: R, u, o of row i for some columns; the next boundary state if i is the last."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    n = tl.program_id(2)
    slot = tl.load(slots_ptr + n).to(tl.int64)
    if slot >= 0:
        context = tl.load(context_ptr + n)
        i = context % CHUNK
        key_head = head // (HV // HK)
        j = tl.arange(0, CHUNK)
        d = tl.arange(0, K)
        row = n * HV + head
        state_at = d[:, None] * V + columns[None, :]
        h_at = h_ptr + slot * h_slot + head * (K * V) + state_at
        h = tl.load(h_at, mask=(context > 0) & (state_at >= 0), other=0.0)
        if context == 0:
            tl.store(h_at, h)
        q = tl.load(q_ptr + (n * HK + key_head) * K + d)
        k = tl.load(k_ptr + (n * HK + key_head) * K + d)
        v = tl.load(v_ptr + row * V + columns)
        beta = tl.load(beta_ptr + row)
        gamma_at = gamma_ptr + slot * gamma_slot + head * CHUNK
        reach = exp2_32(tl.load(gamma_at + i))
        row_at = j[:, None] * V + columns[None, :]
        r_at = r_ptr + slot * r_slot + head * (CHUNK * V)
        u_at = u_ptr + slot * u_slot + head * (CHUNK * V)
        older = (j < i)[:, None]
        rs = tl.load(r_at + row_at, mask=older, other=0.0)
        us = tl.load(u_at + row_at, mask=older, other=0.0)
        weights = tl.load(weights_ptr + row * CHUNK + j)
        scores, rest = halves(tl.load(scores_ptr + row * CHUNK + j), k.dtype)

        read = tl.dot(_pair(q, k, PAIR), h.to(k.dtype))
        r = (beta * (v.to(tl.float32) - reach * _row_of(read, 1, PAIR))).to(k.dtype)
        rs = tl.where((j == i)[:, None], r[None, :], rs)
        u = tl.dot(_pair(tl.zeros_like(weights), weights, PAIR), rs)
        u = _row_of(u, 1, PAIR).to(k.dtype)
        us = tl.where((j == i)[:, None], u[None, :], us)
        o = tl.dot(_pair(rest, tl.zeros_like(rest), PAIR), us, reach * read)
        o = tl.dot(_pair(scores, tl.zeros_like(scores), PAIR), us, o)
        tl.store(
            o_ptr + row * V + columns, (scale * _row_of(o, 0, PAIR)).to(o_ptr.dtype.element_ty)
        )
        tl.store(r_at + i * V + columns, r)
        tl.store(u_at + i * V + columns, u)
        if i == CHUNK - 1:
            ok_at = ok_ptr + slot * ok_slot + key_head * (K * CHUNK)
            kt = tl.load(ok_at + d[:, None] * CHUNK + j[None, :])
            tl.store(h_at, closed(kt, us, tl.load(gamma_at + j), h, CHUNK))


@triton.jit
def _recur_row(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, o_ptr, scale, context_ptr, slots_ptr,
    h_ptr, h_slot, s_ptr, s_slot, og_ptr, og_slot, ob_ptr, ob_slot,
    ok_ptr, ok_slot, ov_ptr, ov_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """cpr: one step of the recurrence for some columns; the boundary state if i is the last."""
    part = tl.program_id(0)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    n = tl.program_id(2)
    slot = tl.load(slots_ptr + n).to(tl.int64)
    if slot >= 0:
        context = tl.load(context_ptr + n)
        i = context % CHUNK
        key_head = head // (HV // HK)
        d = tl.arange(0, K)
        row = n * HV + head
        h_at = h_ptr + slot * h_slot + head * (K * V)
        s_at = s_ptr + slot * s_slot + head * (K * V)
        og_at = og_ptr + slot * og_slot + head * CHUNK
        ob_at = ob_ptr + slot * ob_slot + head * CHUNK
        ok_at = ok_ptr + slot * ok_slot + key_head * (K * CHUNK)
        ov_at = ov_ptr + slot * ov_slot + head * (CHUNK * V)
        q = tl.load(q_ptr + (n * HK + key_head) * K + d)
        k = tl.load(k_ptr + (n * HK + key_head) * K + d)
        v = tl.load(v_ptr + row * V + columns)
        g = tl.load(g_ptr + row)
        beta = tl.load(beta_ptr + row)

        turned = d[None, :] * V + columns[:, None]
        whole = turned >= 0
        s = tl.load(h_at + turned, mask=(i == 0) & (context > 0) & whole, other=0.0)
        s = tl.where(i > 0, tl.load(s_at + turned, mask=(i > 0) & whole, other=0.0), s)
        s, o = recur(s, q, k, v, g, beta, scale, K, COLUMNS, NEAR)
        tl.store(o_ptr + row * V + columns, o.to(o_ptr.dtype.element_ty))

        state_at = d[:, None] * V + columns[None, :]
        if i == CHUNK - 1:
            j = tl.arange(0, CHUNK)
            kt = load_keys(k_ptr, ok_at, n - i, i, i + 1, key_head, HK, K, CHUNK, True)
            vs = load_rows(v_ptr, ov_at, n - i, i, i + 1, head, columns, HV, V, CHUNK, True)
            betas = load_scalars(beta_ptr, ob_at, n - i, i, i + 1, head, HV, CHUNK, True)
            gamma = log_decays(g_ptr, og_at, n - i, i, i + 1, head, HV, CHUNK, True, True)
            kk = tl.dot(tl.trans(kt), kt)
            lower = betas[:, None] * (kk * decays(gamma, CHUNK))
            lower = tl.where(j[:, None] > j[None, :], lower, 0.0)
            t = tl.zeros((CHUNK, CHUNK), k.dtype)
            t = inverse(lower, t, h_ptr, h_ptr, 0, CHUNK, CHUNK, BLOCK, False)
            h = tl.load(h_at + state_at)
            u = tl.dot(t, residuals(kt, h.to(k.dtype), vs, gamma, betas)).to(k.dtype)
            tl.store(h_at + state_at, closed(kt, u, gamma, h, CHUNK))
        else:
            tl.store(s_at + turned, s)
            tl.store(ov_at + i * V + columns, v)
            if context == 0:
                tl.store(h_at + state_at, tl.zeros((K, COLUMNS), tl.float32))
            if part == 0:
                tl.store(og_at + i, g)
                tl.store(ob_at + i, beta)
                if head % (HV // HK) == 0:
                    tl.store(ok_at + d * CHUNK + i, k)


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
    o = zeros(v, raw)
    shape = {"HK": key_heads, "HV": heads, "K": key_size, "CHUNK": CHUNK}
    if raw:
        tile = tiles.DECODE_RECUR
        columns = min(tile.columns, size)
        _recur_row[(size // columns, heads, rows)](
            q, k, v, g, beta, o, scale, context, slots, *strided(state),
            **shape, V=size, BLOCK=BLOCK, COLUMNS=columns, NEAR=NEAR,
            num_warps=tile.warps, **gpu.POLICY,
        )  # fmt: skip
        return o
    h, x, gamma, keys, r, u, t = state
    weights = k.new_empty((rows, heads, CHUNK))
    scores = torch.empty_like(weights, dtype=torch.float32)
    _row[(heads, rows)](
        q, k, g, beta, weights, scores, context, slots, *strided([x, gamma, keys, t]),
        **shape, BLOCK=BLOCK, PAIR=PAIR, num_warps=tiles.DECODE_ROW.warps, **gpu.POLICY,
    )  # fmt: skip
    tile = tiles.DECODE_STATE
    columns = min(tile.columns, size)
    _state[(size // columns, heads, rows)](
        q, k, v, beta, weights, scores, o, scale, context, slots,
        *strided([h, gamma, keys, r, u]),
        **shape, V=size, COLUMNS=columns, PAIR=PAIR, num_warps=tile.warps, **gpu.POLICY,
    )  # fmt: skip
    return o
