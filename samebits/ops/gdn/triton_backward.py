"""Gradients of `gdn` on Hopper: the chunk form without inner roundings, in fp32 sums of narrow
products. No atomics and no split sums, so equal inputs give equal bits; no bit promise beyond.

    again       boundary states and u of the forward, segments side by side (`triton_segments.py`)
    inner       the gradient of u from outputs of its own chunk, every chunk by itself
    reverse     chunks from the last to the first, by columns of V: the gradient of the state at
                each chunk's end and of R; a chunk that is not whole by a launch of its own
    gradients   of all operands, every chunk by itself, the value heads of a key head one by one
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.gdn import gluon_gradients, gluon_reverse, gluon_scan, triton_segments
from samebits.ops.gdn import tiles_sm90 as tiles
from samebits.ops.gdn.cpu import CHUNK
from samebits.ops.gdn.triton_parts import (
    CHAINED,
    decays,
    follow,
    load_keys,
    load_rows,
    place,
)


@triton.jit
def _inner(
    q_ptr, k_ptr, do_ptr, rows_ptr, inner_ptr, scale, places_ptr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """What the outputs of one chunk and value head give to the gradient of u [V, CHUNK]."""
    follow()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    sequence, first, low, high = place(chunk, places_ptr)
    if sequence >= 0:
        key_head = head // (HV // HK)
        i = tl.arange(0, CHUNK)
        d = tl.arange(0, K)
        at = chunk.to(tl.int64) * HV + head
        kt = load_keys(k_ptr, k_ptr, first, low, high, key_head, HK, K, CHUNK, False)
        q = load_rows(q_ptr, q_ptr, first, low, high, key_head, d, HK, K, CHUNK, False)
        do = load_rows(do_ptr, do_ptr, first, low, high, head, columns, HV, V, CHUNK, False)
        gamma = tl.load(rows_ptr + at * (4 * CHUNK) + i)
        scores = (scale * (tl.dot(q, kt) * decays(gamma, CHUNK))).to(kt.dtype)
        inner = tl.dot(tl.trans(do), scores).to(kt.dtype)
        tl.store(inner_ptr + at * (CHUNK * V) + columns[:, None] * CHUNK + i[None, :], inner)


@triton.jit
def _reverse(
    q_ptr, k_ptr, do_ptr, inner_ptr, rows_ptr, t_ptr, dr_ptr, dexit_ptr, dh_ptr, scale,
    base_ptr, starts_ptr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Gradients of R [CHUNK, V] and of the states at the chunks' ends [V, K]; at dh_ptr, of the
    state in front of them.

    LAST: of the chunk at a sequence's end that is not whole, behind which there is nothing, alone.
    Else of the whole ones, for what Gluon does not serve (`gluon_scan.serves`).
    """
    follow()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    base = tl.load(base_ptr + sequence)
    chunks = tl.load(base_ptr + sequence + 1) - base
    start = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + sequence + 1)
    whole = (end - start) // CHUNK
    key_head = head // (HV // HK)
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, K)
    dh_at = dh_ptr + (sequence.to(tl.int64) * HV + head) * (K * V)
    dh_at = dh_at + d[:, None] * V + columns[None, :]
    if LAST:
        lowest = whole
        highest = chunks
        dh = tl.zeros((K, COLUMNS), tl.float32)
    else:
        lowest = 0
        highest = whole
        dh = tl.load(dh_at)
    for back in tl.range(lowest, highest):
        c = highest - 1 - (back - lowest)
        first = start + c * CHUNK
        high = tl.minimum(end - first, CHUNK)
        at = (base + c).to(tl.int64) * HV + head
        kt = load_keys(k_ptr, k_ptr, first, 0, high, key_head, HK, K, CHUNK, False)
        q = load_rows(q_ptr, q_ptr, first, 0, high, key_head, d, HK, K, CHUNK, False)
        do = load_rows(do_ptr, do_ptr, first, 0, high, head, columns, HV, V, CHUNK, False)
        inner = tl.load(inner_ptr + at * (CHUNK * V) + columns[None, :] * CHUNK + i[:, None])
        rows_at = rows_ptr + at * (4 * CHUNK)
        reach = tl.load(rows_at + CHUNK + i)[:, None]
        rest = tl.load(rows_at + 2 * CHUNK + i)[:, None]
        beta = tl.load(rows_at + 3 * CHUNK + i)[:, None]
        fade = tl.load(rows_at + 2 * CHUNK - 1)
        t = tl.load(t_ptr + at * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :])
        dexit = dh.to(kt.dtype)
        tl.store(dexit_ptr + at * (K * V) + columns[None, :] * K + d[:, None], dexit)
        du = rest * tl.dot(tl.trans(kt), dexit) + inner.to(tl.float32)
        dr = tl.dot(tl.trans(t), du.to(kt.dtype)).to(kt.dtype)
        tl.store(dr_ptr + at * (CHUNK * V) + i[:, None] * V + columns[None, :], dr)
        from_o = (do.to(tl.float32) * (scale * reach)).to(kt.dtype)
        from_r = (dr.to(tl.float32) * (beta * reach)).to(kt.dtype)
        dh = tl.dot(tl.trans(q), from_o, dh * fade) - tl.dot(kt, from_r)
    tl.store(dh_at, dh)


@triton.jit
def _gradients(
    q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, u_ptr, entry_ptr, dr_ptr, dexit_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, scale, places_ptr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Gradients of the operands at the rows of one chunk and key head; zeros where the rows are
    those of no sequence. REST: whole chunks are left to `gluon_gradients.py`.

    Outputs are linear in exp2(gamma_i) wherever they are in q_i, what row i takes from others is in
    exp2(gamma_i) wherever it is in k_i, and what others take from it in exp2(-gamma_i): so the
    gradient of gamma is q dq + k dk of the one kind - k dk of the other.
    """
    follow()
    chunk = tl.program_id(0)
    key_head = tl.program_id(1)
    sequence, first, low, high = place(chunk, places_ptr)
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, K)
    left = REST & (sequence >= 0) & (high - low == CHUNK)
    inside = (i >= low) & (i < high) & (not left)
    dq = tl.zeros((CHUNK, K), tl.float32)
    dk = tl.zeros((CHUNK, K), tl.float32)
    by_query = tl.zeros((CHUNK,), tl.float32)  # q dq and k dk of the heads before
    by_key = tl.zeros((CHUNK,), tl.float32)
    for member in tl.range(0, tl.where(left, 0, HV // HK)):
        head = key_head * (HV // HK) + member
        row = (first + i).to(tl.int64) * HV + head
        dg = tl.zeros((CHUNK,), tl.float32)
        dbeta = tl.zeros((CHUNK,), tl.float32)
        if sequence >= 0:
            at = chunk.to(tl.int64) * HV + head
            rows_at = rows_ptr + at * (4 * CHUNK) + i
            gamma = tl.load(rows_at)
            reach = tl.load(rows_at + CHUNK)[:, None]
            rest = tl.load(rows_at + 2 * CHUNK)
            beta = tl.load(rows_at + 3 * CHUNK)
            fade = tl.load(rows_ptr + at * (4 * CHUNK) + 2 * CHUNK - 1)
            takes = tl.zeros((CHUNK, K), tl.float32)  # of dk / beta: by row i from others
            dscores = tl.zeros((CHUNK, CHUNK), tl.float32)
            dlower = tl.zeros((CHUNK, CHUNK), tl.float32)
            for part in tl.static_range(V // COLUMNS):
                columns = part * COLUMNS + tl.arange(0, COLUMNS)
                entry = tl.load(entry_ptr + at * (K * V) + columns[:, None] * K + d[None, :])
                ut = tl.load(u_ptr + at * (CHUNK * V) + columns[:, None] * CHUNK + i[None, :])
                do = load_rows(do_ptr, do_ptr, first, low, high, head, columns, HV, V, CHUNK, False)
                dscores = tl.dot(do, ut, dscores)
                dq = tl.dot((do.to(tl.float32) * (scale * reach)).to(do.dtype), entry, dq)
                dr = tl.load(dr_ptr + at * (CHUNK * V) + i[:, None] * V + columns[None, :])
                dlower = tl.dot(dr, ut, dlower)
                wide = dr.to(tl.float32)
                takes = tl.dot((wide * -reach).to(dr.dtype), entry, takes)
                v = load_rows(v_ptr, v_ptr, first, low, high, head, columns, HV, V, CHUNK, False)
                dbeta += tl.sum(wide * v.to(tl.float32), 1)
                dv = (beta[:, None] * wide).to(dv_ptr.dtype.element_ty)
                tl.store(dv_ptr + row[:, None] * V + columns[None, :], dv, mask=inside[:, None])

            kt = load_keys(k_ptr, k_ptr, first, low, high, key_head, HK, K, CHUNK, False)
            k = tl.trans(kt)
            q = load_rows(q_ptr, q_ptr, first, low, high, key_head, d, HK, K, CHUNK, False)
            decay = decays(gamma, CHUNK)
            dlower = tl.where(i[:, None] > i[None, :], -dlower * decay, 0.0)
            takes = tl.dot(dlower.to(k.dtype), k, takes)
            dk = tl.dot(tl.trans((beta[:, None] * dlower).to(k.dtype)), k, dk)
            dscores = (scale * dscores * decay).to(k.dtype)
            dq = tl.dot(dscores, k, dq)
            dk = tl.dot(tl.trans(dscores), q, dk)
            among = tl.sum(k.to(tl.float32) * dk, 1)

            faded = tl.zeros((K,), tl.float32)
            for part in tl.static_range(V // COLUMNS):
                columns = part * COLUMNS + tl.arange(0, COLUMNS)
                turned = at * (K * V) + columns[:, None] * K + d[None, :]
                ut = tl.load(u_ptr + at * (CHUNK * V) + columns[:, None] * CHUNK + i[None, :])
                dexit = tl.load(dexit_ptr + turned)
                entry = tl.load(entry_ptr + turned)
                faded += tl.sum(entry.to(tl.float32) * dexit.to(tl.float32), 0)
                weighted = (ut.to(tl.float32) * rest[None, :]).to(dexit.dtype)
                dk = tl.dot(tl.trans(weighted), dexit, dk)

            taken = tl.sum(k.to(tl.float32) * takes, 1)
            given = tl.sum(k.to(tl.float32) * dk, 1)
            asked = tl.sum(q.to(tl.float32) * dq, 1)
            dgamma = asked - by_query + beta * taken - (given - by_key)
            end = tl.sum(given - among, 0) + fade * tl.sum(faded, 0)
            dgamma += tl.where(i == CHUNK - 1, end, 0.0)
            # gamma_i holds g of all rows up to i.
            dg = tl.sum(tl.where(i[:, None] >= i[None, :], dgamma[:, None], 0.0), 0)
            dbeta += taken
            dk += beta[:, None] * takes
            by_query = asked
            by_key = given + beta * taken
        else:
            for part in tl.static_range(V // COLUMNS):
                columns = part * COLUMNS + tl.arange(0, COLUMNS)
                none = tl.zeros((CHUNK, COLUMNS), dv_ptr.dtype.element_ty)
                tl.store(dv_ptr + row[:, None] * V + columns[None, :], none, mask=inside[:, None])
        tl.store(dg_ptr + row, dg, mask=inside)
        tl.store(dbeta_ptr + row, dbeta, mask=inside)
    key_at = ((first + i).to(tl.int64) * HK + key_head)[:, None] * K + d[None, :]
    tl.store(dq_ptr + key_at, dq.to(dq_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(dk_ptr + key_at, dk.to(dk_ptr.dtype.element_ty), mask=inside[:, None])


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: triton_segments.Kept,
    initial_state: torch.Tensor | None,
    starts: torch.Tensor,
    scale: float,
    grad: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients into q, k, v, g, beta (and initial_state, else None) of `varlen`, unchecked.

    Rounded once to each operand's dtype; `grad` [T, HV, V] in the dtype of v.
    """
    tokens, key_heads, key_size = k.shape
    heads, size = v.shape[1:]
    chunks, sequences = len(kept.places), len(starts) - 1
    u, entry = triton_segments.again(k, v, kept)
    inner, dexit = torch.empty_like(u), torch.empty_like(entry)
    dr = u.new_empty((chunks, heads, CHUNK, size))
    dh = kept.rows.new_empty((sequences, heads, key_size, size))
    shape = {"HK": key_heads, "HV": heads, "K": key_size, "V": size, "CHUNK": CHUNK}
    columns = tiles.INNER.fitted(size)
    _inner[(size // columns, heads, chunks)](
        q, k, grad, kept.rows, inner, scale, kept.places,
        **shape, COLUMNS=columns, num_warps=tiles.INNER.warps, **CHAINED, **gpu.POLICY,
    )  # fmt: skip
    columns = tiles.REVERSE.fitted(size)

    def reverse(last: bool) -> None:
        _reverse[(size // columns, heads, sequences)](
            q, k, grad, inner, kept.rows, kept.t, dr, dexit, dh, scale, kept.base, starts,
            **shape, COLUMNS=columns, LAST=last, num_warps=tiles.REVERSE.warps,
            **CHAINED, **gpu.POLICY,
        )  # fmt: skip

    reverse(last=True)
    fast = gluon_scan.serves(k, size, raw=False)
    if fast:
        gluon_reverse.reverse(
            q.flatten(1), k.flatten(1), grad.flatten(1), inner.flatten(0, 2),
            kept.t.flatten(0, 2), dr.flatten(0, 2), dexit.flatten(0, 2),
            (kept.rows, dh, scale, kept.base, starts), shape, sequences,
        )  # fmt: skip
    else:
        reverse(last=False)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dg = kept.rows.new_empty((tokens, heads))
    dbeta = torch.empty_like(dg)
    if fast:
        gluon_gradients.gradients(
            q, k, v, grad, u, entry, dr, dexit, dq, dk,
            (kept.rows, dv, dg, dbeta, scale, kept.places), shape, chunks,
        )  # fmt: skip
    tile = tiles.GRADIENTS
    _gradients[(chunks, key_heads)](
        q, k, v, grad, kept.rows, u, entry, dr, dexit,
        dq, dk, dv, dg, dbeta, scale, kept.places,
        **shape, COLUMNS=tile.fitted(size), REST=fast, num_warps=tile.warps,
        **CHAINED, **gpu.POLICY,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta, dh if initial_state is not None else None
