"""The serial pass of `triton_backward.py` over whole chunks, from the last to the first, written
for the latency of its chain as `gluon_chain.py` is for the forward's.

Everything is transposed; one warpgroup owns 64 columns of V. Of a chunk's four products three wait
for one another, each takes its left operand from registers. Operands on the right arrive by bulk
copies some chunks ahead.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from samebits.ops import gpu
from samebits.ops.gdn import tiles_sm90 as tiles
from samebits.ops.gdn.gluon_chain import in_memory
from samebits.ops.gdn.gluon_scan import blocks, packed, packed_and_back


@gluon.jit
def _request(
    q_desc, k_desc, do_desc, inner_desc, t_desc,
    q_room, k_room, do_room, inner_room, t_room, ready, stage,
    token, key, value, left, V: gl.constexpr, CHUNK: gl.constexpr, at, live,
):  # fmt: skip
    """Ask for the operands of one chunk, into one stage."""
    bar = ready.index(stage)
    size: gl.constexpr = (
        q_desc.block_type.nbytes
        + k_desc.block_type.nbytes
        + do_desc.block_type.nbytes
        + inner_desc.block_type.nbytes
        + t_desc.block_type.nbytes
    )
    mbarrier.expect(bar, size, pred=live)
    tma.async_copy_global_to_shared(k_desc, [token, key], bar, k_room.index(stage), pred=live)
    tma.async_copy_global_to_shared(
        inner_desc, [at * V + left, 0], bar, inner_room.index(stage), pred=live
    )
    tma.async_copy_global_to_shared(t_desc, [at * CHUNK, 0], bar, t_room.index(stage), pred=live)
    tma.async_copy_global_to_shared(do_desc, [token, value], bar, do_room.index(stage), pred=live)
    tma.async_copy_global_to_shared(q_desc, [token, key], bar, q_room.index(stage), pred=live)


@gluon.jit
def _reverse(
    q_desc, k_desc, do_desc, inner_desc, t_desc, dr_desc, dexit_desc,
    rows_ptr, dh_ptr, scale, base_ptr, starts_ptr,
    HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, CHUNK: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`triton_backward._reverse` over the whole chunks of one sequence and value head."""
    gdc_launch_dependents()
    gdc_wait()
    over_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    over_rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    for_rows: gl.constexpr = gl.DotOperandLayout(0, over_rows, 2)
    for_k: gl.constexpr = gl.DotOperandLayout(0, over_k, 2)

    left = gl.program_id(0) * COLUMNS
    head = gl.program_id(1)
    sequence = gl.program_id(2)
    base = gl.load(base_ptr + sequence)
    start = gl.load(starts_ptr + sequence)
    whole = (gl.load(starts_ptr + sequence + 1) - start) // CHUNK
    key = head // (HV // HK) * K
    value = head * V + left

    q_room = gl.allocate_shared_memory(q_desc.dtype, [STAGES, CHUNK, K], q_desc.layout)
    k_room = gl.allocate_shared_memory(k_desc.dtype, [STAGES, CHUNK, K], k_desc.layout)
    do_room = gl.allocate_shared_memory(do_desc.dtype, [STAGES, CHUNK, COLUMNS], do_desc.layout)
    inner_room = gl.allocate_shared_memory(
        inner_desc.dtype, [STAGES, COLUMNS, CHUNK], inner_desc.layout
    )
    t_room = gl.allocate_shared_memory(t_desc.dtype, [STAGES, CHUNK, CHUNK], t_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        n = whole - 1 - stage
        _request(
            q_desc, k_desc, do_desc, inner_desc, t_desc,
            q_room, k_room, do_room, inner_room, t_room, ready, stage,
            start + n * CHUNK, key, value, left, V, CHUNK, (base + n) * HV + head, n >= 0,
        )  # fmt: skip

    by_row: gl.constexpr = in_memory(COLUMNS, 4)
    columns = left + gl.arange(0, COLUMNS, gl.SliceLayout(1, by_row))
    d = gl.arange(0, K, gl.SliceLayout(0, by_row))
    element = (sequence.to(gl.int64) * HV + head) * (K * V) + d[None, :] * V + columns[:, None]
    some = (columns >= 0)[:, None] & (d >= 0)[None, :] & (whole > 0)
    dh = gl.convert_layout(gl.load(dh_ptr + element, mask=some, other=0.0), over_k)
    # Behind the exchange, which so takes their room.
    dexit_room = gl.allocate_shared_memory(dexit_desc.dtype, [2, COLUMNS, K], dexit_desc.layout)
    dr_room = gl.allocate_shared_memory(dr_desc.dtype, [2, CHUNK, COLUMNS], dr_desc.layout)

    i = gl.arange(0, CHUNK, gl.SliceLayout(0, over_rows))
    zero = gl.zeros([COLUMNS, CHUNK], gl.float32, over_rows)
    # Scalars of a chunk are loaded one chunk ahead.
    rows_at = rows_ptr + ((base + gl.maximum(whole - 1, 0)) * HV + head).to(gl.int64) * (4 * CHUNK)
    reach = gl.load(rows_at + CHUNK + i)
    rest = gl.load(rows_at + 2 * CHUNK + i)
    beta = gl.load(rows_at + 3 * CHUNK + i)
    fade = gl.load(rows_at + 2 * CHUNK - 1)
    stage = 0
    phase = 0
    flip = 0
    for back in range(whole):
        n = whole - 1 - back
        at = (base + n) * HV + head
        mbarrier.wait(ready.index(stage), phase)
        k = k_room.index(stage)
        snapshot = packed(dh)
        operand = gl.convert_layout(snapshot, for_rows, assert_trivial=True)
        du = warpgroup_mma(operand, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        dexit_room.index(flip).store(snapshot)
        fence_async_shared()
        tma.async_copy_shared_to_global(dexit_desc, [at * V + left, 0], dexit_room.index(flip))
        # Every warp has passed a barrier since the chunk before left its stage.
        ahead = n + 1 - STAGES
        _request(
            q_desc, k_desc, do_desc, inner_desc, t_desc,
            q_room, k_room, do_room, inner_room, t_room, ready,
            gl.where(stage == 0, STAGES - 1, stage - 1),
            start + ahead * CHUNK, key, value, left, V, CHUNK, (base + ahead) * HV + head,
            (back > 0) & (ahead >= 0),
        )  # fmt: skip
        dot = do_room.index(stage).permute((1, 0)).load(over_rows).to(gl.float32)
        from_o = packed(dot * (scale * reach)[None, :])
        inner = inner_room.index(stage).load(over_rows).to(gl.float32)
        next_at = (base + gl.maximum(n - 1, 0)) * HV + head
        rows_at = rows_ptr + next_at.to(gl.int64) * (4 * CHUNK)
        next_reach = gl.load(rows_at + CHUNK + i)
        next_rest = gl.load(rows_at + 2 * CHUNK + i)
        next_beta = gl.load(rows_at + 3 * CHUNK + i)
        next_fade = gl.load(rows_at + 2 * CHUNK - 1)
        operand = gl.convert_layout(from_o, for_k, assert_trivial=True)
        dh = warpgroup_mma(operand, q_room.index(stage), dh * fade, is_async=True)
        du, dh = warpgroup_mma_wait(0, deps=[du, dh])
        du = packed(rest[None, :] * du + inner)
        operand = gl.convert_layout(du, for_rows, assert_trivial=True)
        dr = warpgroup_mma(operand, t_room.index(stage), zero, use_acc=False, is_async=True)
        dr = warpgroup_mma_wait(0, deps=[dr])
        dr, wide = packed_and_back(dr)
        from_r = packed(wide * (-beta * reach)[None, :])
        dr_room.index(flip).permute((1, 0)).store(dr)
        operand = gl.convert_layout(from_r, for_k, assert_trivial=True)
        dh = warpgroup_mma(operand, k, dh, is_async=True)
        fence_async_shared()
        tma.async_copy_shared_to_global(dr_desc, [at * CHUNK, left], dr_room.index(flip))
        tma.store_wait(2)  # the next chunk's two are free again
        dh = warpgroup_mma_wait(0, deps=[dh])
        reach, rest, beta, fade = next_reach, next_rest, next_beta, next_fade
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        phase = gl.where(stage == 0, 1 - phase, phase)
        flip = 1 - flip
    tma.store_wait(0)
    gl.store(dh_ptr + element, gl.convert_layout(dh, by_row), mask=some)


def reverse(
    q: torch.Tensor,
    k: torch.Tensor,
    grad: torch.Tensor,
    inner: torch.Tensor,
    t: torch.Tensor,
    dr: torch.Tensor,
    dexit: torch.Tensor,
    others: tuple[torch.Tensor | float, ...],
    shape: dict[str, int],
    sequences: int,
) -> None:
    """Launch it on matrices; `others` and `shape` are the kernel's next arguments and constants."""
    chunk, key_size = shape["CHUNK"], shape["K"]
    tile = tiles.chain(shape["HV"] * sequences, shape["V"])
    columns = tile.columns
    _reverse[(shape["V"] // columns, shape["HV"], sequences)](
        blocks(q, chunk, key_size), blocks(k, chunk, key_size), blocks(grad, chunk, columns),
        blocks(inner, columns, chunk), blocks(t, chunk, chunk), blocks(dr, chunk, columns),
        blocks(dexit, columns, key_size), *others,
        **shape, COLUMNS=columns, STAGES=tile.stages, num_warps=tile.warps, launch_pdl=True,
        **gpu.POLICY,
    )  # fmt: skip
