"""The serial pass over the chunks of a sequence on Hopper: boundary states, R, u.

Everything is transposed: a row of a product is a column of V. So each of a chunk's three products
takes its left operand from the registers that hold the result of the one before, and a step waits
for no exchange between threads. Sums run in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samebits.ops.gdn.triton_parts import load_keys


@triton.jit
def turned_residuals(snapshot, k, vt, reach, beta):
    """R^T [columns, CHUNK] narrow, from the snapshot's transpose."""
    seen = reach[None, :] * tl.dot(snapshot, tl.trans(k))
    return (beta[None, :] * (vt.to(tl.float32) - seen)).to(k.dtype)


@triton.jit
def turned_close(k, u, rest, fade, h):
    """Transpose [columns, K] of the fp32 state at the chunk's end, from that of u and of the
    state at its start."""
    weighted = (u.to(tl.float32) * rest[None, :]).to(k.dtype)
    return tl.dot(weighted, k, h * fade)


@triton.jit
def _scan(
    k_desc, v_desc, rows_desc, t_desc, u_desc, entry_desc, k_ptr, v_ptr, rows_ptr,
    base_ptr, starts_ptr, context_ptr, slots_ptr,
    oh_ptr, oh_slot, ok_ptr, ok_slot, or_ptr, or_slot, os_ptr, os_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, OPEN: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Boundary states of one sequence and value head, chunk after chunk, for some columns.

    Stores for every chunk what its rows start from [V, K]: the snapshot of the boundary state or,
    RAW, the fp32 state (in a chunk with older rows: the running one), and u [V, CHUNK] unless RAW.
    """
    left = tl.program_id(0) * COLUMNS
    columns = left + tl.arange(0, COLUMNS)
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
        d = tl.arange(0, K)
        oh_at = oh_ptr + slot * oh_slot + head * (K * V) + d[None, :] * V + columns[:, None]
        ok_at = ok_ptr + slot * ok_slot + key_head * (K * CHUNK)
        or_at = or_ptr + slot * or_slot + head * (CHUNK * V) + i[None, :] * V + columns[:, None]
        os_at = os_ptr + slot * os_slot + head * (K * V) + d[None, :] * V + columns[:, None]
        every = (columns >= 0)[:, None]
        h = tl.load(oh_at, mask=(context > 0) & every & (d >= 0)[None, :], other=0.0)

        # A step may begin inside a chunk and end inside one: those two are odd, the rest is whole.
        origin = start - context % CHUNK
        whole = (end - origin) // CHUNK
        c = 0
        for piece in tl.range(0, 2 if OPEN else 1):
            until = tl.where(piece == 0, 0, whole) if OPEN else whole
            for n in tl.range(c, until, num_stages=STAGES):
                at = (base + n) * HV + head
                token = origin + n * CHUNK
                k = k_desc.load([token, key_head * K])
                v = v_desc.load([token, head * V + left])
                t = t_desc.load([at * CHUNK, 0])
                reach = rows_desc.load([at, CHUNK]).reshape(CHUNK)
                rest = rows_desc.load([at, 2 * CHUNK]).reshape(CHUNK)
                beta = rows_desc.load([at, 3 * CHUNK]).reshape(CHUNK)
                fade = tl.load(rows_ptr + at.to(tl.int64) * (4 * CHUNK) + 2 * CHUNK - 1)
                snapshot = h.to(k.dtype)
                entry_desc.store([at * V + left, 0], h if RAW else snapshot)
                r = turned_residuals(snapshot, k, tl.trans(v), reach, beta)
                u = tl.dot(r, tl.trans(t)).to(k.dtype)
                if not RAW:
                    u_desc.store([at * V + left, 0], u)
                h = turned_close(k, u, rest, fade, h)
            c = tl.maximum(c, until)
            odd = c < chunks
            if OPEN:
                odd = tl.where(piece == 0, context % CHUNK > 0, odd)
            if odd:
                at = (base + c) * HV + head
                first = origin + c * CHUNK
                low = tl.maximum(start - first, 0)
                high = tl.minimum(end - first, CHUNK)
                inside = (i >= low) & (i < high)
                token = (first + i).to(tl.int64)
                kt = load_keys(k_ptr, ok_at, first, low, high, key_head, HK, K, CHUNK, OPEN)
                vt = tl.load(
                    v_ptr + (token * HV + head)[None, :] * V + columns[:, None],
                    mask=inside[None, :], other=0.0,
                )  # fmt: skip
                older = (i < low)[None, :] & every
                if OPEN and RAW:
                    vt = tl.where(older, tl.load(or_at, mask=older, other=0.0), vt)
                k = tl.trans(kt)
                t = t_desc.load([at * CHUNK, 0])
                rows_at = rows_ptr + at.to(tl.int64) * (4 * CHUNK)
                reach = tl.load(rows_at + CHUNK + i)
                rest = tl.load(rows_at + 2 * CHUNK + i)
                beta = tl.load(rows_at + 3 * CHUNK + i)
                fade = tl.load(rows_at + 2 * CHUNK - 1)
                snapshot = h.to(k.dtype)
                if RAW:
                    entry = h
                    if OPEN:
                        running = (low > 0) & every & (d >= 0)[None, :]
                        entry = tl.where(running, tl.load(os_at, mask=running, other=0.0), h)
                    entry_desc.store([at * V + left, 0], entry)
                else:
                    entry_desc.store([at * V + left, 0], snapshot)
                r = turned_residuals(snapshot, k, vt, reach, beta)
                if OPEN and not RAW:
                    r = tl.where(older, tl.load(or_at, mask=older, other=0.0), r)
                    new = (inside & (high < CHUNK))[None, :] & every
                    tl.store(or_at, r, mask=new)
                u = tl.dot(r, tl.trans(t)).to(k.dtype)
                if not RAW:
                    u_desc.store([at * V + left, 0], u)
                h = tl.where(high == CHUNK, turned_close(k, u, rest, fade, h), h)
                c += 1
        tl.store(oh_at, h)
