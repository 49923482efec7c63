"""The row kernel of `triton.py` for packed sequences, its products under its softmax.

A block computes 128 query tokens of one head at a time: two warpgroups of 64 rows, and a third one
that brings tiles of keys and values by bulk copies. A warpgroup issues the product of its
probabilities and the next tile's scores together; its softmax runs under the products of the other
one. Bits are those of `triton._rows`.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from samebits.ops import gpu
from samebits.ops.attention.cpu import PARTITION
from samebits.ops.attention.gluon_parts import (
    FIXED,
    blocks,
    copy,
    exp2,
    fetch,
    piece,
    place,
)
from samebits.ops.attention.triton import TILE, as_matrix, check, factor
from samebits.ops.gdn.gluon_scan import packed

STAGES = 2  # tiles of keys, and of values, on their way


@gluon.jit
def finite(m):
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def fold(x, ROWS: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """x [ROWS, N] -> [ROWS]: neighbours, then halves, as `device.fold`."""
    x = gl.sum(x.reshape([ROWS, N // 2, 2]), 2)
    for level in gl.static_range(0, 16):
        if (N >> (level + 1)) >= 2:
            x = gl.sum(x.reshape([ROWS, 2, N >> (level + 2)]), 1)
    return gl.convert_layout(x.reshape([ROWS]), gl.SliceLayout(1, layout))


@gluon.jit
def weights(s, base, c, ROWS: gl.constexpr, TILE: gl.constexpr, layout: gl.constexpr):
    """p = ex2(fma(s, c, -(base c))), its sum, and p as left operand."""
    shift = gl.expand_dims(-(base * c), 1).broadcast_to([ROWS, TILE])
    p = exp2(gl.fma(s, gl.full([ROWS, TILE], c, gl.float32, layout), shift))
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    return fold(p, ROWS, TILE, layout), gl.convert_layout(packed(p), left)


@gluon.jit
def further(
    s, m, w, o, c, ROWS: gl.constexpr, TILE: gl.constexpr, of_s: gl.constexpr, row_o: gl.constexpr
):
    """One more tile of a partition: its maximum, sum and output so far, and the tile's p."""
    new = gl.maximum(m, gl.max(s, 1))
    base = finite(new)
    a = exp2((m - base) * c)
    sums, p = weights(s, base, c, ROWS, TILE, of_s)
    w = gl.fma(w, a, sums)
    return new, w, o * gl.expand_dims(gl.convert_layout(a, row_o), 1), p


@gluon.jit
def merge(top, total, out, m, w, o, c, rows: gl.constexpr):
    """One partition's result into the row's."""
    new = gl.maximum(top, m)
    base = finite(new)
    a = exp2((top - base) * c)
    b = exp2((m - base) * c)
    total = gl.fma(w, b, total * a)
    b = gl.expand_dims(gl.convert_layout(b, rows), 1).broadcast_to(o.shape)
    out = gl.fma(o, b, out * gl.expand_dims(gl.convert_layout(a, rows), 1))
    return new, total, out


@gluon.jit
def bring(
    q_desc, k_desc, v_desc, v_ptr, vt, starts_ptr, parts, H, group, total_work,
    q_room, k_room, v_room, q_ready, q_free, k_ready, k_free, v_ready, v_free,
    D: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copies queries, keys and values of all pieces into shared memory."""
    t = 0
    done = 0
    for round in range(gl.cdiv(total_work, gl.num_programs(0))):
        work = piece(round)
        if work < total_work:
            start, count, head, first = place(work, starts_ptr, parts, H, ROWS, True)
            if first < count:
                mbarrier.wait(q_free, (done & 1) ^ 1)
                mbarrier.expect(q_ready, ROWS * D * 2)
                fetch(q_desc, start + first, head * D, q_room, q_ready)
                done += 1
                column = head // group * D
                for tile in range(gl.cdiv(gl.minimum(first + ROWS, count), TILE)):
                    stage = t % STAGES
                    phase = (t // STAGES & 1) ^ 1
                    mbarrier.wait(k_free.index(stage), phase)
                    mbarrier.expect(k_ready.index(stage), TILE * D * 2)
                    tma.async_copy_global_to_shared(
                        k_desc, [start + tile * TILE, column], k_ready.index(stage),
                        k_room.index(stage),
                    )  # fmt: skip
                    mbarrier.wait(v_free.index(stage), phase)
                    if tile * TILE + TILE <= count:
                        mbarrier.expect(v_ready.index(stage), TILE * D * 2)
                        tma.async_copy_global_to_shared(
                            v_desc, [start + tile * TILE, column], v_ready.index(stage),
                            v_room.index(stage),
                        )  # fmt: skip
                    else:
                        # What follows the sequence is not its own, and may be NaN: zeros instead.
                        copy(
                            v_ptr + column, vt, v_room.index(stage), start, tile * TILE, count,
                            TILE, D,
                        )  # fmt: skip
                        fence_async_shared()
                        gl.thread_barrier()
                        mbarrier.arrive(v_ready.index(stage), count=1)
                    t += 1


@gluon.jit
def scores(s, k_free, t, STAGES: gl.constexpr):
    """Scores that were issued, when they are there; their keys' stage is free from then on."""
    s = warpgroup_mma_wait(0, deps=[s])
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(t % STAGES), count=1)
    return s


@gluon.jit
def products(
    p, o, q, zero, k_room, v_room, k_ready, v_ready, v_free, t, n, more,
    STAGES: gl.constexpr, FRESH: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """o of tile t with p v added, and the scores of tile n on their way; no wait where not `more`.

    `FRESH` starts o from zero.
    """
    mbarrier.wait(v_ready.index(t % STAGES), t // STAGES & 1)
    p = gl.convert_layout(p, left)
    o = warpgroup_mma(p, v_room.index(t % STAGES), o, use_acc=not FRESH, is_async=True)
    mbarrier.wait(k_ready.index(n % STAGES), n // STAGES & 1, pred=more)
    k = k_room.index(n % STAGES).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    o, p = warpgroup_mma_wait(1, deps=[o, p])
    gl.thread_barrier()
    mbarrier.arrive(v_free.index(t % STAGES), count=1)
    return o, s


@gluon.jit
def attend(
    which: gl.constexpr, y_ptr, norms_ptr, starts_ptr, parts, H, T, c, total_work,
    q_room, k_room, v_room, q_ready, q_free, k_ready, k_free, v_ready, v_free,
    D: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, PARTITION: gl.constexpr,
    STAGES: gl.constexpr, NORMS: gl.constexpr,
):  # fmt: skip
    """Half of the rows of every piece, in one warpgroup."""
    HALF: gl.constexpr = ROWS // 2
    STEPS: gl.constexpr = PARTITION // TILE
    gl.static_assert(STEPS == 2)
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    of_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_o, 2)
    row: gl.constexpr = gl.SliceLayout(1, of_s)
    row_o: gl.constexpr = gl.SliceLayout(1, of_o)
    across: gl.constexpr = D // 8
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    zero_s = gl.zeros([HALF, TILE], gl.float32, of_s)
    zero_o = gl.zeros([HALF, D], gl.float32, of_o)
    q = q_room.index(which)
    t = 0
    done = 0
    for round in range(gl.cdiv(total_work, gl.num_programs(0))):
        work = piece(round)
        if work < total_work:
            start, count, head, first = place(work, starts_ptr, parts, H, ROWS, True)
            if first < count:
                highest = gl.minimum(first + ROWS, count)
                tiles = gl.cdiv(highest, TILE)
                mine = first + which * HALF
                # Partitions that every row sees in full; at least one more tile follows.
                whole = gl.minimum(mine, highest - 1) // PARTITION
                i = mine + gl.arange(0, HALF, row)
                top = gl.full([HALF], float("-inf"), gl.float32, row)
                total = gl.zeros([HALF], gl.float32, row)
                out = gl.zeros([HALF, D], gl.float32, of_o)
                mbarrier.wait(q_ready, done & 1)
                done += 1
                mbarrier.wait(k_ready.index(t % STAGES), t // STAGES & 1)
                k = k_room.index(t % STAGES).permute((1, 0))
                s = warpgroup_mma(q, k, zero_s, use_acc=False, is_async=True)
                for _ in range(whole):
                    s = scores(s, k_free, t, STAGES)
                    m = gl.max(s, 1)
                    w, p = weights(s, finite(m), c, HALF, TILE, of_s)
                    o, s = products(
                        p, zero_o, q, zero_s, k_room, v_room, k_ready, v_ready, v_free, t, t + 1,
                        True, STAGES, True, left,
                    )  # fmt: skip
                    t += 1
                    s = scores(s, k_free, t, STAGES)
                    m, w, o, p = further(s, m, w, o, c, HALF, TILE, of_s, row_o)
                    o, s = products(
                        p, o, q, zero_s, k_room, v_room, k_ready, v_ready, v_free, t, t + 1,
                        True, STAGES, False, left,
                    )  # fmt: skip
                    top, total, out = merge(top, total, out, m, w, o, c, row_o)
                    t += 1
                # Tiles that some row sees in part, one by one; their scores are masked.
                m = gl.full([HALF], float("-inf"), gl.float32, row)
                w = gl.zeros([HALF], gl.float32, row)
                o = gl.zeros([HALF, D], gl.float32, of_o)
                for tile in range(whole * STEPS, tiles):
                    s = scores(s, k_free, t, STAGES)
                    j = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, of_s))
                    s = gl.where(j[None, :] <= i[:, None], s, float("-inf"))
                    m, w, o, p = further(s, m, w, o, c, HALF, TILE, of_s, row_o)
                    # After the last tile, a product that nobody reads, of keys that are there.
                    more = tile + 1 < tiles
                    o, s = products(
                        p, o, q, zero_s, k_room, v_room, k_ready, v_ready, v_free, t,
                        gl.where(more, t + 1, t), more, STAGES, False, left,
                    )  # fmt: skip
                    if (tile % STEPS == STEPS - 1) | (tile == tiles - 1):
                        top, total, out = merge(top, total, out, m, w, o, c, row_o)
                        m = gl.full([HALF], float("-inf"), gl.float32, row)
                        w = gl.zeros([HALF], gl.float32, row)
                        o = gl.zeros([HALF, D], gl.float32, of_o)
                    t += 1
                s = warpgroup_mma_wait(0, deps=[s])
                gl.thread_barrier()
                mbarrier.arrive(q_free, count=1)
                divisor = gl.expand_dims(gl.convert_layout(total, row_o), 1)
                y = gl.div_rn(out, divisor.broadcast_to(out.shape)) + 0.0
                y = gl.convert_layout(packed(y), by_rows)
                at = mine + gl.arange(0, HALF, gl.SliceLayout(1, by_rows))
                d = gl.arange(0, D, gl.SliceLayout(0, by_rows))
                token = (start + at).to(gl.int64)[:, None]
                inside = (at < count)[:, None] & (d >= 0)[None, :]
                gl.store(y_ptr + (token * H + head) * D + d[None, :], y, mask=inside)
                if NORMS:
                    norm = finite(top) * c + gl.log2(total)
                    gl.store(norms_ptr + head.to(gl.int64) * T + start + i, norm, mask=i < count)


@gluon.jit(do_not_specialize=["parts", "H", "group", "T", "total_work"])
def _rows(
    q_desc, k_desc, v_desc, v_ptr, vt, y_ptr, norms_ptr, starts_ptr, parts, H, group, T, c,
    total_work, D: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr,
    PARTITION: gl.constexpr, STAGES: gl.constexpr, NORMS: gl.constexpr,
):  # fmt: skip
    """y [T, H, D] and, with NORMS, norms [H, T]; ROWS query tokens of one head at a time."""
    q_room = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS // 2, D], q_desc.layout)
    k_room = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, D], k_desc.layout)
    v_room = gl.allocate_shared_memory(v_desc.dtype, [STAGES, TILE, D], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (
                0, y_ptr, norms_ptr, starts_ptr, parts, H, T, c, total_work,
                q_room, k_room, v_room, q_ready, q_free, k_ready, k_free, v_ready, v_free,
                D, ROWS, TILE, PARTITION, STAGES, NORMS,
            )),
            (attend, (
                1, y_ptr, norms_ptr, starts_ptr, parts, H, T, c, total_work,
                q_room, k_room, v_room, q_ready, q_free, k_ready, k_free, v_ready, v_free,
                D, ROWS, TILE, PARTITION, STAGES, NORMS,
            )),
            (bring, (
                q_desc, k_desc, v_desc, v_ptr, vt, starts_ptr, parts, H, group, total_work,
                q_room, k_room, v_room, q_ready, q_free, k_ready, k_free, v_ready, v_free,
                D, ROWS, TILE, STAGES,
            )),
        ],
        [4, 4],
        [240, 24],  # registers of a thread
    )  # fmt: skip


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
    norms: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `triton.varlen`, for head sizes 64 and 128."""
    check(q, k, v, 3, scale, starts=starts)
    tokens, heads, size = q.shape
    y = q.new_empty(q.shape)
    if not tokens or not longest:
        return y
    parts = triton.cdiv(longest, FIXED)
    work = parts * heads * (len(starts) - 1)
    queries, keys, values = (as_matrix(x) for x in (q, k, v))
    _rows[(min(work, gpu.prepare(q.device.index or 0)),)](
        blocks(queries, FIXED // 2, size), blocks(keys, TILE, size), blocks(values, TILE, size),
        values, values.stride(0), y, y if norms is None else norms, starts, parts, heads,
        heads // k.shape[1], tokens, factor(scale), work, D=size, ROWS=FIXED, TILE=TILE,
        PARTITION=PARTITION, STAGES=STAGES, NORMS=norms is not None, num_warps=4,
        **gpu.POLICY,
    )  # fmt: skip
    return y
