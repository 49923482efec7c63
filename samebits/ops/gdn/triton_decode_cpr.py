"""Decoding on Hopper by `cpr`: a step of the recurrence, and the boundary state of a full chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from samebits.ops.gdn.triton_parts import (
    closed,
    decays,
    inverse,
    load_keys,
    load_rows,
    load_scalars,
    log_decays,
    recur,
    residuals,
)


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
