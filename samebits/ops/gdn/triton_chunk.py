"""Chunk kernels of `gdn` on Hopper: prefill and training, and what decoding shares with them.

The roundings are those of `reference.py`; a matrix product sums in the order of the chip's MMA, a
row sum of `cpr` in the order of `device.fold`. "Narrow" is the dtype of the keys: bf16, or fp32
under Triton's interpreter, where nothing is rounded and only control flow is tested.

One chunk of one sequence in one step holds rows low .. high - 1; rows below `low` are older and lie
in the state (RAW: as raw operands, `cpr`; else as finished rows, `chunk_row`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.device import exp2_32, fold
from samebits.ops.gdn import tiles_sm90 as tiles
from samebits.ops.gdn.cpu import BLOCK, CHUNK

NEAR = 4  # neighbours summed first in a row sum over K: part of the schedule


@triton.jit
def place(chunk, owner_ptr, base_ptr, starts_ptr, context_ptr, CHUNK: tl.constexpr):
    """Sequence of a chunk (-1: none), row of the operands behind its row 0, low, high."""
    sequence = tl.load(owner_ptr + chunk)
    known = sequence >= 0
    start = tl.load(starts_ptr + sequence, mask=known, other=0)
    end = tl.load(starts_ptr + sequence + 1, mask=known, other=0)
    base = tl.load(base_ptr + sequence, mask=known, other=0)
    phase = tl.load(context_ptr + sequence, mask=known, other=0) % CHUNK
    first = start - phase + (chunk - base) * CHUNK
    return sequence, first, tl.maximum(start - first, 0), tl.minimum(end - first, CHUNK)


@triton.jit
def load_keys(
    k_ptr, old_at, first, low, high, head,
    HK: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """Keys of a chunk [K, CHUNK], zero outside of its rows."""
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, K)
    inside = (i >= low) & (i < high)
    at = ((first + i).to(tl.int64) * HK + head) * K
    kt = tl.load(k_ptr + at[None, :] + d[:, None], mask=inside[None, :], other=0.0)
    if OPEN:
        older = (i < low)[None, :]
        old = tl.load(old_at + d[:, None] * CHUNK + i[None, :], mask=older, other=0.0)
        kt = tl.where(older, old, kt)
    return kt


@triton.jit
def load_rows(
    x_ptr, old_at, first, low, high, head, columns,
    H: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """Columns of x [T, H, N] at a chunk's rows [CHUNK, columns], zero outside of its rows."""
    i = tl.arange(0, CHUNK)
    inside = (i >= low) & (i < high)
    at = ((first + i).to(tl.int64) * H + head) * N
    x = tl.load(x_ptr + at[:, None] + columns[None, :], mask=inside[:, None], other=0.0)
    if OPEN:
        older = (i < low)[:, None]
        old = tl.load(old_at + i[:, None] * N + columns[None, :], mask=older, other=0.0)
        x = tl.where(older, old, x)
    return x


@triton.jit
def load_scalars(
    x_ptr, old_at, first, low, high, head,
    H: tl.constexpr, CHUNK: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """x [T, H] at a chunk's rows [CHUNK], zero outside of its rows."""
    i = tl.arange(0, CHUNK)
    inside = (i >= low) & (i < high)
    x = tl.load(x_ptr + (first + i).to(tl.int64) * H + head, mask=inside, other=0.0)
    if OPEN:
        x = tl.where(i < low, tl.load(old_at + i, mask=i < low, other=0.0), x)
    return x


@triton.jit
def next_gamma(gamma, g, i):
    """gamma_i of g_i and gamma_(i - 1)."""
    step = g * 1.442695
    return tl.where(i == 0, step, gamma + step)


@triton.jit
def log_decays(
    g_ptr, old_at, first, low, high, head,
    HV: tl.constexpr, CHUNK: tl.constexpr, OPEN: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """gamma [CHUNK], one row after the other; the last row's value behind the end of the chunk."""
    i = tl.arange(0, CHUNK)
    gamma = tl.zeros((CHUNK,), tl.float32)
    last = tl.sum(gamma, 0)
    for r in tl.range(0, CHUNK, loop_unroll_factor=8):  # so that loads run ahead of the sum
        inside = (r >= low) & (r < high)
        g = tl.load(g_ptr + (first + r).to(tl.int64) * HV + head, mask=inside, other=0.0)
        if OPEN:
            old = tl.load(old_at + r, mask=r < low, other=0.0)
            if RAW:
                last = next_gamma(last, tl.where(r < low, old, g), r)
            else:
                last = tl.where(r < low, old, next_gamma(last, g, r))
        else:
            last = next_gamma(last, g, r)
        gamma = tl.where(i == r, last, gamma)
    return gamma


@triton.jit
def last_of(gamma, CHUNK: tl.constexpr):
    """gamma of a chunk's last row."""
    return tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, gamma, 0.0), 0)


@triton.jit
def decays(gamma, CHUNK: tl.constexpr):
    """exp2(gamma_i - gamma_j) [CHUNK, CHUNK], 0 above the diagonal."""
    i = tl.arange(0, CHUNK)
    difference = gamma[:, None] - gamma[None, :]
    return tl.where(i[:, None] >= i[None, :], exp2_32(difference), 0.0)


@triton.jit
def inverse(
    lower, t, x_old, x_new, low, high,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """Rows low .. of (I + lower)^-1 into t [CHUNK, CHUNK], narrow, which holds those below `low`.

    OPEN: fp32 rows below `low` of its block are read at x_old [BLOCK, CHUNK], and those of the
    block that stays open behind row high - 1 are stored at x_new.
    """
    i = tl.arange(0, CHUNK)
    r = tl.arange(0, BLOCK)
    blocks = tl.arange(0, CHUNK // BLOCK)
    stacked = tl.reshape(lower, (CHUNK // BLOCK, BLOCK, CHUNK))
    for b in tl.static_range(0, CHUNK // BLOCK):
        row = b * BLOCK + r
        mine = tl.sum(tl.where((blocks == b)[:, None, None], stacked, 0.0), 0)
        x = tl.where(row[:, None] == i[None, :], 1.0, 0.0)
        if b > 0:
            earlier = tl.where((i < b * BLOCK)[None, :], mine, 0.0).to(t.dtype)
            x = x - tl.dot(earlier, t)
        if OPEN:
            older = ((row < low) & (b == low // BLOCK))[:, None]
            at = r[:, None] * CHUNK + i[None, :]
            x = tl.where(older, tl.load(x_old + at, mask=older, other=0.0), x)
        for j in range(BLOCK - 1):
            pivot = tl.sum(tl.where((r == j)[:, None], x, 0.0), 0)
            factor = tl.sum(tl.where((i == b * BLOCK + j)[None, :], mine, 0.0), 1)
            step = tl.fma(
                tl.broadcast_to(-factor[:, None], (BLOCK, CHUNK)),
                tl.broadcast_to(pivot[None, :], (BLOCK, CHUNK)),
                x,
            )
            x = tl.where(((r > j) & (row >= low))[:, None], step, x)
        if OPEN:
            stays = (row < high) & (b == high // BLOCK)
            tl.store(x_new + r[:, None] * CHUNK + i[None, :], x, mask=stays[:, None])
        narrow = tl.broadcast_to(x.to(t.dtype)[None, :, :], (CHUNK // BLOCK, BLOCK, CHUNK))
        new = (i // BLOCK == b) & (i >= low)
        t = tl.where(new[:, None], tl.reshape(narrow, (CHUNK, CHUNK)), t)
    return t


@triton.jit
def residuals(kt, snapshot, v, gamma, beta):
    """R [CHUNK, columns] narrow."""
    seen = exp2_32(gamma)[:, None] * tl.dot(tl.trans(kt), snapshot)
    return (beta[:, None] * (v.to(tl.float32) - seen)).to(kt.dtype)


@triton.jit
def halves(x, narrow: tl.constexpr):
    """fp32 x rounded to a narrow dtype, and what that leaves of it, rounded likewise."""
    high = x.to(narrow)
    return high, (x - high.to(tl.float32)).to(narrow)


@triton.jit
def closed(kt, u, gamma, h, CHUNK: tl.constexpr):
    """The fp32 state at the chunk's end."""
    last = last_of(gamma, CHUNK)
    weighted = (u.to(tl.float32) * exp2_32(last - gamma)[:, None]).to(kt.dtype)
    return tl.dot(kt, weighted, h * exp2_32(last))


@triton.jit
def _prepare(
    k_ptr, g_ptr, beta_ptr, gamma_ptr, t_ptr, x_ptr,
    owner_ptr, base_ptr, starts_ptr, context_ptr, slots_ptr,
    ok_ptr, ok_slot, og_ptr, og_slot, ob_ptr, ob_slot, ox_ptr, ox_slot, ot_ptr, ot_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, OPEN: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """gamma and T of one chunk and value head."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    sequence, first, low, high = place(chunk, owner_ptr, base_ptr, starts_ptr, context_ptr, CHUNK)
    if sequence >= 0:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        i = tl.arange(0, CHUNK)
        key_head = head // (HV // HK)
        kt = load_keys(
            k_ptr, ok_ptr + slot * ok_slot + key_head * (K * CHUNK),
            first, low, high, key_head, HK, K, CHUNK, OPEN,
        )  # fmt: skip
        og_at = og_ptr + slot * og_slot + head * CHUNK
        gamma = log_decays(g_ptr, og_at, first, low, high, head, HV, CHUNK, OPEN, RAW)
        ob_at = ob_ptr + slot * ob_slot + head * CHUNK
        beta = load_scalars(beta_ptr, ob_at, first, low, high, head, HV, CHUNK, OPEN and RAW)
        kk = tl.dot(tl.trans(kt), kt)
        lower = beta[:, None] * (kk * decays(gamma, CHUNK))
        lower = tl.where(i[:, None] > i[None, :], lower, 0.0)
        square = i[:, None] * CHUNK + i[None, :]
        t = tl.zeros((CHUNK, CHUNK), t_ptr.dtype.element_ty)
        where = (chunk.to(tl.int64) * HV + head) * CHUNK
        if OPEN and not RAW:
            ot_at = ot_ptr + slot * ot_slot + head * (CHUNK * CHUNK)
            t = tl.load(ot_at + square, mask=(i < low)[:, None], other=0.0)
            ox_at = ox_ptr + slot * ox_slot + head * (BLOCK * CHUNK)
            x_at = x_ptr + (sequence.to(tl.int64) * HV + head) * (BLOCK * CHUNK)
            t = inverse(lower, t, ox_at, x_at, low, high, CHUNK, BLOCK, True)
        else:
            t = inverse(lower, t, x_ptr, x_ptr, 0, high, CHUNK, BLOCK, False)
        tl.store(gamma_ptr + where + i, gamma)
        tl.store(t_ptr + where * CHUNK + square, t)


@triton.jit
def _scan(
    k_ptr, v_ptr, beta_ptr, gamma_ptr, t_ptr, u_ptr, entry_ptr,
    base_ptr, starts_ptr, context_ptr, slots_ptr,
    oh_ptr, oh_slot, ok_ptr, ok_slot, ob_ptr, ob_slot, or_ptr, or_slot, os_ptr, os_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, OPEN: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Boundary states of one sequence and value head, chunk after chunk, for some columns.

    Stores for every chunk what its rows start from: the snapshot of the boundary state or, RAW, the
    fp32 state (in a chunk with older rows: the running one), and u unless RAW.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    base = tl.load(base_ptr + sequence)
    chunks = tl.load(base_ptr + sequence + 1) - base
    if chunks > 0:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        start = tl.load(starts_ptr + sequence)
        end = tl.load(starts_ptr + sequence + 1)
        context = tl.load(context_ptr + sequence)
        key_head = head // (HV // HK)
        i = tl.arange(0, CHUNK)
        state_at = tl.arange(0, K)[:, None] * V + columns[None, :]
        row_at = i[:, None] * V + columns[None, :]
        square = i[:, None] * CHUNK + i[None, :]
        oh_at = oh_ptr + slot * oh_slot + head * (K * V) + state_at
        ok_at = ok_ptr + slot * ok_slot + key_head * (K * CHUNK)
        ob_at = ob_ptr + slot * ob_slot + head * CHUNK
        or_at = or_ptr + slot * or_slot + head * (CHUNK * V)
        h = tl.load(oh_at, mask=(context > 0) & (state_at >= 0), other=0.0)
        for c in tl.range(0, chunks, num_stages=STAGES):
            first = start - context % CHUNK + c * CHUNK
            low = tl.maximum(start - first, 0)
            high = tl.minimum(end - first, CHUNK)
            at = (base + c).to(tl.int64) * HV + head
            kt = load_keys(k_ptr, ok_at, first, low, high, key_head, HK, K, CHUNK, OPEN)
            v = load_rows(v_ptr, or_at, first, low, high, head, columns, HV, V, CHUNK, OPEN and RAW)
            beta = load_scalars(beta_ptr, ob_at, first, low, high, head, HV, CHUNK, OPEN and RAW)
            gamma = tl.load(gamma_ptr + at * CHUNK + i)
            t = tl.load(t_ptr + at * (CHUNK * CHUNK) + square)
            snapshot = h.to(kt.dtype)
            entry_at = entry_ptr + at * (K * V) + state_at
            if RAW:
                entry = h
                if OPEN:
                    older = (low > 0) & (state_at >= 0)
                    os_at = os_ptr + slot * os_slot + head * (K * V) + state_at
                    entry = tl.where(older, tl.load(os_at, mask=older, other=0.0), h)
                tl.store(entry_at, entry)
            else:
                tl.store(entry_at, snapshot)
            r = residuals(kt, snapshot, v, gamma, beta)
            if OPEN and not RAW:
                older = (i < low)[:, None]
                r = tl.where(older, tl.load(or_at + row_at, mask=older, other=0.0), r)
                new = ((i >= low) & (i < high) & (high < CHUNK))[:, None]
                tl.store(or_at + row_at, r, mask=new)
            u = tl.dot(t, r).to(kt.dtype)
            if not RAW:
                tl.store(u_ptr + at * (CHUNK * V) + row_at, u)
            h = tl.where(high == CHUNK, closed(kt, u, gamma, h, CHUNK), h)
        tl.store(oh_at, h)


@triton.jit
def _rows(
    q_ptr, k_ptr, gamma_ptr, u_ptr, entry_ptr, o_ptr, scale,
    owner_ptr, base_ptr, starts_ptr, context_ptr, slots_ptr, ok_ptr, ok_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """chunk_row: outputs of one chunk and value head, some columns."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    chunk = tl.program_id(1)
    head = tl.program_id(2)
    sequence, first, low, high = place(chunk, owner_ptr, base_ptr, starts_ptr, context_ptr, CHUNK)
    if sequence >= 0:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        key_head = head // (HV // HK)
        i = tl.arange(0, CHUNK)
        d = tl.arange(0, K)
        at = chunk.to(tl.int64) * HV + head
        ok_at = ok_ptr + slot * ok_slot + key_head * (K * CHUNK)
        kt = load_keys(k_ptr, ok_at, first, low, high, key_head, HK, K, CHUNK, OPEN)
        q = load_rows(q_ptr, q_ptr, first, low, high, key_head, d, HK, K, CHUNK, False)
        gamma = tl.load(gamma_ptr + at * CHUNK + i)
        u = tl.load(u_ptr + at * (CHUNK * V) + i[:, None] * V + columns[None, :])
        entry = tl.load(entry_ptr + at * (K * V) + d[:, None] * V + columns[None, :])
        exact = tl.dot(q, kt) * decays(gamma, CHUNK)
        scores, rest = halves(exact, kt.dtype)
        o = tl.dot(rest, u, exp2_32(gamma)[:, None] * tl.dot(q, entry))
        o = tl.dot(scores, u, o)
        o_at = o_ptr + ((first + i).to(tl.int64) * HV + head)[:, None] * V + columns[None, :]
        inside = (i >= low) & (i < high)
        tl.store(o_at, (scale * o).to(o_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def recur(s, q, k, v, g, beta, scale, K: tl.constexpr, COLUMNS: tl.constexpr, NEAR: tl.constexpr):
    """One step of the recurrence on s [COLUMNS, K] fp32 -> (s, o [COLUMNS] fp32)."""
    q = q.to(tl.float32)[None, :]
    k = k.to(tl.float32)[None, :]
    s = s * exp2_32(g * 1.442695)
    delta = beta * (v.to(tl.float32) - fold(s * k, COLUMNS, K, NEAR))
    s = tl.fma(tl.broadcast_to(k, s.shape), tl.broadcast_to(delta[:, None], s.shape), s)
    return s, scale * fold(s * q, COLUMNS, K, NEAR)


@triton.jit
def _recur(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, entry_ptr, o_ptr, scale,
    owner_ptr, base_ptr, starts_ptr, context_ptr, slots_ptr, os_ptr, os_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, NEAR: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """cpr: outputs of one chunk and value head by the recurrence, some columns."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    chunk = tl.program_id(1)
    head = tl.program_id(2)
    sequence, first, low, high = place(chunk, owner_ptr, base_ptr, starts_ptr, context_ptr, CHUNK)
    if sequence >= 0:
        key_head = head // (HV // HK)
        d = tl.arange(0, K)
        state_at = d[None, :] * V + columns[:, None]
        at = chunk.to(tl.int64) * HV + head
        s = tl.load(entry_ptr + at * (K * V) + state_at)
        for r in tl.range(low, high):
            token = (first + r).to(tl.int64)
            q = tl.load(q_ptr + (token * HK + key_head) * K + d)
            k = tl.load(k_ptr + (token * HK + key_head) * K + d)
            row = token * HV + head
            v = tl.load(v_ptr + row * V + columns)
            s, o = recur(
                s, q, k, v, tl.load(g_ptr + row), tl.load(beta_ptr + row), scale, K, COLUMNS, NEAR
            )
            tl.store(o_ptr + row * V + columns, o.to(o_ptr.dtype.element_ty))
        if OPEN:
            slot = tl.load(slots_ptr + sequence).to(tl.int64)
            os_at = os_ptr + slot * os_slot + head * (K * V) + state_at
            tl.store(os_at, s, mask=(high < CHUNK) & (state_at >= 0))


@triton.jit
def _save(
    k_ptr, v_ptr, g_ptr, beta_ptr, gamma_ptr, t_ptr, x_ptr, u_ptr,
    owner_ptr, base_ptr, starts_ptr, context_ptr, slots_ptr,
    ok_ptr, ok_slot, og_ptr, og_slot, ob_ptr, ob_slot, ov_ptr, ov_slot,
    ox_ptr, ox_slot, ot_ptr, ot_slot, ou_ptr, ou_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Rows of the chunk that a sequence leaves open, into its state; last, as others read it."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    base = tl.load(base_ptr + sequence)
    chunks = tl.load(base_ptr + sequence + 1) - base
    if chunks > 0:
        chunk = base + chunks - 1
        _, first, low, high = place(chunk, owner_ptr, base_ptr, starts_ptr, context_ptr, CHUNK)
        if high < CHUNK:
            slot = tl.load(slots_ptr + sequence).to(tl.int64)
            i = tl.arange(0, CHUNK)
            d = tl.arange(0, K)
            e = tl.arange(0, V)
            new = (i >= low) & (i < high)
            key_head = head // (HV // HK)
            at = chunk.to(tl.int64) * HV + head
            if head % (HV // HK) == 0:
                kt = load_keys(k_ptr, k_ptr, first, low, high, key_head, HK, K, CHUNK, False)
                ok_at = ok_ptr + slot * ok_slot + key_head * (K * CHUNK)
                tl.store(ok_at + d[:, None] * CHUNK + i[None, :], kt, mask=new[None, :])
            og_at = og_ptr + slot * og_slot + head * CHUNK + i
            row_at = head * (CHUNK * V) + i[:, None] * V + e[None, :]
            if RAW:
                g = load_scalars(g_ptr, g_ptr, first, low, high, head, HV, CHUNK, False)
                tl.store(og_at, g, mask=new)
                beta = load_scalars(beta_ptr, g_ptr, first, low, high, head, HV, CHUNK, False)
                tl.store(ob_ptr + slot * ob_slot + head * CHUNK + i, beta, mask=new)
                v = load_rows(v_ptr, v_ptr, first, low, high, head, e, HV, V, CHUNK, False)
                tl.store(ov_ptr + slot * ov_slot + row_at, v, mask=new[:, None])
            else:
                tl.store(og_at, tl.load(gamma_ptr + at * CHUNK + i), mask=new)
                square = i[:, None] * CHUNK + i[None, :]
                t = tl.load(t_ptr + at * (CHUNK * CHUNK) + square)
                ot_at = ot_ptr + slot * ot_slot + head * (CHUNK * CHUNK)
                tl.store(ot_at + square, t, mask=new[:, None])
                u = tl.load(u_ptr + at * (CHUNK * V) + i[:, None] * V + e[None, :])
                tl.store(ou_ptr + slot * ou_slot + row_at, u, mask=new[:, None])
                r = tl.arange(0, BLOCK)
                block = r[:, None] * CHUNK + i[None, :]
                held = (r < high % BLOCK)[:, None]
                x_at = x_ptr + (sequence.to(tl.int64) * HV + head) * (BLOCK * CHUNK)
                ox_at = ox_ptr + slot * ox_slot + head * (BLOCK * CHUNK)
                tl.store(ox_at + block, tl.load(x_at + block, mask=held, other=0.0), mask=held)


@dataclasses.dataclass(frozen=True)
class Steps:
    """Where the chunks of a step lie; int32 on the device, made without a look at their values.

    owner    [chunks] sequence of each chunk, -1 behind the last one
    base     [R + 1] first chunk of each sequence
    starts, context, slots as the package's query_start_loc, context_lens, slots
    """

    owner: torch.Tensor
    base: torch.Tensor
    starts: torch.Tensor
    context: torch.Tensor
    slots: torch.Tensor


def steps(starts: torch.Tensor, context: torch.Tensor, slots: torch.Tensor, tokens: int) -> Steps:
    """Tables of a step of `tokens` rows; more chunks than it can have, so no value is awaited."""
    starts, context, slots = (x.to(torch.int32) for x in (starts, context, slots))
    lengths = starts.diff()
    chunks = (context % CHUNK + lengths + CHUNK - 1) // CHUNK
    chunks = torch.where(lengths > 0, chunks, torch.zeros_like(chunks))
    ends = chunks.cumsum(0, dtype=torch.int32)
    base = torch.cat([ends.new_zeros(1), ends])
    index = torch.arange(tokens // CHUNK + 2 * len(lengths), device=ends.device, dtype=torch.int32)
    owner = torch.searchsorted(ends, index, right=True, out_int32=True)
    return Steps(torch.where(owner < len(ends), owner, -1), base, starts, context, slots)


def whole_sequences(
    v: torch.Tensor, key_size: int, initial_state: torch.Tensor | None, starts: torch.Tensor
) -> tuple[torch.Tensor, Steps]:
    """Boundary tensor [R, HV, K, V] to work on and tables for sequences from phase 0."""
    sequences = len(starts) - 1
    shape = (sequences, v.shape[1], key_size, v.shape[2])
    slots = torch.arange(sequences, device=v.device)
    if initial_state is None:
        h = v.new_empty(shape, dtype=torch.float32)
        context = torch.zeros_like(slots)
    else:
        h = initial_state.clone(memory_format=torch.contiguous_format)
        context = torch.full_like(slots, CHUNK)
    return h, steps(starts, context, slots, len(v))


def strided(state: Sequence[torch.Tensor]) -> list[torch.Tensor | int]:
    """Each state tensor followed by its stride from slot to slot."""
    return [part for tensor in state for part in (tensor, tensor.stride(0))]


@dataclasses.dataclass(frozen=True)
class Work:
    """What the passes of one call hand on, by chunk."""

    gamma: torch.Tensor  # [chunks, HV, CHUNK] fp32
    t: torch.Tensor  # [chunks, HV, CHUNK, CHUNK] narrow
    u: torch.Tensor  # [chunks, HV, CHUNK, V] narrow; empty for cpr
    entry: torch.Tensor  # [chunks, HV, K, V] narrow (chunk_row) or fp32 (cpr)


def boundaries(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: Sequence[torch.Tensor],
    at: Steps,
    raw: bool,
) -> tuple[Work, torch.Tensor]:
    """The passes that both schedules share; boundary states in state[0] move on.

    `state` is the boundary tensor alone (no chunk is open at the start, none is kept), or all that
    `state_spec` lists. Also returns fp32 rows [R, HV, BLOCK, CHUNK] of blocks that stay open.
    """
    key_heads, key_size = k.shape[1:]
    heads, size = v.shape[1:]
    chunks, sequences = len(at.owner), len(at.slots)
    is_open = len(state) > 1
    gamma = g.new_empty((chunks, heads, CHUNK))
    t = k.new_empty((chunks, heads, CHUNK, CHUNK))
    u = k.new_empty((0 if raw else chunks, heads, CHUNK, size))
    entry = (g if raw else k).new_empty((chunks, heads, key_size, size))
    x = g.new_empty((sequences if is_open else 0, heads, BLOCK, CHUNK))
    work = Work(gamma, t, u, entry)
    h, running, old_g, old_beta, old_k, old_rows, old_x, old_t = named(state, raw)
    shape = {"HK": key_heads, "HV": heads, "K": key_size, "CHUNK": CHUNK}
    shape |= {"OPEN": is_open, "RAW": raw}
    _prepare[(chunks, heads)](
        k, g, beta, gamma, t, x, at.owner, at.base, at.starts, at.context, at.slots,
        *strided([old_k, old_g, old_beta, old_x, old_t]),
        **shape, BLOCK=BLOCK, num_warps=tiles.PREPARE.warps, **gpu.POLICY,
    )  # fmt: skip
    columns = min(tiles.SCAN.columns, size)
    _scan[(size // columns, heads, sequences)](
        k, v, beta, gamma, t, u, entry, at.base, at.starts, at.context, at.slots,
        *strided([h, old_k, old_beta, old_rows, running]),
        **shape, V=size, COLUMNS=columns, STAGES=tiles.SCAN.stages,
        num_warps=tiles.SCAN.warps, **gpu.POLICY,
    )  # fmt: skip
    return work, x


def named(state: Sequence[torch.Tensor], raw: bool) -> tuple[torch.Tensor, ...]:
    """boundary, running, g or gamma, beta, k, v or r, x, t of a state; the boundary tensor stands
    in for what a schedule does not have."""
    h = state[0]
    if len(state) == 1:
        return (h,) * 8
    if raw:
        _, running, g, beta, k, v = state
        return h, running, g, beta, k, v, h, h
    _, x, gamma, k, r, _, t = state
    return h, h, gamma, h, k, r, x, t


def zeros(v: torch.Tensor, raw: bool) -> torch.Tensor:
    """o [T, HV, V] before its rows are written: fp32 for chunk_row, else the dtype of v."""
    return torch.zeros_like(v, dtype=v.dtype if raw else torch.float32)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: Sequence[torch.Tensor],
    at: Steps,
    scale: float,
    raw: bool,
) -> tuple[torch.Tensor, Work]:
    """o [T, HV, V] of `advance`, unchecked, and what a backward can use again."""
    key_heads, key_size = k.shape[1:]
    heads, size = v.shape[1:]
    o = zeros(v, raw)
    work, x = boundaries(k, v, g, beta, state, at, raw)
    h, running, old_g, old_beta, old_k, old_rows, old_x, old_t = named(state, raw)
    tables = (at.owner, at.base, at.starts, at.context, at.slots)
    shape = {"HK": key_heads, "HV": heads, "K": key_size, "V": size, "CHUNK": CHUNK}
    tile = tiles.RECUR if raw else tiles.ROWS
    columns = min(tile.columns, size)
    launch = {"COLUMNS": columns, "OPEN": len(state) > 1, "num_warps": tile.warps} | gpu.POLICY
    grid = (size // columns, len(at.owner), heads)
    if raw:
        _recur[grid](
            q, k, v, g, beta, work.entry, o, scale, *tables, *strided([running]),
            **shape, NEAR=NEAR, **launch,
        )  # fmt: skip
    else:
        _rows[grid](
            q, k, work.gamma, work.u, work.entry, o, scale, *tables, *strided([old_k]),
            **shape, **launch,
        )  # fmt: skip
    if len(state) > 1:
        old_u = h if raw else state[5]
        _save[(len(at.slots), heads)](
            k, v, g, beta, work.gamma, work.t, x, work.u, *tables,
            *strided([old_k, old_g, old_beta, old_rows, old_x, old_t, old_u]),
            **shape, BLOCK=BLOCK, RAW=raw, num_warps=4, **gpu.POLICY,
        )  # fmt: skip
    return o, work
