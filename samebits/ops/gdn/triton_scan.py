"""The serial pass over the chunks of a sequence on Hopper: boundary states, R, u.

Everything is transposed: a row of a product is a column of V. So each of a chunk's three products
takes its left operand from the registers that hold the result of the one before, and a step waits
for no exchange between threads. Sums run in the same order.

    odd     a chunk that a step finds open, and the one that it leaves open
    whole   the chunks between them: in Gluon where it serves (`gluon_chain.py`), else `_whole`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from samebits.ops import gpu
from samebits.ops.gdn import gluon_chain, gluon_scan
from samebits.ops.gdn import tiles_sm90 as tiles
from samebits.ops.gdn.triton_parts import (
    CHAINED,
    follow,
    load_keys,
    load_state,
    narrowed,
    split,
    store_state,
    strided,
)


@triton.jit
def turned_residuals(snapshot, k, vt, reach, beta):
    """R^T [columns, CHUNK] narrow, from the snapshot's transpose."""
    seen = reach[None, :] * tl.dot(snapshot, tl.trans(k))
    return narrowed(beta[None, :] * (vt.to(tl.float32) - seen), k.dtype)


@triton.jit
def turned_close(k, u, rest, fade, h):
    """Transpose [columns, K] of the fp32 state at the chunk's end, from that of u and of the
    state at its start."""
    weighted = narrowed(u.to(tl.float32) * rest[None, :], k.dtype)
    return tl.dot(weighted, k, h * fade)


@triton.jit
def span(sequence, base_ptr, starts_ptr, context_ptr, CHUNK: tl.constexpr):
    """First chunk, count of chunks, first token, its end, tokens before, and how many chunks from
    the one that holds the first token on end inside of the sequence's tokens."""
    base = tl.load(base_ptr + sequence)
    chunks = tl.load(base_ptr + sequence + 1) - base
    start = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + sequence + 1)
    context = tl.load(context_ptr + sequence)
    return base, chunks, start, end, context, (end - start + context % CHUNK) // CHUNK


@triton.jit
def _whole(
    k_desc, v_desc, rows_desc, t_desc, u_desc, entry_desc, rows_ptr,
    base_ptr, starts_ptr, context_ptr, slots_ptr,
    h_ptr, h_slot, rest_ptr, rest_slot, ties_ptr, ties_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, RAW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Boundary states over the whole chunks of one sequence and value head, for some columns.

    For what Gluon does not serve: cpr (RAW), head sizes of 32, and the interpreter.

    Stores for every chunk what its rows start from [V, K]: the snapshot of the boundary state or,
    RAW, the fp32 state, and u [V, CHUNK] unless RAW.
    """
    follow()
    left = tl.program_id(0) * COLUMNS
    columns = left + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    base, chunks, start, _, context, until = span(
        sequence, base_ptr, starts_ptr, context_ptr, CHUNK
    )
    if chunks > 0:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        key_head = head // (HV // HK)
        d = tl.arange(0, K)
        h = load_state(
            h_ptr, h_slot, rest_ptr, rest_slot, ties_ptr, ties_slot, slot, head,
            d, columns, context // CHUNK + (context % CHUNK > 0) > 0, K, V, COLUMNS, SPLIT,
        )  # fmt: skip
        h = tl.trans(h)
        origin = start - context % CHUNK
        for n in tl.range((context % CHUNK > 0).to(tl.int32), until, num_stages=STAGES):
            at = (base + n) * HV + head
            token = origin + n * CHUNK
            # Loads without a use between them arrive at one barrier.
            k = k_desc.load([token, key_head * K])
            t = t_desc.load([at * CHUNK, 0])
            v = v_desc.load([token, head * V + left])
            reach = rows_desc.load([at, CHUNK])
            rest = rows_desc.load([at, 2 * CHUNK])
            beta = rows_desc.load([at, 3 * CHUNK])
            reach, rest, beta = reach.reshape(CHUNK), rest.reshape(CHUNK), beta.reshape(CHUNK)
            fade = tl.load(rows_ptr + at.to(tl.int64) * (4 * CHUNK) + 2 * CHUNK - 1)
            snapshot = narrowed(h, k.dtype)
            entry_desc.store([at * V + left, 0], h if RAW else snapshot)
            r = turned_residuals(snapshot, k, tl.trans(v), reach, beta)
            u = narrowed(tl.dot(r, tl.trans(t)), k.dtype)
            if not RAW:
                u_desc.store([at * V + left, 0], u)
            h = turned_close(k, u, rest, fade, h)
        store_state(
            tl.trans(h), h_ptr, h_slot, rest_ptr, rest_slot, ties_ptr, ties_slot, slot, head,
            d, columns, True, K, V, COLUMNS, SPLIT,
        )  # fmt: skip


@triton.jit
def _odd(
    k_ptr, v_ptr, rows_ptr, t_ptr, u_ptr, entry_ptr,
    base_ptr, starts_ptr, context_ptr, slots_ptr,
    h_ptr, h_slot, rest_ptr, rest_slot, ties_ptr, ties_slot,
    ok_ptr, ok_slot, or_ptr, or_slot, os_ptr, os_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, LAST: tl.constexpr, OPEN: tl.constexpr, RAW: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """`_whole` for the one chunk that begins before the step (OPEN) or, LAST, for one that begins
    in the step and stays open.

    RAW and with older rows, what rows start from is the running state; else R of older rows is
    read, and that of rows that stay open is kept.
    """
    follow()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    base, chunks, start, end, context, until = span(
        sequence, base_ptr, starts_ptr, context_ptr, CHUNK
    )
    if LAST:
        c = tl.maximum(until, (context % CHUNK > 0).to(tl.int32))
    else:
        c = tl.where(context % CHUNK > 0, 0, chunks)
    if c < chunks:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        key_head = head // (HV // HK)
        i = tl.arange(0, CHUNK)
        d = tl.arange(0, K)
        first = start - context % CHUNK + c * CHUNK
        low = tl.maximum(start - first, 0)
        high = tl.minimum(end - first, CHUNK)
        inside = (i >= low) & (i < high)
        token = (first + i).to(tl.int64)
        at = (base + c).to(tl.int64) * HV + head
        turned = d[None, :] * V + columns[:, None]
        every = (columns >= 0)[:, None]
        older = (i < low)[None, :] & every
        ok_at = ok_ptr + slot * ok_slot + key_head * (K * CHUNK)
        or_at = or_ptr + slot * or_slot + head * (CHUNK * V) + i[None, :] * V + columns[:, None]
        h = load_state(
            h_ptr, h_slot, rest_ptr, rest_slot, ties_ptr, ties_slot, slot, head,
            d, columns, context // CHUNK + c > 0, K, V, COLUMNS, SPLIT,
        )  # fmt: skip
        h = tl.trans(h)
        kt = load_keys(k_ptr, ok_at, first, low, high, key_head, HK, K, CHUNK, OPEN)
        vt = tl.load(
            v_ptr + (token * HV + head)[None, :] * V + columns[:, None],
            mask=inside[None, :], other=0.0,
        )  # fmt: skip
        if OPEN and RAW:
            vt = tl.where(older, tl.load(or_at, mask=older, other=0.0), vt)
        k = tl.trans(kt)
        t = tl.load(t_ptr + at * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :])
        rows_at = rows_ptr + at * (4 * CHUNK)
        reach = tl.load(rows_at + CHUNK + i)
        rest = tl.load(rows_at + 2 * CHUNK + i)
        beta = tl.load(rows_at + 3 * CHUNK + i)
        fade = tl.load(rows_at + 2 * CHUNK - 1)
        snapshot = narrowed(h, k.dtype)
        entry_at = entry_ptr + at * (K * V) + columns[:, None] * K + d[None, :]
        if RAW:
            entry = h
            if OPEN and not LAST:
                entry = tl.load(os_ptr + slot * os_slot + head * (K * V) + turned)
            tl.store(entry_at, entry)
        else:
            tl.store(entry_at, snapshot)
        r = turned_residuals(snapshot, k, vt, reach, beta)
        if OPEN and not RAW:
            r = tl.where(older, tl.load(or_at, mask=older, other=0.0), r)
            tl.store(or_at, r, mask=(inside & (high < CHUNK))[None, :] & every)
        u = narrowed(tl.dot(r, tl.trans(t)), k.dtype)
        if not RAW:
            tl.store(u_ptr + at * (CHUNK * V) + columns[:, None] * CHUNK + i[None, :], u)
        if not LAST:
            store_state(
                tl.trans(turned_close(k, u, rest, fade, h)),
                h_ptr, h_slot, rest_ptr, rest_slot, ties_ptr, ties_slot, slot, head,
                d, columns, high == CHUNK, K, V, COLUMNS, SPLIT,
            )  # fmt: skip


def blocks(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A contiguous matrix to be read or written by blocks of rows x columns."""
    return TensorDescriptor.from_tensor(x, [rows, columns])


def whole(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    t: torch.Tensor,
    u: torch.Tensor,
    entry: torch.Tensor,
    planes: Sequence[torch.Tensor],
    tables: tuple[torch.Tensor, ...],
    raw: bool,
) -> None:
    """Launch the pass over whole chunks; shapes as `triton_chunk.Work` has them; planes are one
    tensor h [slots, HV, K, V] fp32 three times, or its three planes; tables are base, starts,
    context, slots."""
    key_heads, key_size = k.shape[1:]
    heads, size = v.shape[1:]
    chunk, sequences = t.shape[-1], len(tables[0]) - 1
    shape = {"HK": key_heads, "HV": heads, "K": key_size, "V": size, "CHUNK": chunk}
    matrices = (k.flatten(1), v.flatten(1), t.flatten(0, 2), u.flatten(0, 2), entry.flatten(0, 2))
    if gluon_scan.serves(k, size, raw):
        tile = tiles.chain(heads * sequences, size)
        gluon_chain.whole(*matrices, rows, planes, tables, shape, tile)
        return
    k, v, t, u, entry = matrices
    tile = tiles.WHOLE
    columns = tile.fitted(size)
    _whole[(size // columns, heads, sequences)](
        blocks(k, chunk, key_size), blocks(v, chunk, columns),
        blocks(rows.flatten(2).flatten(0, 1), 1, chunk), blocks(t, chunk, chunk),
        blocks(u, columns, chunk), blocks(entry, columns, key_size),
        rows, *tables, *strided(planes),
        **shape, COLUMNS=columns, STAGES=tile.stages, RAW=raw, SPLIT=split(planes),
        num_warps=tile.warps, **CHAINED, **gpu.POLICY,
    )  # fmt: skip
