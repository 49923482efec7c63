"""Device functions that the kernels of `gdn` on Hopper share.

The roundings are those of `reference.py`; a matrix product sums in the order of the chip's MMA, a
row sum of `cpr` in the order of `device.fold`. "Narrow" is the dtype of the keys: bf16, or fp32
under Triton's interpreter, where nothing is rounded and only control flow is tested.

One chunk of one sequence in one step holds rows low .. high - 1; rows below `low` are older and lie
in the state (RAW: as raw operands, `cpr`; else as finished rows, `chunk_row`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from samebits.ops.device import exp2_32, fold

WIDE = tl.constexpr(8)
ON_CHIP = tl.constexpr(not triton.knobs.runtime.interpret)
CHAINED = {"launch_pdl": ON_CHIP.value}  # the interpreter knows no such thing
NEAR = 4  # neighbours summed first in a row sum over K: part of the schedule


@triton.jit
def follow():
    """First in a kernel launched as the next of a chain (`CHAINED`): lets the one after it begin,
    up to its own wait, and waits until all that the one before wrote is there."""
    if ON_CHIP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def place(chunk, places_ptr):
    """Sequence of a chunk (-1: none), row of the operands behind its row 0, low, high."""
    at = places_ptr + 4 * chunk
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def load_keys(
    k_ptr, old_at, first, low, high, head,
    HK: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """Keys of a chunk [K, CHUNK], zero outside of its rows."""
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, K)
    inside = (i >= low) & (i < high)
    k_at = k_ptr + (first.to(tl.int64) * HK + head) * K
    kt = tl.load(k_at + (i * (HK * K))[None, :] + d[:, None], mask=inside[None, :], other=0.0)
    if OPEN:
        kt = tl.where((i < low)[None, :], kept_keys(old_at, low, K, CHUNK), kt)
    return kt


@triton.jit
def kept_keys(old_at, low, K: tl.constexpr, CHUNK: tl.constexpr):
    """Keys of the state [K, CHUNK], in which only rows below `low` mean anything."""
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, K)
    # Whole groups of rows, so that loads are wide.
    some = (i // WIDE * WIDE < low)[None, :]
    return tl.load(old_at + d[:, None] * CHUNK + i[None, :], mask=some, other=0.0)


@triton.jit
def load_rows(
    x_ptr, old_at, first, low, high, head, columns,
    H: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """Columns of x [T, H, N] at a chunk's rows [CHUNK, columns], zero outside of its rows."""
    i = tl.arange(0, CHUNK)
    inside = (i >= low) & (i < high)
    x_at = x_ptr + (first.to(tl.int64) * H + head) * N
    at = (i * (H * N))[:, None] + columns[None, :]
    x = tl.load(x_at + at, mask=inside[:, None], other=0.0)
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
def narrowed(x, narrow: tl.constexpr):
    """fp32 x rounded to a narrow dtype, ties to even; bf16 two by one instruction.

    A plain conversion whose result is also widened again takes a slow one for each element.
    """
    if narrow == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.bfloat16, is_pure=True, pack=2
        )
    return x.to(narrow)


@triton.jit
def rounded(x, narrow: tl.constexpr):
    """fp32 x rounded to a narrow dtype, in that dtype and in fp32."""
    if narrow == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000;}",
            "=r,=r,=r,r,r", [x], (tl.bfloat16, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    small = x.to(narrow)
    return small, small.to(tl.float32)


@triton.jit
def residuals(kt, snapshot, v, gamma, beta):
    """R [CHUNK, columns] narrow."""
    seen = exp2_32(gamma)[:, None] * tl.dot(tl.trans(kt), snapshot)
    return (beta[:, None] * (v.to(tl.float32) - seen)).to(kt.dtype)


@triton.jit
def halves(x, narrow: tl.constexpr):
    """fp32 x rounded to a narrow dtype, and what that leaves of it, rounded likewise."""
    high, wide = rounded(x, narrow)
    return high, narrowed(x - wide, narrow)


@triton.jit
def closed(kt, u, gamma, h, CHUNK: tl.constexpr):
    """The fp32 state at the chunk's end."""
    last = last_of(gamma, CHUNK)
    weighted = (u.to(tl.float32) * exp2_32(last - gamma)[:, None]).to(kt.dtype)
    return tl.dot(kt, weighted, h * exp2_32(last))


@triton.jit
def load_state(
    h_ptr, h_slot, rest_ptr, rest_slot, ties_ptr, ties_slot, slot, head, d, columns, live,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """fp32 boundary state of one head [K, COLUMNS]; zero unless `live`, one scalar.

    d [K] and columns [COLUMNS] index its two dimensions. SPLIT: it is kept in planes, as
    `state_spec` of sm90 says.
    """
    at = d[:, None] * V + columns[None, :]
    mask = (at >= 0) & live
    at = head * (K * V) + at
    high = tl.load(h_ptr + slot * h_slot + at, mask=mask, other=0.0)
    if SPLIT:
        rest = tl.load(rest_ptr + slot * rest_slot + at, mask=mask, other=0)
        ties_at = _words_of(ties_ptr + slot * ties_slot, head, d, columns, K, V, COLUMNS)
        ties = tl.load(ties_at, mask=(d >= 0)[:, None] & live, other=0)
        h = joined(high, rest, ties, K, COLUMNS)
    else:
        h = high
    return h


@triton.jit
def _words_of(ties_at, head, d, columns, K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr):
    """Addresses [K, COLUMNS / 32] of the ties of some columns, which begin at a multiple of 32."""
    word = tl.min(columns, 0) // 32 + tl.arange(0, COLUMNS // 32)
    return ties_at + head * (K * V // 32) + d[:, None] * (V // 32) + word[None, :]


@triton.jit
def joined(high, rest, ties, K: tl.constexpr, COLUMNS: tl.constexpr):
    """fp32 state [K, COLUMNS] of its planes."""
    h = high
    if high.dtype == tl.bfloat16:
        ties = tl.broadcast_to(ties[:, :, None], (K, COLUMNS // 32, 32))
        ties = tl.reshape((ties >> tl.arange(0, 32)[None, None, :]) & 1, (K, COLUMNS))
        bits = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
        h = (bits + rest.to(tl.int32) + (ties << 16)).to(tl.float32, bitcast=True)
    return h


@triton.jit
def store_state(
    h, h_ptr, h_slot, rest_ptr, rest_slot, ties_ptr, ties_slot, slot, head, d, columns, live,
    K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_state` for h [K, COLUMNS]."""
    at = d[:, None] * V + columns[None, :]
    mask = (at >= 0) & live
    at = head * (K * V) + at
    if SPLIT:
        high = h
        rest = tl.zeros(h.shape, tl.int32)
        if h_ptr.dtype.element_ty == tl.bfloat16:
            high = narrowed(h, tl.bfloat16)
            rest = h.to(tl.int32, bitcast=True)
            rest = rest - (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
        ties = tl.reshape(tl.where(rest == 32768, 1, 0), (K, COLUMNS // 32, 32))
        ties = tl.sum(ties << tl.arange(0, 32)[None, None, :], 2)
        ties_at = _words_of(ties_ptr + slot * ties_slot, head, d, columns, K, V, COLUMNS)
        tl.store(h_ptr + slot * h_slot + at, high, mask=mask)
        tl.store(rest_ptr + slot * rest_slot + at, rest.to(tl.int16), mask=mask)
        tl.store(ties_at, ties, mask=(d >= 0)[:, None] & live)
    else:
        tl.store(h_ptr + slot * h_slot + at, h, mask=mask)


@triton.jit
def recur(s, q, k, v, g, beta, scale, K: tl.constexpr, COLUMNS: tl.constexpr, NEAR: tl.constexpr):
    """One step of the recurrence on s [COLUMNS, K] fp32 -> (s, o [COLUMNS] fp32)."""
    q = q.to(tl.float32)[None, :]
    k = k.to(tl.float32)[None, :]
    s = s * exp2_32(g * 1.442695)
    delta = beta * (v.to(tl.float32) - fold(s * k, COLUMNS, K, NEAR))
    s = tl.fma(tl.broadcast_to(k, s.shape), tl.broadcast_to(delta[:, None], s.shape), s)
    return s, scale * fold(s * q, COLUMNS, K, NEAR)


def strided(state: Sequence[torch.Tensor]) -> list[torch.Tensor | int]:
    """Each state tensor followed by its stride from slot to slot; bytes are taken by words of four.

    The narrowest dtype that a product's operand was loaded from decides in which order Triton
    hands K to the tensor core's instructions: behind a load of bytes it is not the ascending one,
    and sums have other bits.
    """
    words = [x.view(torch.int32) if x.dtype == torch.int8 else x for x in state]
    return [part for tensor in words for part in (tensor, tensor.stride(0))]


def split(planes: Sequence[torch.Tensor]) -> bool:
    """Whether a boundary state is kept in planes; else all three are the same tensor."""
    return planes[1] is not planes[0]
