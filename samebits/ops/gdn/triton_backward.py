"""Gradients of `gdn` on Hopper: the chunk form without inner roundings, in fp32 sums of narrow
products. No atomics and no split sums, so equal inputs give equal bits; no bit promise beyond.

Two passes over recomputed boundary states (u and T of the forward, by chunk):

    reverse    chunks from the last to the first, by columns of V: the gradient of the state at each
               chunk's end and of R
    gradients  every chunk by itself: all operands

Queries and keys get one gradient for each value head, added over the heads that share them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.device import exp2_32
from samebits.ops.gdn import tiles_sm90 as tiles
from samebits.ops.gdn.cpu import CHUNK
from samebits.ops.gdn.triton_chunk import boundaries, whole_sequences
from samebits.ops.gdn.triton_parts import (
    decays,
    last_of,
    load_keys,
    load_rows,
    load_scalars,
    place,
)


@triton.jit
def _reverse(
    q_ptr, k_ptr, beta_ptr, do_ptr, rows_ptr, t_ptr, dr_ptr, dexit_ptr, dh_ptr, scale,
    base_ptr, starts_ptr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of R and of the states at the chunks' ends; at last of the initial state."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    base = tl.load(base_ptr + sequence)
    chunks = tl.load(base_ptr + sequence + 1) - base
    start = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + sequence + 1)
    key_head = head // (HV // HK)
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, K)
    state_at = d[:, None] * V + columns[None, :]
    dh = tl.zeros((K, COLUMNS), tl.float32)
    for back in tl.range(0, chunks, num_stages=STAGES):
        c = chunks - 1 - back
        first = start + c * CHUNK
        high = tl.minimum(end - first, CHUNK)
        at = (base + c).to(tl.int64) * HV + head
        kt = load_keys(k_ptr, k_ptr, first, 0, high, key_head, HK, K, CHUNK, False)
        q = load_rows(q_ptr, q_ptr, first, 0, high, key_head, d, HK, K, CHUNK, False)
        do = load_rows(do_ptr, do_ptr, first, 0, high, head, columns, HV, V, CHUNK, False)
        beta = load_scalars(beta_ptr, beta_ptr, first, 0, high, head, HV, CHUNK, False)
        gamma = tl.load(rows_ptr + at * (4 * CHUNK) + i)
        t = tl.load(t_ptr + at * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :])
        last = last_of(gamma, CHUNK)
        reach = exp2_32(gamma)[:, None]
        dexit = dh.to(kt.dtype)
        tl.store(dexit_ptr + at * (K * V) + state_at, dexit)
        scores = (scale * (tl.dot(q, kt) * decays(gamma, CHUNK))).to(kt.dtype)
        du = exp2_32(last - gamma)[:, None] * tl.dot(tl.trans(kt), dexit)
        du = tl.dot(tl.trans(scores), do, du)
        dr = tl.dot(tl.trans(t), du.to(kt.dtype)).to(kt.dtype)
        tl.store(dr_ptr + at * (CHUNK * V) + i[:, None] * V + columns[None, :], dr)
        from_o = (do.to(tl.float32) * (scale * reach)).to(kt.dtype)
        from_r = (dr.to(tl.float32) * (beta[:, None] * reach)).to(kt.dtype)
        dh = tl.dot(tl.trans(q), from_o, dh * exp2_32(last)) - tl.dot(kt, from_r)
    whole = sequence.to(tl.int64) * HV + head
    tl.store(dh_ptr + whole * (K * V) + state_at, dh)


@triton.jit
def _gradients(
    q_ptr, k_ptr, v_ptr, beta_ptr, do_ptr, rows_ptr, u_ptr, entry_ptr, dr_ptr, dexit_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, scale,
    places_ptr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of the operands at the rows of one chunk and value head."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    sequence, first, low, high = place(chunk, places_ptr)
    if sequence >= 0:
        key_head = head // (HV // HK)
        i = tl.arange(0, CHUNK)
        d = tl.arange(0, K)
        inside = (i >= low) & (i < high)
        at = chunk.to(tl.int64) * HV + head
        beta = load_scalars(beta_ptr, beta_ptr, first, low, high, head, HV, CHUNK, False)
        reads = tl.zeros((CHUNK, K), tl.float32)  # of the state, by o
        seen = tl.zeros((CHUNK, K), tl.float32)  # of the state, by R
        writes = tl.zeros((CHUNK, K), tl.float32)  # to the state
        dscores = tl.zeros((CHUNK, CHUNK), tl.float32)
        dlower = tl.zeros((CHUNK, CHUNK), tl.float32)
        dbeta = tl.zeros((CHUNK,), tl.float32)
        fade = tl.zeros((K,), tl.float32)
        for part in range(V // COLUMNS):
            columns = part * COLUMNS + tl.arange(0, COLUMNS)
            row_at = at * (CHUNK * V) + i[:, None] * V + columns[None, :]
            state_at = at * (K * V) + d[:, None] * V + columns[None, :]
            turned = at * (K * V) + columns[None, :] * K + d[:, None]
            do = load_rows(do_ptr, do_ptr, first, low, high, head, columns, HV, V, CHUNK, False)
            v = load_rows(v_ptr, v_ptr, first, low, high, head, columns, HV, V, CHUNK, False)
            u = tl.load(u_ptr + at * (CHUNK * V) + columns[None, :] * CHUNK + i[:, None])
            dr = tl.load(dr_ptr + row_at)
            entry = tl.load(entry_ptr + turned)
            dexit = tl.load(dexit_ptr + state_at)
            wide = dr.to(tl.float32)
            token = ((first + i).to(tl.int64) * HV + head)[:, None] * V + columns[None, :]
            dv = (beta[:, None] * wide).to(dv_ptr.dtype.element_ty)
            tl.store(dv_ptr + token, dv, mask=inside[:, None])
            dbeta += tl.sum(wide * v.to(tl.float32), 1)
            fade += tl.sum(entry.to(tl.float32) * dexit.to(tl.float32), 1)
            reads = tl.dot(do, tl.trans(entry), reads)
            seen = tl.dot(dr, tl.trans(entry), seen)
            writes = tl.dot(u, tl.trans(dexit), writes)
            dscores = tl.dot(do, tl.trans(u), dscores)
            dlower = tl.dot(dr, tl.trans(u), dlower)

        kt = load_keys(k_ptr, k_ptr, first, low, high, key_head, HK, K, CHUNK, False)
        k = tl.trans(kt)
        q = load_rows(q_ptr, q_ptr, first, low, high, key_head, d, HK, K, CHUNK, False)
        gamma = tl.load(rows_ptr + at * (4 * CHUNK) + i)
        last = last_of(gamma, CHUNK)
        decay = decays(gamma, CHUNK)
        reach = exp2_32(gamma)
        rest = exp2_32(last - gamma)

        dq = reads * (scale * reach)[:, None]
        dgamma = tl.sum(q.to(tl.float32) * dq, 1)
        wide = k.to(tl.float32)
        by_key = reach * tl.sum(wide * seen, 1)
        dbeta -= by_key
        dgamma -= beta * by_key
        dk = rest[:, None] * writes - (beta * reach)[:, None] * seen
        kept = rest * tl.sum(wide * writes, 1)
        end = tl.sum(kept, 0) + exp2_32(last) * tl.sum(fade, 0)
        dgamma = dgamma - kept + tl.where(i == CHUNK - 1, end, 0.0)

        dscores = scale * dscores * decay
        moved = dscores * tl.dot(q, kt)
        dscores = dscores.to(kt.dtype)
        dq = tl.dot(dscores, k, dq)
        dk = tl.dot(tl.trans(dscores), q, dk)

        dlower = tl.where(i[:, None] > i[None, :], -dlower * decay, 0.0)
        kk = tl.dot(k, kt)
        dbeta += tl.sum(dlower * kk, 1)
        dlower = beta[:, None] * dlower
        moved += dlower * kk
        dlower = dlower.to(kt.dtype)
        dk = tl.dot(dlower, k, dk)
        dk = tl.dot(tl.trans(dlower), k, dk)

        dgamma += tl.sum(moved, 1) - tl.sum(moved, 0)
        # gamma_i holds g of all rows up to i.
        dg = tl.sum(tl.where(i[:, None] >= i[None, :], dgamma[:, None], 0.0), 0)
        row = (first + i).to(tl.int64) * HV + head
        tl.store(dg_ptr + row, dg, mask=inside)
        tl.store(dbeta_ptr + row, dbeta, mask=inside)
        tl.store(dq_ptr + row[:, None] * K + d[None, :], dq, mask=inside[:, None])
        tl.store(dk_ptr + row[:, None] * K + d[None, :], dk, mask=inside[:, None])


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
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
    h, at = whole_sequences(v, key_size, initial_state, starts)
    work, _ = boundaries(k, v, g, beta, [h], at, raw=False)
    chunks, sequences = len(at.places), len(at.slots)
    dr = work.u.new_empty((chunks, heads, CHUNK, size))
    dexit = work.entry.new_empty((chunks, heads, key_size, size))
    dh = torch.empty_like(h)
    dq = g.new_zeros((tokens, heads, key_size))
    dk, dv = torch.zeros_like(dq), torch.zeros_like(v)
    dg, dbeta = torch.zeros_like(g), torch.zeros_like(beta)
    shape = {"HK": key_heads, "HV": heads, "K": key_size, "V": size, "CHUNK": CHUNK}
    tile = tiles.REVERSE
    columns = tile.fitted(size)
    _reverse[(size // columns, heads, sequences)](
        q, k, beta, grad, work.rows, work.t, dr, dexit, dh, scale, at.base, at.starts,
        **shape, COLUMNS=columns, STAGES=tile.stages, num_warps=tile.warps, **gpu.POLICY,
    )  # fmt: skip
    tile = tiles.GRADIENTS
    _gradients[(chunks, heads)](
        q, k, v, beta, grad, work.rows, work.u, work.entry, dr, dexit,
        dq, dk, dv, dg, dbeta, scale, at.places,
        **shape, COLUMNS=tile.fitted(size), num_warps=tile.warps, **gpu.POLICY,
    )  # fmt: skip
    shared = (tokens, key_heads, heads // key_heads, key_size)
    dq, dk = (x.view(shared).sum(2).to(k.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, dh if initial_state is not None else None
