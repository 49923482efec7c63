"""First passes over the chunks of a step on Hopper: where they lie, their decays, and T.

begin   gamma and what follows from it, row after row, for a few heads of a chunk
lower   L of a chunk for all value heads of a key head: one product of keys serves them
solve   T of a chunk and value head: a thread holds whole columns, so a step of the substitution
        inside a block is one fma, and products with earlier blocks go through memory
"""

from __future__ import annotations

import triton
import triton.language as tl

from samebits.ops.device import exp2_32
from samebits.ops.gdn.triton_parts import decays, follow, load_keys, next_gamma, place


@triton.jit
def located(
    piece, note, sequences, starts_ptr, context_ptr, base_ptr,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Where a piece of SIZE rows, whole chunks, lies among those of all sequences: its sequence
    (their number: behind the last piece), the pieces before that sequence, the pieces of all.

    `note`: the first piece of each sequence but the first is stored at base_ptr + 1.
    """
    count = 0
    base = 0
    done = 0
    for from_ in tl.range(0, sequences, TABLE):
        s = from_ + tl.arange(0, TABLE)
        live = s < sequences
        start = tl.load(starts_ptr + s, mask=live, other=0)
        end = tl.load(starts_ptr + s + 1, mask=live, other=0)
        phase = tl.load(context_ptr + s, mask=live, other=0) % CHUNK
        length = tl.where(end > start, (phase + end - start + SIZE - 1) // SIZE, 0)
        ends = done + tl.cumsum(length, 0)
        tl.store(base_ptr + 1 + s, ends, mask=live & note)
        passed = live & (ends <= piece)
        count += tl.sum(passed.to(tl.int32), 0)
        base = tl.maximum(base, tl.max(tl.where(passed, ends, 0), 0))
        done = tl.max(ends, 0)
    return count, base, done


@triton.jit(do_not_specialize=["sequences", "tokens"])  # one kernel for all: it compiles for long
def _begin(
    g_ptr, beta_ptr, rows_ptr, places_ptr, base_ptr, starts_ptr, context_ptr, slots_ptr,
    og_ptr, og_slot, ob_ptr, ob_slot, sequences, tokens,
    HV: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, TABLE: tl.constexpr,
    OPEN: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Place of one chunk and, for some heads, gamma, exp2(gamma), exp2(gamma_last - gamma), beta.

    These four lie at rows_ptr [chunks, HV, 4, CHUNK]. A chunk behind the last one gets sequence -1
    and the rows of the operands that belong to no sequence.
    """
    follow()
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    count, base, done = located(
        chunk, (chunk == 0) & (part == 0), sequences, starts_ptr, context_ptr, base_ptr,
        CHUNK, CHUNK, TABLE,
    )  # fmt: skip
    known = count < sequences
    start = tl.load(starts_ptr + count, mask=known, other=0)
    end = tl.load(starts_ptr + count + 1, mask=known, other=0)
    phase = tl.load(context_ptr + count, mask=known, other=0) % CHUNK
    behind = tl.load(starts_ptr + sequences)
    first = tl.where(known, start - phase + (chunk - base) * CHUNK, behind + (chunk - done) * CHUNK)
    low = tl.where(known, tl.maximum(start - first, 0), 0)
    high = tl.minimum(tl.where(known, end, tokens) - first, CHUNK)
    if part == 0:
        at = places_ptr + 4 * chunk
        tl.store(at, tl.where(known, count, -1))
        tl.store(at + 1, first)
        tl.store(at + 2, low)
        tl.store(at + 3, high)
        if chunk == 0:
            tl.store(base_ptr, 0)
    if known:
        slot = tl.load(slots_ptr + count).to(tl.int64)
        heads = part * HEADS + tl.arange(0, HEADS)
        real = heads < HV
        gamma_at = rows_ptr + (chunk.to(tl.int64) * HV + heads) * (4 * CHUNK)
        og_at = og_ptr + slot * og_slot + heads * CHUNK
        # No load waits behind a store.
        steps = ()
        for r in tl.static_range(0, CHUNK):
            inside = real & (r >= low) & (r < high)
            g = tl.load(g_ptr + (first + r).to(tl.int64) * HV + heads, mask=inside, other=0.0)
            if OPEN:
                old = tl.load(og_at + r, mask=real & (r < low), other=0.0)
                g = tl.where(r < low, old, g)
            steps = steps + (g,)  # type: ignore[assignment]  # noqa: RUF005
        last = tl.zeros((HEADS,), tl.float32)
        for r in tl.static_range(0, CHUNK):
            if OPEN and not RAW:  # what is kept of older rows is gamma
                last = tl.where(r < low, steps[r], next_gamma(last, steps[r], r))
            else:
                last = next_gamma(last, steps[r], r)
            tl.store(gamma_at + r, last, mask=real)
        i = tl.arange(0, CHUNK)
        token = (first + i).to(tl.int64) * HV
        inside = real[:, None] & ((i >= low) & (i < high))[None, :]
        beta = tl.load(beta_ptr + token[None, :] + heads[:, None], mask=inside, other=0.0)
        if OPEN and RAW:
            older = real[:, None] & (i < low)[None, :]
            ob_at = ob_ptr + slot * ob_slot + heads * CHUNK
            beta = tl.where(
                older, tl.load(ob_at[:, None] + i[None, :], mask=older, other=0.0), beta
            )
        tl.debug_barrier()  # gamma is read again by other threads
        at = gamma_at[:, None] + i[None, :]
        gamma = tl.load(at, mask=real[:, None], other=0.0)
        last = tl.load(gamma_at + CHUNK - 1, mask=real, other=0.0)
        tl.store(at + CHUNK, exp2_32(gamma), mask=real[:, None])
        tl.store(at + 2 * CHUNK, exp2_32(last[:, None] - gamma), mask=real[:, None])
        tl.store(at + 3 * CHUNK, beta, mask=real[:, None])


@triton.jit
def _lower(
    k_ptr, rows_ptr, t_ptr, near_ptr, places_ptr, slots_ptr, ok_ptr, ok_slot,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """L of one chunk: narrow at t_ptr, where T is going to be, and in fp32 its blocks on the
    diagonal at near_ptr [chunks, HV, CHUNK, BLOCK]."""
    follow()
    chunk = tl.program_id(0)
    key_head = tl.program_id(1)
    sequence, first, low, high = place(chunk, places_ptr)
    if sequence >= 0:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        i = tl.arange(0, CHUNK)
        ok_at = ok_ptr + slot * ok_slot + key_head * (K * CHUNK)
        kt = load_keys(k_ptr, ok_at, first, low, high, key_head, HK, K, CHUNK, OPEN)
        kk = tl.dot(tl.trans(kt), kt)
        square = i[:, None] * CHUNK + i[None, :]
        near = i[:, None] * BLOCK + i[None, :] % BLOCK
        for member in tl.range(0, HV // HK):
            at = (chunk.to(tl.int64) * HV + key_head * (HV // HK) + member) * CHUNK
            gamma = tl.load(rows_ptr + 4 * at + i)
            beta = tl.load(rows_ptr + 4 * at + 3 * CHUNK + i)
            lower = beta[:, None] * (kk * decays(gamma, CHUNK))
            lower = tl.where(i[:, None] > i[None, :], lower, 0.0)
            same = i[:, None] // BLOCK == i[None, :] // BLOCK
            tl.store(near_ptr + at * BLOCK + near, lower, mask=same)
            tl.store(t_ptr + at * CHUNK + square, lower.to(t_ptr.dtype.element_ty))


@triton.jit
def _solve(
    t_ptr, near_ptr, far_ptr, x_ptr, places_ptr, slots_ptr, ox_ptr, ox_slot, ot_ptr, ot_slot,
    HV: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """T of one chunk and value head in the place of L; far_ptr [chunks, HV, BLOCK, CHUNK] is room
    for a product.

    OPEN: rows below `low` come from the state, their fp32 form too as far as their block is open,
    and fp32 rows of the block that stays open are stored at x_ptr.
    """
    follow()
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    sequence, _, low, high = place(chunk, places_ptr)
    if sequence >= 0:
        i = tl.arange(0, CHUNK)
        at = (chunk.to(tl.int64) * HV + head) * CHUNK
        t_at = t_ptr + at * CHUNK
        far_at = far_ptr + at * BLOCK
        if OPEN:
            slot = tl.load(slots_ptr + sequence).to(tl.int64)
            ot_at = ot_ptr + slot * ot_slot + head * (CHUNK * CHUNK)
            ox_at = ox_ptr + slot * ox_slot + head * (BLOCK * CHUNK)
            x_at = x_ptr + (sequence.to(tl.int64) * HV + head) * (BLOCK * CHUNK)
        for b in tl.range(0, CHUNK // BLOCK):
            start = b * BLOCK
            if b > 0:
                r = tl.arange(0, BLOCK)
                earlier = i < start
                lower = tl.load(
                    t_at + (start + r)[:, None] * CHUNK + i[None, :],
                    mask=earlier[None, :],
                    other=0.0,
                )
                t = tl.load(
                    t_at + i[:, None] * CHUNK + i[None, :], mask=earlier[:, None], other=0.0
                )
                tl.store(far_at + r[:, None] * CHUNK + i[None, :], tl.dot(lower, t))
                tl.debug_barrier()  # whole columns are read again
            near_at = near_ptr + (at + start) * BLOCK
            # No load of a factor waits behind a store.
            solved = ()
            for row in tl.static_range(0, BLOCK):
                x = tl.where(i == start + row, 1.0, 0.0)
                x = x - tl.load(far_at + row * CHUNK + i, mask=(i >= 0) & (b > 0), other=0.0)
                for j in tl.static_range(0, row):
                    factor = tl.load(near_at + row * BLOCK + j)
                    x = tl.fma(tl.broadcast_to(-factor, x.shape), solved[j], x)
                if OPEN:
                    known = (start + row < low) & (b == low // BLOCK) & (i >= 0)
                    x = tl.where(known, tl.load(ox_at + row * CHUNK + i, mask=known, other=0.0), x)
                solved = solved + (x,)  # type: ignore[assignment]  # noqa: RUF005
            for row in tl.static_range(0, BLOCK):
                x = solved[row]
                narrow = x.to(t_ptr.dtype.element_ty)  # type: ignore[var-annotated]
                here = (start + row) * CHUNK + i
                if OPEN:
                    stays = (start + row < high) & (b == high // BLOCK) & (i >= 0)
                    tl.store(x_at + row * CHUNK + i, x, mask=stays)
                    older = (start + row < low) & (i >= 0)
                    narrow = tl.where(older, tl.load(ot_at + here, mask=older, other=0.0), narrow)
                tl.store(t_at + here, narrow)
            tl.debug_barrier()  # rows of T are operands of the next block's product
