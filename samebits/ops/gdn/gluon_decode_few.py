"""Decoding by `chunk_row` in one launch, for batches so small that launches are most of the time.

The three passes of `triton_decode` one after the other, for some columns of one value head of one
sequence. Products are transposed as in `gluon_decode`, so that a warp loads what it multiplies into
the registers of the left operand, and only vectors of a row go through shared memory, twice.
Programs of one head compute the same row of T and store the same bytes. Bits are those of
`triton_decode`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from samebits.ops import device, gpu
from samebits.ops.gdn import gluon_decode
from samebits.ops.gdn.cpu import BLOCK, CHUNK
from samebits.ops.gdn.gluon_chain import joined
from samebits.ops.gdn.gluon_decode import RIGHT, row_of_state, vector
from samebits.ops.gdn.gluon_scan import packed, packed_and_back
from samebits.ops.gdn.triton_parts import strided

exp2_32 = gluon.jit(device.exp2_32.fn)
WARPS = 4  # of 16 columns each: as many as a chunk has rows
PIECE = 32  # rows of the state that are closed together


@gluon.constexpr_function
def pieces(columns: int, bits: int, warps: int) -> gl.BlockedLayout:
    """Of a matrix of elements of some bits: a thread has pieces of 16 bytes."""
    each = 128 // bits
    return gl.BlockedLayout([1, each], [32 * each // columns, columns // each], [warps, 1], [1, 0])


@gluon.jit
def empty(room, WARPS: gl.constexpr):
    """Zeros everywhere."""
    n: gl.constexpr = room.shape[0]
    columns: gl.constexpr = room.shape[1]
    wide: gl.constexpr = pieces(columns, room.dtype.primitive_bitwidth, WARPS)
    room.store(gl.zeros([n, columns], room.dtype, wide))


@gluon.jit
def ask(room, x_at, stride: gl.constexpr, rows, WARPS: gl.constexpr):
    """Copy the first `rows` rows of a matrix at x_at [n, columns] into shared memory; what lies in
    the others' place stays."""
    n: gl.constexpr = room.shape[0]
    columns: gl.constexpr = room.shape[1]
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // columns, columns // 8], [WARPS, 1], [1, 0]
    )
    r = gl.arange(0, n, gl.SliceLayout(1, wide))[:, None]
    c = gl.arange(0, columns, gl.SliceLayout(0, wide))[None, :]
    async_copy.async_copy_global_to_shared(room, x_at + r * stride + c, mask=(r < rows) & (c >= 0))


@gluon.jit
def close(
    weighted, k_at, ok_at, live, i, fade, h_at, rest_at, ties_at,
    K: gl.constexpr, V: gl.constexpr, CHUNK: gl.constexpr, PIECE: gl.constexpr,
    product: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The state at the chunk's end; weighted [columns, CHUNK] is a left operand."""
    COLUMNS: gl.constexpr = weighted.shape[0]
    rhs: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    lanes: gl.constexpr = [COLUMNS // 32, 1024 // COLUMNS]
    packs: gl.constexpr = gl.BlockedLayout([1, 1], lanes, [1, WARPS], [0, 1])
    m = gl.arange(0, COLUMNS, gl.SliceLayout(1, product))[:, None]
    for piece in range(K // PIECE):
        d = piece * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, product))[None, :]
        known = (d >= 0) & (m >= 0) & live
        high = gl.load(h_at + d * V + m, mask=known, other=0.0)
        low = gl.load(rest_at + d * V + m, mask=known, other=0)
        ties = gl.load(ties_at + d * (V // 32) + m // 32, mask=known, other=0)
        h = joined(high, low, (ties >> m % 32) & 1)
        j = gl.arange(0, CHUNK, gl.SliceLayout(1, rhs))[:, None]
        e = piece * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, rhs))[None, :]
        keys = gl.load(ok_at + e * CHUNK + j, mask=(j < i) & (e >= 0), other=0.0)
        h = mma_v2(weighted, gl.where(j == i, gl.load(k_at + e + j * 0), keys), h * fade)
        high = packed(h)
        low = h.to(gl.int32, bitcast=True) - (high.to(gl.int16, bitcast=True).to(gl.int32) << 16)
        ties = gl.where(low == 32768, 1, 0) << m % 32
        ties = gl.sum(ties.reshape([COLUMNS // 32, 32, PIECE]), 1)
        c = gl.arange(0, COLUMNS // 32, gl.SliceLayout(1, packs))[:, None]
        e = piece * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, packs))[None, :]
        gl.store(ties_at + e * (V // 32) + c, gl.convert_layout(ties, packs))
        gl.store(rest_at + d * V + m, low.to(gl.int16))
        gl.store(h_at + d * V + m, high)


@gluon.jit
def _few(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, o_ptr, scale, context_ptr, slots_ptr,
    h_ptr, h_slot, rest_ptr, rest_slot, ties_ptr, ties_slot, x_ptr, x_slot,
    gamma_ptr, gamma_slot, ok_ptr, ok_slot, r_ptr, r_slot, u_ptr, u_slot, t_ptr, t_slot,
    HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, CHUNK: gl.constexpr,
    BLOCK: gl.constexpr, RIGHT: gl.constexpr, WARPS: gl.constexpr,
    PIECE: gl.constexpr,
):  # fmt: skip
    """Row i of T, R, u and o for some columns, and of these the next boundary state behind the
    last row of a chunk."""
    COLUMNS: gl.constexpr = 16 * WARPS
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, RIGHT])
    by_row: gl.constexpr = gl.SliceLayout(1, product)
    lhs: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    rhs: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    matrix: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    narrow: gl.constexpr = k_ptr.dtype.element_ty
    one_row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gl.static_assert(COLUMNS == CHUNK)
    keys_room = gl.allocate_shared_memory(narrow, [K, CHUNK], matrix)
    h_room = gl.allocate_shared_memory(narrow, [K, COLUMNS], matrix)
    t_room = gl.allocate_shared_memory(narrow, [CHUNK, CHUNK], matrix)
    r_room = gl.allocate_shared_memory(narrow, [CHUNK, COLUMNS], matrix)
    u_room = gl.allocate_shared_memory(narrow, [CHUNK, COLUMNS], matrix)
    x_room = gl.allocate_shared_memory(gl.float32, [BLOCK, CHUNK], flat)
    gdc_launch_dependents()
    # Rows that no copy fills are summed over; those of keys and state are not, or not looked at.
    empty(t_room, WARPS)
    empty(r_room, WARPS)
    empty(u_room, WARPS)
    empty(x_room, WARPS)
    gdc_wait()

    left = gl.program_id(0) * COLUMNS
    head = gl.program_id(1)
    n = gl.program_id(2)
    slot = gl.load(slots_ptr + n).to(gl.int64)
    context = gl.load(context_ptr + n)
    row = n * HV + head
    m = gl.arange(0, COLUMNS, by_row)
    o_at = o_ptr + row * V + left + m
    key_head = head // (HV // HK)
    k_at = k_ptr + (n * HK + key_head) * K
    on = gl.arange(0, RIGHT, gl.SliceLayout(0, rhs))[None, :]
    e = gl.arange(0, K, gl.SliceLayout(1, rhs))[:, None]
    q = gl.load(q_ptr + (n * HK + key_head) * K + e + on * 0, mask=on == 0, other=0.0)
    k = gl.load(k_at + e + on * 0, mask=on == 1, other=0.0)
    qk = gl.where(on == 0, q, k)
    d = gl.arange(0, K, gl.SliceLayout(0, lhs))
    each = gl.arange(0, K, gl.BlockedLayout([1], [32], [WARPS], [0]))
    key = gl.load(k_at + d)
    v = gl.load(v_ptr + row * V + left + m).to(gl.float32)
    g = gl.load(g_ptr + row)
    beta = gl.load(beta_ptr + row)
    if slot >= 0:
        i = context % CHUNK
        start = i // BLOCK * BLOCK
        gamma_at = gamma_ptr + slot * gamma_slot + head * CHUNK
        x_at = x_ptr + slot * x_slot + head * (BLOCK * CHUNK)
        t_at = t_ptr + slot * t_slot + head * (CHUNK * CHUNK)
        ok_at = ok_ptr + slot * ok_slot + key_head * (K * CHUNK)
        r_at = r_ptr + slot * r_slot + head * (CHUNK * V) + left
        u_at = u_ptr + slot * u_slot + head * (CHUNK * V) + left
        h_at = h_ptr + slot * h_slot + head * (K * V) + left
        # All of memory first, so that it is waited for once.
        ask(keys_room, ok_at, CHUNK, gl.where(i > 0, K, 0), WARPS)
        async_copy.commit_group()
        ask(h_room, h_at, V, gl.where(context >= CHUNK, K, 0), WARPS)
        ask(t_room, t_at, CHUNK, start, WARPS)
        ask(x_room, x_at, CHUNK, i - start, WARPS)
        async_copy.commit_group()
        ask(r_room, r_at, V, i, WARPS)
        ask(u_room, u_at, V, i, WARPS)
        async_copy.commit_group()
        before = gl.load(gamma_at + i - 1, mask=i > 0, other=0.0)
        older = gl.load(gamma_at + m, mask=m < i, other=0.0)

        zero = gl.zeros([COLUMNS, RIGHT], gl.float32, product)
        async_copy.wait_group(2)
        j = gl.arange(0, CHUNK, gl.SliceLayout(1, lhs))[:, None]
        keys = gl.where(j == i, key[None, :], keys_room.permute((1, 0)).load(lhs))
        dots = mma_v2(keys, qk, zero)
        step = g * 1.442695
        gamma = gl.where(i == 0, step, before + step)
        fall = exp2_32(gl.where(m <= i, gamma - gl.where(m == i, gamma, older), 0.0))
        scores = gl.where(m <= i, vector(dots, 0, product) * fall, 0.0)
        lower = gl.where(m < i, beta * (vector(dots, 1, product) * fall), 0.0)
        high, wide = packed_and_back(scores)
        low = packed(scores - wide)
        lower_room = gl.allocate_shared_memory(gl.float32, [CHUNK, 1], flat)
        high_room = gl.allocate_shared_memory(narrow, [CHUNK, 1], flat)
        low_room = gl.allocate_shared_memory(narrow, [CHUNK, 1], flat)
        lower_room.store(lower.reshape([CHUNK, 1]))
        high_room.store(high.reshape([CHUNK, 1]))
        low_room.store(low.reshape([CHUNK, 1]))
        async_copy.wait_group(1)
        read = mma_v2(h_room.permute((1, 0)).load(lhs), qk, zero)
        read = gl.where(context >= CHUNK, read, 0.0)
        first = on == 0
        no_row = gl.zeros([CHUNK, RIGHT], narrow, rhs)
        s = gl.arange(0, CHUNK, gl.SliceLayout(1, rhs))[:, None]
        earlier = packed(gl.where(s < start, lower_room.load(rhs), 0.0))
        x = mma_v2(t_room.permute((1, 0)).load(lhs), gl.where(first, earlier, no_row), zero)
        x = gl.where(m == i, 1.0, 0.0) - vector(x, 0, product)
        # In fp32 by fma, ascending: the steps of the substitution.
        by_one = lower_room._reinterpret(gl.float32, [CHUNK, 1], one_row)
        block = x_room._reinterpret(gl.float32, [BLOCK, CHUNK], one_row)
        for step in gl.static_range(0, BLOCK):
            factor = gl.sum(by_one.index(start + step).load(by_row), 0)
            x = gl.fma(
                gl.full([COLUMNS], -factor, gl.float32, by_row), block.index(step).load(by_row), x
            )
        new = packed(x)
        weights_room = gl.allocate_shared_memory(narrow, [CHUNK, 1], flat)
        weights_room.store(new.reshape([CHUNK, 1]))
        gl.store(x_at + (i - start) * CHUNK + m, x)
        gl.store(t_at + i * CHUNK + m, new)
        gl.store(gamma_at + i, gamma)
        gl.store(ok_at + each * CHUNK + i, gl.load(k_at + each))
        reach = exp2_32(gamma)
        async_copy.wait_group(0)
        rs = r_room.permute((1, 0)).load(lhs)
        us = u_room.permute((1, 0)).load(lhs)
        weights = gl.where(first, weights_room.load(rhs), no_row)
        high = gl.where(first, high_room.load(rhs), no_row)
        low = gl.where(first, low_room.load(rhs), no_row)
        o, r, u, us = row_of_state(rs, us, read, weights, high, low, v, beta, reach, i, product)
        gl.store(o_at, scale * o)
        gl.store(r_at + i * V + m, r)
        gl.store(u_at + i * V + m, u)
        if i == CHUNK - 1:
            across = gl.arange(0, CHUNK, gl.SliceLayout(0, lhs))[None, :]
            gammas = gl.load(gamma_at + across, mask=across < i, other=0.0)
            weight = exp2_32(gamma - gl.where(across == i, gamma, gammas))
            close(
                packed(us.to(gl.float32) * weight), k_at, ok_at, context >= CHUNK, i, reach,
                h_at, rest_ptr + slot * rest_slot + head * (K * V) + left,
                ties_ptr + slot * ties_slot + head * (K * V // 32) + left // 32,
                K, V, CHUNK, PIECE, product, WARPS,
            )  # fmt: skip
    else:
        gl.store(o_at, gl.zeros([COLUMNS], gl.float32, by_row))


def serves(key_size: int, size: int) -> bool:
    """Head sizes of whole pieces; not under the interpreter, which knows no layouts."""
    return gluon_decode.serves() and key_size % 64 == 0 and size % (16 * WARPS) == 0


def step(
    operands: tuple[torch.Tensor, ...],
    state: Sequence[torch.Tensor],
    slots: torch.Tensor,
    context: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """o [N, HV, V] of one row of each of N sequences; `operands` are q, k, v, g and beta."""
    _, k, v, _, _ = operands
    rows, key_heads, key_size = k.shape
    heads, size = v.shape[1:]
    o = torch.empty_like(v, dtype=torch.float32)
    _few[(size // (16 * WARPS), heads, rows)](
        *operands, o, scale, context, slots, *strided(state),
        HK=key_heads, HV=heads, K=key_size, V=size, CHUNK=CHUNK, BLOCK=BLOCK, RIGHT=RIGHT,
        WARPS=WARPS, PIECE=PIECE, num_warps=WARPS, launch_pdl=True, **gpu.POLICY,
    )  # fmt: skip
    return o
