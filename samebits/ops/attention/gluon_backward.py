"""The two large kernels of `triton_backward.py`, their products under their exponentials.

A block computes 128 rows of one head at a time: two warpgroups of 64 rows, and a third one that
brings what passes by, by bulk copies. All sums are in a fixed order, without atomics.
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
from samebits.ops.attention.gluon_parts import FIXED, blocks, copy, exp2, fetch, piece, place
from samebits.ops.attention.triton import as_matrix, factor
from samebits.ops.attention.triton_backward import deltas
from samebits.ops.gdn.gluon_scan import packed

MOVING, STAGES = 64, 3  # rows of a tile that passes by, and tiles on their way


@gluon.jit
def pass_by(
    one_desc, two_desc, one_ptr, two_ptr, one_stride, two_stride, start, first, count, column,
    one_room, two_room, free, ready, t,
    MOVING: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One tile of both operands that pass by, into a stage that is free.

    What follows the sequence is not its own, and may be NaN: zeros instead.
    """
    stage = t % STAGES
    if first + MOVING <= count:
        mbarrier.expect(ready.index(stage), 2 * MOVING * D * 2)
        tma.async_copy_global_to_shared(
            one_desc, [start + first, column], ready.index(stage), one_room.index(stage)
        )
        tma.async_copy_global_to_shared(
            two_desc, [start + first, column], ready.index(stage), two_room.index(stage)
        )
    else:
        copy(one_ptr + column, one_stride, one_room.index(stage), start, first, count, MOVING, D)
        copy(two_ptr + column, two_stride, two_room.index(stage), start, first, count, MOVING, D)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def bring_queries(
    q_desc, k_desc, v_desc, dy_desc, q_ptr, dy_ptr, qt, gt, l_ptr, delta_ptr, starts_ptr,
    parts, heads, group, T, total_work,
    k_room, v_room, q_room, dy_room, l_room, delta_room, fixed_ready, fixed_free, ready, free,
    D: gl.constexpr, FIXED: gl.constexpr, MOVING: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The producer of `_keys`: its keys and values once, then queries and their gradients."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    t = 0
    done = 0
    for round in range(gl.cdiv(total_work, gl.num_programs(0))):
        work = piece(round)
        if work < total_work:
            start, count, head, first = place(work, starts_ptr, parts, heads, FIXED, False)
            if first < count:
                mbarrier.wait(fixed_free, (done & 1) ^ 1)
                mbarrier.expect(fixed_ready, 2 * FIXED * D * 2)
                fetch(k_desc, start + first, head * D, k_room, fixed_ready)
                fetch(v_desc, start + first, head * D, v_room, fixed_ready)
                done += 1
                for member in range(group):
                    of = head * group + member
                    row = of.to(gl.int64) * T + start
                    for tile in range(first // MOVING, gl.cdiv(count, MOVING)):
                        i = tile * MOVING + gl.arange(0, MOVING, line)
                        # A row that is not there has no weight.
                        norm = gl.load(l_ptr + row + i, mask=i < count, other=float("inf"))
                        delta = gl.load(delta_ptr + row + i, mask=i < count, other=0.0)
                        mbarrier.wait(free.index(t % STAGES), (t // STAGES & 1) ^ 1)
                        l_room.index(t % STAGES).store(norm)
                        delta_room.index(t % STAGES).store(delta)
                        gl.thread_barrier()
                        pass_by(
                            q_desc, dy_desc, q_ptr, dy_ptr, qt, gt, start, tile * MOVING, count,
                            of * D, q_room, dy_room, free, ready, t, MOVING, D, STAGES,
                        )  # fmt: skip
                        t += 1


@gluon.jit
def keys_step(
    dk, dv, k, v, q_room, dy_room, l_room, delta_room, ready, free, t, j, i, c, zero,
    STAGES: gl.constexpr, MASKED: gl.constexpr, of_s: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """One tile of queries into the gradients of a warpgroup's keys."""
    stage = t % STAGES
    mbarrier.wait(ready.index(stage), t // STAGES & 1)
    q = q_room.index(stage)
    dy = dy_room.index(stage)
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, dy.permute((1, 0)), zero, use_acc=False, is_async=True)
    norm = l_room.index(stage).load(gl.SliceLayout(0, of_s))
    s = warpgroup_mma_wait(1, deps=[s])
    p = exp2(s * c - norm[None, :])
    if MASKED:
        p = gl.where(j[:, None] <= i[None, :], p, 0.0)
    weight = gl.convert_layout(packed(p), left)
    dv = warpgroup_mma(weight, dy, dv, is_async=True)
    delta = delta_room.index(stage).load(gl.SliceLayout(0, of_s))
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = gl.convert_layout(packed(p * (dp - delta[None, :])), left)
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    dk, dv, ds, weight = warpgroup_mma_wait(0, deps=[dk, dv, ds, weight])
    gl.thread_barrier()
    mbarrier.arrive(free.index(stage), count=1)
    return dk, dv


@gluon.jit
def keys_of(
    which: gl.constexpr, dk_ptr, dv_ptr, starts_ptr, parts, heads, group, c, scale, total_work,
    k_room, v_room, q_room, dy_room, l_room, delta_room, fixed_ready, fixed_free, ready, free,
    D: gl.constexpr, FIXED: gl.constexpr, MOVING: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of half of the keys of every piece, in one warpgroup."""
    HALF: gl.constexpr = FIXED // 2
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MOVING, 16])
    of_d: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_d, 2)
    across: gl.constexpr = D // 8
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    zero = gl.zeros([HALF, MOVING], gl.float32, of_s)
    k = k_room.index(which)
    v = v_room.index(which)
    t = 0
    done = 0
    for round in range(gl.cdiv(total_work, gl.num_programs(0))):
        work = piece(round)
        if work < total_work:
            start, count, head, first = place(work, starts_ptr, parts, heads, FIXED, False)
            if first < count:
                mine = first + which * HALF
                j = mine + gl.arange(0, HALF, gl.SliceLayout(1, of_s))
                dk = gl.zeros([HALF, D], gl.float32, of_d)
                dv = gl.zeros([HALF, D], gl.float32, of_d)
                tiles = gl.cdiv(count, MOVING)
                edge = gl.minimum(gl.cdiv(mine + HALF, MOVING), tiles)
                mbarrier.wait(fixed_ready, done & 1)
                done += 1
                for _ in range(group):
                    for tile in range(first // MOVING, edge):
                        i = tile * MOVING + gl.arange(0, MOVING, gl.SliceLayout(0, of_s))
                        dk, dv = keys_step(
                            dk, dv, k, v, q_room, dy_room, l_room, delta_room, ready, free, t,
                            j, i, c, zero, STAGES, True, of_s, left,
                        )  # fmt: skip
                        t += 1
                    for _ in range(edge, tiles):
                        dk, dv = keys_step(
                            dk, dv, k, v, q_room, dy_room, l_room, delta_room, ready, free, t,
                            j, j, c, zero, STAGES, False, of_s, left,
                        )  # fmt: skip
                        t += 1
                mbarrier.arrive(fixed_free, count=1)
                at = mine + gl.arange(0, HALF, gl.SliceLayout(1, by_rows))
                d = gl.arange(0, D, gl.SliceLayout(0, by_rows))
                token = (start + at).to(gl.int64)[:, None]
                inside = (at < count)[:, None] & (d >= 0)[None, :]
                to = (token * heads + head) * D + d[None, :]
                gl.store(dv_ptr + to, gl.convert_layout(packed(dv), by_rows), mask=inside)
                gl.store(dk_ptr + to, gl.convert_layout(packed(dk * scale), by_rows), mask=inside)


@gluon.jit(do_not_specialize=["parts", "heads", "group", "T", "total_work"])
def _keys(
    q_desc, k_desc, v_desc, dy_desc, q_ptr, dy_ptr, qt, gt, l_ptr, delta_ptr,
    dk_ptr, dv_ptr, starts_ptr, parts, heads, group, T, c, scale, total_work,
    D: gl.constexpr, FIXED: gl.constexpr, MOVING: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv [T, G, D]; FIXED keys of one key head at a time."""
    HALF: gl.constexpr = FIXED // 2
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_room = gl.allocate_shared_memory(k_desc.dtype, [2, HALF, D], k_desc.layout)
    v_room = gl.allocate_shared_memory(v_desc.dtype, [2, HALF, D], v_desc.layout)
    q_room = gl.allocate_shared_memory(q_desc.dtype, [STAGES, MOVING, D], q_desc.layout)
    dy_room = gl.allocate_shared_memory(dy_desc.dtype, [STAGES, MOVING, D], dy_desc.layout)
    l_room = gl.allocate_shared_memory(gl.float32, [STAGES, MOVING], line)
    delta_room = gl.allocate_shared_memory(gl.float32, [STAGES, MOVING], line)
    fixed_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    fixed_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(fixed_ready, count=1)
    mbarrier.init(fixed_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (keys_of, (
                0, dk_ptr, dv_ptr, starts_ptr, parts, heads, group, c, scale, total_work,
                k_room, v_room, q_room, dy_room, l_room, delta_room, fixed_ready, fixed_free,
                ready, free, D, FIXED, MOVING, STAGES,
            )),
            (keys_of, (
                1, dk_ptr, dv_ptr, starts_ptr, parts, heads, group, c, scale, total_work,
                k_room, v_room, q_room, dy_room, l_room, delta_room, fixed_ready, fixed_free,
                ready, free, D, FIXED, MOVING, STAGES,
            )),
            (bring_queries, (
                q_desc, k_desc, v_desc, dy_desc, q_ptr, dy_ptr, qt, gt, l_ptr, delta_ptr,
                starts_ptr, parts, heads, group, T, total_work,
                k_room, v_room, q_room, dy_room, l_room, delta_room, fixed_ready, fixed_free,
                ready, free, D, FIXED, MOVING, STAGES,
            )),
        ],
        [4, 4],
        [240, 24],  # registers of a thread
    )  # fmt: skip


@gluon.jit
def bring_keys(
    q_desc, k_desc, v_desc, dy_desc, k_ptr, v_ptr, kt, vt, starts_ptr,
    parts, heads, group, total_work,
    q_room, dy_room, k_room, v_room, fixed_ready, fixed_free, ready, free,
    D: gl.constexpr, FIXED: gl.constexpr, MOVING: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The producer of `_queries`: its queries and their gradients once, then keys and values."""
    t = 0
    done = 0
    for round in range(gl.cdiv(total_work, gl.num_programs(0))):
        work = piece(round)
        if work < total_work:
            start, count, head, first = place(work, starts_ptr, parts, heads, FIXED, True)
            if first < count:
                mbarrier.wait(fixed_free, (done & 1) ^ 1)
                mbarrier.expect(fixed_ready, 2 * FIXED * D * 2)
                fetch(q_desc, start + first, head * D, q_room, fixed_ready)
                fetch(dy_desc, start + first, head * D, dy_room, fixed_ready)
                done += 1
                of = head // group
                for tile in range(gl.cdiv(gl.minimum(first + FIXED, count), MOVING)):
                    mbarrier.wait(free.index(t % STAGES), (t // STAGES & 1) ^ 1)
                    pass_by(
                        k_desc, v_desc, k_ptr, v_ptr, kt, vt, start, tile * MOVING, count, of * D,
                        k_room, v_room, free, ready, t, MOVING, D, STAGES,
                    )  # fmt: skip
                    t += 1


@gluon.jit
def queries_step(
    dq, q, dy, norm, delta, k_room, v_room, ready, free, t, i, j, c, zero,
    STAGES: gl.constexpr, MASKED: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """One tile of keys into the gradient of a warpgroup's queries."""
    stage = t % STAGES
    mbarrier.wait(ready.index(stage), t // STAGES & 1)
    k = k_room.index(stage)
    v = v_room.index(stage)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(dy, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p = exp2(s * c - norm[:, None])
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = p * (dp - delta[:, None])
    if MASKED:
        ds = gl.where(j[None, :] <= i[:, None], ds, 0.0)
    ds = gl.convert_layout(packed(ds), left)
    dq = warpgroup_mma(ds, k, dq, is_async=True)
    dq, ds = warpgroup_mma_wait(0, deps=[dq, ds])
    gl.thread_barrier()
    mbarrier.arrive(free.index(stage), count=1)
    return dq


@gluon.jit
def queries_of(
    which: gl.constexpr, dq_ptr, l_ptr, delta_ptr, starts_ptr, parts, heads, T, c, scale,
    total_work, q_room, dy_room, k_room, v_room, fixed_ready, fixed_free, ready, free,
    D: gl.constexpr, FIXED: gl.constexpr, MOVING: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dq of half of the queries of every piece, in one warpgroup."""
    HALF: gl.constexpr = FIXED // 2
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MOVING, 16])
    of_d: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_d, 2)
    across: gl.constexpr = D // 8
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    zero = gl.zeros([HALF, MOVING], gl.float32, of_s)
    q = q_room.index(which)
    dy = dy_room.index(which)
    t = 0
    done = 0
    for round in range(gl.cdiv(total_work, gl.num_programs(0))):
        work = piece(round)
        if work < total_work:
            start, count, head, first = place(work, starts_ptr, parts, heads, FIXED, True)
            if first < count:
                mine = first + which * HALF
                i = mine + gl.arange(0, HALF, gl.SliceLayout(1, of_s))
                row = head.to(gl.int64) * T + start
                norm = gl.load(l_ptr + row + i, mask=i < count, other=0.0)
                delta = gl.load(delta_ptr + row + i, mask=i < count, other=0.0)
                dq = gl.zeros([HALF, D], gl.float32, of_d)
                tiles = gl.cdiv(gl.minimum(first + FIXED, count), MOVING)
                whole = gl.minimum(mine // MOVING, tiles)
                mbarrier.wait(fixed_ready, done & 1)
                done += 1
                for _ in range(whole):
                    dq = queries_step(
                        dq, q, dy, norm, delta, k_room, v_room, ready, free, t, i, i, c, zero,
                        STAGES, False, left,
                    )  # fmt: skip
                    t += 1
                for tile in range(whole, tiles):
                    j = tile * MOVING + gl.arange(0, MOVING, gl.SliceLayout(0, of_s))
                    dq = queries_step(
                        dq, q, dy, norm, delta, k_room, v_room, ready, free, t, i, j, c, zero,
                        STAGES, True, left,
                    )  # fmt: skip
                    t += 1
                mbarrier.arrive(fixed_free, count=1)
                at = mine + gl.arange(0, HALF, gl.SliceLayout(1, by_rows))
                d = gl.arange(0, D, gl.SliceLayout(0, by_rows))
                token = (start + at).to(gl.int64)[:, None]
                inside = (at < count)[:, None] & (d >= 0)[None, :]
                to = (token * heads + head) * D + d[None, :]
                gl.store(dq_ptr + to, gl.convert_layout(packed(dq * scale), by_rows), mask=inside)


@gluon.jit(do_not_specialize=["parts", "heads", "group", "T", "total_work"])
def _queries(
    q_desc, k_desc, v_desc, dy_desc, k_ptr, v_ptr, kt, vt, l_ptr, delta_ptr, dq_ptr,
    starts_ptr, parts, heads, group, T, c, scale, total_work,
    D: gl.constexpr, FIXED: gl.constexpr, MOVING: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dq [T, H, D]; FIXED queries of one head at a time."""
    HALF: gl.constexpr = FIXED // 2
    q_room = gl.allocate_shared_memory(q_desc.dtype, [2, HALF, D], q_desc.layout)
    dy_room = gl.allocate_shared_memory(dy_desc.dtype, [2, HALF, D], dy_desc.layout)
    k_room = gl.allocate_shared_memory(k_desc.dtype, [STAGES, MOVING, D], k_desc.layout)
    v_room = gl.allocate_shared_memory(v_desc.dtype, [STAGES, MOVING, D], v_desc.layout)
    fixed_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    fixed_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(fixed_ready, count=1)
    mbarrier.init(fixed_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (queries_of, (
                0, dq_ptr, l_ptr, delta_ptr, starts_ptr, parts, heads, T, c, scale, total_work,
                q_room, dy_room, k_room, v_room, fixed_ready, fixed_free, ready, free,
                D, FIXED, MOVING, STAGES,
            )),
            (queries_of, (
                1, dq_ptr, l_ptr, delta_ptr, starts_ptr, parts, heads, T, c, scale, total_work,
                q_room, dy_room, k_room, v_room, fixed_ready, fixed_free, ready, free,
                D, FIXED, MOVING, STAGES,
            )),
            (bring_keys, (
                q_desc, k_desc, v_desc, dy_desc, k_ptr, v_ptr, kt, vt, starts_ptr,
                parts, heads, group, total_work,
                q_room, dy_room, k_room, v_room, fixed_ready, fixed_free, ready, free,
                D, FIXED, MOVING, STAGES,
            )),
        ],
        [4, 4],
        [240, 24],  # registers of a thread
    )  # fmt: skip


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    y: torch.Tensor,
    norms: torch.Tensor,
    dy: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `triton_backward.gradients`, for head sizes 64 and 128."""
    chip = gpu.prepare(q.device.index or 0)
    tokens, heads, size = q.shape
    key_heads, sequences = k.shape[1], len(starts) - 1
    group = heads // key_heads
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if not tokens or not longest:
        return dq, dk, dv
    delta = deltas(y, dy)
    c, parts, half = factor(scale), triton.cdiv(longest, FIXED), FIXED // 2
    of_q, of_k, of_v, of_dy = (as_matrix(x) for x in (q, k, v, dy))
    still = [blocks(x, half, size) for x in (of_q, of_k, of_v, of_dy)]
    passing = [blocks(x, MOVING, size) for x in (of_q, of_k, of_v, of_dy)]
    work = parts * key_heads * sequences
    _keys[(min(work, chip),)](
        passing[0], still[1], still[2], passing[3], of_q, of_dy, of_q.stride(0), of_dy.stride(0),
        norms, delta, dk, dv, starts, parts, key_heads, group, tokens, c, scale, work,
        D=size, FIXED=FIXED, MOVING=MOVING, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    work = parts * heads * sequences
    _queries[(min(work, chip),)](
        still[0], passing[1], passing[2], still[3], of_k, of_v, of_k.stride(0), of_v.stride(0),
        norms, delta, dq, starts, parts, heads, group, tokens, c, scale, work,
        D=size, FIXED=FIXED, MOVING=MOVING, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return dq, dk, dv
