"""Prefill and the forward of training on Hopper, chunk by chunk: the passes and their outputs.

begin, lower, solve   where chunks lie, their decays, T (`triton_inverse.py`)
scan                  boundary states, R, u, chunk after chunk (`triton_scan.py`)
rows or recur         outputs, every chunk by itself
save                  rows of a chunk that stays open, into the state
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.gdn import gluon_rows, gluon_scan
from samebits.ops.gdn import tiles_sm90 as tiles
from samebits.ops.gdn import triton_inverse as inverse
from samebits.ops.gdn import triton_scan as scan
from samebits.ops.gdn.cpu import BLOCK, CHUNK
from samebits.ops.gdn.triton_parts import (
    CHAINED,
    NEAR,
    decays,
    follow,
    halves,
    load_keys,
    load_rows,
    load_scalars,
    place,
    recur,
    split,
    strided,
)


@triton.jit
def _rows(
    q_ptr, k_ptr, rows_ptr, u_ptr, entry_ptr, o_ptr, scale, places_ptr, slots_ptr, ok_ptr, ok_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """chunk_row: outputs of one chunk and value head, some columns.

    For what Gluon does not serve: head sizes of 32, and the interpreter (`gluon_scan.serves`).
    """
    follow()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    sequence, first, low, high = place(chunk, places_ptr)
    i = tl.arange(0, CHUNK)
    inside = ((i >= low) & (i < high))[:, None]
    o_at = o_ptr + ((first + i).to(tl.int64) * HV + head)[:, None] * V + columns[None, :]
    if sequence >= 0:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        key_head = head // (HV // HK)
        d = tl.arange(0, K)
        at = chunk.to(tl.int64) * HV + head
        rows_at = rows_ptr + at * (4 * CHUNK)
        ok_at = ok_ptr + slot * ok_slot + key_head * (K * CHUNK)
        q = load_rows(q_ptr, q_ptr, first, low, high, key_head, d, HK, K, CHUNK, False)
        kt = load_keys(k_ptr, ok_at, first, low, high, key_head, HK, K, CHUNK, OPEN)
        entry = tl.load(entry_ptr + at * (K * V) + columns[:, None] * K + d[None, :])
        u = tl.load(u_ptr + at * (CHUNK * V) + columns[:, None] * CHUNK + i[None, :])
        reach = tl.load(rows_at + CHUNK + i)
        exact = tl.dot(q, kt) * decays(tl.load(rows_at + i), CHUNK)
        scores, rest = halves(exact, kt.dtype)
        o = tl.dot(rest, tl.trans(u), reach[:, None] * tl.dot(q, tl.trans(entry)))
        o = tl.dot(scores, tl.trans(u), o)
        tl.store(o_at, (scale * o).to(o_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(o_at, tl.zeros((CHUNK, COLUMNS), o_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _recur(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, entry_ptr, o_ptr, scale,
    places_ptr, slots_ptr, os_ptr, os_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, NEAR: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """cpr: outputs of one chunk and value head by the recurrence, some columns."""
    follow()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    chunk = tl.program_id(1)
    head = tl.program_id(2)
    sequence, first, low, high = place(chunk, places_ptr)
    if sequence >= 0:
        key_head = head // (HV // HK)
        d = tl.arange(0, K)
        state_at = d[None, :] * V + columns[:, None]
        at = chunk.to(tl.int64) * HV + head
        s = tl.load(entry_ptr + at * (K * V) + columns[:, None] * K + d[None, :])
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
    else:
        for r in tl.range(low, high):
            row = (first + r).to(tl.int64) * HV + head
            tl.store(o_ptr + row * V + columns, tl.zeros((COLUMNS,), o_ptr.dtype.element_ty))


@triton.jit
def _save(
    k_ptr, v_ptr, g_ptr, beta_ptr, rows_ptr, t_ptr, x_ptr, u_ptr, places_ptr, base_ptr, slots_ptr,
    ok_ptr, ok_slot, og_ptr, og_slot, ob_ptr, ob_slot, ov_ptr, ov_slot,
    ox_ptr, ox_slot, ot_ptr, ot_slot, ou_ptr, ou_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Rows of the chunk that a sequence leaves open, into its state; last, as others read it."""
    follow()
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    base = tl.load(base_ptr + sequence)
    chunks = tl.load(base_ptr + sequence + 1) - base
    if chunks > 0:
        chunk = base + chunks - 1
        _, first, low, high = place(chunk, places_ptr)
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
                tl.store(og_at, tl.load(rows_ptr + at * (4 * CHUNK) + i), mask=new)
                square = i[:, None] * CHUNK + i[None, :]
                t = tl.load(t_ptr + at * (CHUNK * CHUNK) + square)
                ot_at = ot_ptr + slot * ot_slot + head * (CHUNK * CHUNK)
                tl.store(ot_at + square, t, mask=new[:, None])
                u = tl.load(u_ptr + at * (CHUNK * V) + e[None, :] * CHUNK + i[:, None])
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

    places   [chunks, 4] sequence, row of the operands behind row 0, low and high of each chunk;
             more chunks than there can be: those behind the last one have sequence -1 and share
             out rows of the operands that belong to no sequence
    base     [R + 1] first chunk of each sequence
    starts, context, slots as the package's query_start_loc, context_lens, slots

    `places` and `base` are filled by the first pass.
    """

    places: torch.Tensor
    base: torch.Tensor
    starts: torch.Tensor
    context: torch.Tensor
    slots: torch.Tensor


def steps(starts: torch.Tensor, context: torch.Tensor, slots: torch.Tensor, tokens: int) -> Steps:
    """Tables of a step of `tokens` rows."""
    starts, context, slots = (x.to(torch.int32) for x in (starts, context, slots))
    # A sequence has at most two chunks that are not whole, rows behind the last one one.
    places = starts.new_empty((tokens // CHUNK + 2 * len(slots) + 1, 4))
    return Steps(places, torch.empty_like(starts), starts, context, slots)


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


@dataclasses.dataclass(frozen=True)
class Work:
    """What the passes of one call hand on, by chunk."""

    rows: torch.Tensor  # [chunks, HV, 4, CHUNK] fp32: gamma, exp2(gamma), exp2(last - gamma), beta
    t: torch.Tensor  # [chunks, HV, CHUNK, CHUNK] narrow
    u: torch.Tensor  # [chunks, HV, V, CHUNK] narrow; of no chunk for cpr
    entry: torch.Tensor  # [chunks, HV, V, K] narrow (chunk_row) or fp32 (cpr)


def boundaries(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: Sequence[torch.Tensor],
    at: Steps,
    raw: bool,
) -> tuple[Work, torch.Tensor]:
    """The passes that both schedules share; boundary states in `state` move on.

    `state` is the boundary tensor alone (no chunk is open at the start, none is kept), or all that
    `state_spec` lists. Also returns fp32 rows [R, HV, BLOCK, CHUNK] of blocks that stay open.
    """
    tokens, key_heads, key_size = k.shape
    heads = v.shape[1]
    chunks, sequences = len(at.places), len(at.slots)
    is_open = len(state) > 1
    rows = g.new_empty((chunks, heads, 4, CHUNK))
    t = k.new_empty((chunks, heads, CHUNK, CHUNK))
    x = g.new_empty((sequences if is_open else 0, heads, BLOCK, CHUNK))
    near = g.new_empty((chunks, heads, CHUNK, BLOCK))
    far = torch.empty_like(near)
    _, old_g, old_beta, old_k, _, old_x, old_t = named(state, raw)[1]
    shape = {"HK": key_heads, "HV": heads, "K": key_size, "CHUNK": CHUNK, "OPEN": is_open}
    tile = tiles.BEGIN
    inverse._begin[(chunks, triton.cdiv(heads, tile.heads))](
        g, beta, rows, at.places, at.base, at.starts, at.context, at.slots,
        *strided([old_g, old_beta]), sequences, tokens,
        HV=heads, HEADS=tile.heads, CHUNK=CHUNK, TABLE=tiles.TABLE, OPEN=is_open, RAW=raw,
        num_warps=tile.warps, **CHAINED, **gpu.POLICY,
    )  # fmt: skip
    inverse._lower[(chunks, key_heads)](
        k, rows, t, near, at.places, at.slots, *strided([old_k]),
        **shape, BLOCK=BLOCK, num_warps=tiles.LOWER.warps, **CHAINED, **gpu.POLICY,
    )  # fmt: skip
    inverse._solve[(chunks, heads)](
        t, near, far, x, at.places, at.slots, *strided([old_x, old_t]),
        HV=heads, CHUNK=CHUNK, BLOCK=BLOCK, OPEN=is_open and not raw,
        num_warps=tiles.SOLVE.warps, **CHAINED, **gpu.POLICY,
    )  # fmt: skip
    u, entry = chain(k, v, rows, t, state, (at.base, at.starts, at.context, at.slots), raw)
    return Work(rows, t, u, entry), x


def chain(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    t: torch.Tensor,
    state: Sequence[torch.Tensor],
    tables: tuple[torch.Tensor, ...],
    raw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """u and entry of `Work`, chunk after chunk; boundary states in `state` move on.

    tables   base, starts, context, slots of `Steps`, of sequences or of whole chunks cut from them
    """
    key_heads, key_size = k.shape[1:]
    heads, size = v.shape[1:]
    chunks, sequences = len(t), len(tables[3])
    u = k.new_empty((0 if raw else chunks, heads, size, CHUNK))
    entry = (rows if raw else k).new_empty((chunks, heads, size, key_size))
    is_open = len(state) > 1
    planes, (running, _, _, old_k, old_rows, _, _) = named(state, raw)
    operands = (k, v, rows, t, entry if raw else u, entry)
    columns = tiles.ODD.fitted(size)

    def odd(last: bool) -> None:
        scan._odd[(size // columns, heads, sequences)](
            *operands, *tables, *strided([*planes, old_k, old_rows, running]),
            HK=key_heads, HV=heads, K=key_size, V=size, CHUNK=CHUNK, COLUMNS=columns,
            LAST=last, OPEN=is_open, RAW=raw, SPLIT=split(planes),
            num_warps=tiles.ODD.warps, **CHAINED, **gpu.POLICY,
        )  # fmt: skip

    if is_open:
        odd(last=False)
    scan.whole(*operands, planes, tables, raw)
    odd(last=True)
    return u, entry


Planes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def named(state: Sequence[torch.Tensor], raw: bool) -> tuple[Planes, tuple[torch.Tensor, ...]]:
    """Planes of the boundary, and running, g or gamma, beta, k, v or r, x, t of a state; the
    boundary tensor stands in for what a schedule does not have."""
    h = state[0]
    whole = (h, h, h)
    if len(state) == 1:
        return whole, (h,) * 7
    if raw:
        _, running, g, beta, k, v = state
        return whole, (running, g, beta, k, v, h, h)
    _, rest, ties, x, gamma, k, r, _, t = state
    return (h, rest, ties), (h, gamma, h, k, r, x, t)


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
    o = torch.empty_like(v, dtype=v.dtype if raw else torch.float32)
    work, x = boundaries(k, v, g, beta, state, at, raw)
    running, old_g, old_beta, old_k, old_rows, old_x, old_t = named(state, raw)[1]
    shape = {"HK": key_heads, "HV": heads, "K": key_size, "V": size, "CHUNK": CHUNK}
    shape |= {"OPEN": len(state) > 1}
    chunks, tables = len(at.places), (at.places, at.slots)
    if raw:
        tile = tiles.RECUR
        columns = tile.fitted(size)
        _recur[(size // columns, chunks, heads)](
            q, k, v, g, beta, work.entry, o, scale, *tables, *strided([running]),
            **shape, NEAR=NEAR, COLUMNS=columns, num_warps=tile.warps, **CHAINED, **gpu.POLICY,
        )  # fmt: skip
    elif gluon_scan.serves(k, size, raw):
        gluon_rows.rows(
            q.flatten(1), k.flatten(1), work.u.flatten(0, 2), work.entry.flatten(0, 2),
            (work.rows, o, scale, *tables, *strided([old_k])), shape, chunks, tiles.ROWS,
        )  # fmt: skip
    else:
        tile = tiles.ROWS
        columns = tile.fitted(size)
        _rows[(size // columns, heads, chunks)](
            q, k, work.rows, work.u, work.entry, o, scale, *tables, *strided([old_k]),
            **shape, COLUMNS=columns, num_warps=tile.warps, **CHAINED, **gpu.POLICY,
        )  # fmt: skip
    if len(state) > 1:
        old_u = state[0] if raw else state[7]
        _save[(len(at.slots), heads)](
            k, v, g, beta, work.rows, work.t, x, work.u, at.places, at.base, at.slots,
            *strided([old_k, old_g, old_beta, old_rows, old_x, old_t, old_u]),
            **{name: shape[name] for name in ("HK", "HV", "K", "V", "CHUNK")},
            BLOCK=BLOCK, RAW=raw, num_warps=4, **CHAINED, **gpu.POLICY,
        )  # fmt: skip
    return o, work
