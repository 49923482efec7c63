"""The serial pass of `triton_scan.py` over whole chunks, written for the latency of its chain.

One warpgroup owns 64 columns. Its three products per chunk are asynchronous and take their left
operands from registers; operands on the right arrive by bulk copies some chunks ahead, and what is
stored leaves while products run. The state comes and goes by whole pieces of memory, in planes or
in fp32. Bits are those of `triton_scan._whole`.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from samebits.ops.gdn.gluon_scan import blocks, packed, packed_and_back, request
from samebits.ops.gdn.tiles_sm90 import Tile
from samebits.ops.gdn.triton_parts import split, strided


@gluon.constexpr_function
def in_memory(columns: int, warps: int) -> gl.BlockedLayout:
    """Of [columns, rows]: a thread has 8 neighbouring columns, a warp whole pieces of memory."""
    across = columns // 8
    return gl.BlockedLayout([8, 1], [across, 32 // across], [1, warps], [0, 1])


@gluon.jit
def joined(high, rest, ties):
    """fp32 of the planes of a state; ties is 1 where there is one."""
    bits = high.to(gl.int16, bitcast=True).to(gl.int32) << 16
    bits = bits + rest.to(gl.int32) + (ties << 16)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _whole(
    k_desc, v_desc, t_desc, u_desc, entry_desc, rows_ptr, base_ptr, starts_ptr, context_ptr,
    slots_ptr, h_ptr, h_slot, rest_ptr, rest_slot, ties_ptr, ties_slot,
    HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, CHUNK: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Boundary states over the whole chunks of one sequence and value head, for some columns.

    Stores for every chunk the snapshot of the state at its start [V, K] and u [V, CHUNK].
    """
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
    chunks = gl.load(base_ptr + sequence + 1) - base
    slot = gl.load(slots_ptr + sequence).to(gl.int64)
    start = gl.load(starts_ptr + sequence)
    end = gl.load(starts_ptr + sequence + 1)
    context = gl.load(context_ptr + sequence)
    origin = start - context % CHUNK
    first = gl.where(context % CHUNK > 0, 1, 0)
    until = gl.where(chunks > 0, (end - origin) // CHUNK, 0)
    key = head // (HV // HK) * K
    value = head * V + left

    k_room = gl.allocate_shared_memory(k_desc.dtype, [STAGES, CHUNK, K], k_desc.layout)
    v_room = gl.allocate_shared_memory(v_desc.dtype, [STAGES, CHUNK, COLUMNS], v_desc.layout)
    t_room = gl.allocate_shared_memory(t_desc.dtype, [STAGES, CHUNK, CHUNK], t_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        n = first + stage
        request(
            k_desc, v_desc, t_desc, k_room, v_room, t_room, ready, stage,
            origin + n * CHUNK, key, value, ((base + n) * HV + head) * CHUNK, n < until,
        )  # fmt: skip

    # To and from memory by whole pieces: addresses of the product's layout would take registers
    # from the loop.
    by_row: gl.constexpr = in_memory(COLUMNS, 4)
    columns = left + gl.arange(0, COLUMNS, gl.SliceLayout(1, by_row))
    d = gl.arange(0, K, gl.SliceLayout(0, by_row))
    element = head * (K * V) + d[None, :] * V + columns[:, None]
    some = (columns >= 0)[:, None] & (d >= 0)[None, :]
    # Only where a whole chunk follows: else nothing is read of it, nothing moves.
    some = some & (until > first)
    known = some & (context // CHUNK + first > 0)
    h = gl.load(h_ptr + slot * h_slot + element, mask=known, other=0.0)
    if SPLIT:
        word = head * (K * V // 32) + d[None, :] * (V // 32) + (columns // 32)[:, None]
        low = gl.load(rest_ptr + slot * rest_slot + element, mask=known, other=0)
        ties = gl.load(ties_ptr + slot * ties_slot + word, mask=known, other=0)
        h = joined(h, low, (ties >> (columns % 32)[:, None]) & 1)
    h = gl.convert_layout(h, over_k)
    # Behind the exchange, which so takes their room.
    entry_room = gl.allocate_shared_memory(entry_desc.dtype, [2, COLUMNS, K], entry_desc.layout)
    u_room = gl.allocate_shared_memory(u_desc.dtype, [2, COLUMNS, CHUNK], u_desc.layout)

    i = gl.arange(0, CHUNK, gl.SliceLayout(0, over_rows))
    zero = gl.zeros([COLUMNS, CHUNK], gl.float32, over_rows)
    # Scalars of a chunk are loaded one chunk ahead.
    rows_at = rows_ptr + ((base + gl.minimum(first, until)) * HV + head).to(gl.int64) * (4 * CHUNK)
    reach = gl.load(rows_at + CHUNK + i)
    rest = gl.load(rows_at + 2 * CHUNK + i)
    beta = gl.load(rows_at + 3 * CHUNK + i)
    fade = gl.load(rows_at + 2 * CHUNK - 1)
    stage = 0
    phase = 0
    flip = 0
    for n in range(first, until):
        at = (base + n) * HV + head
        mbarrier.wait(ready.index(stage), phase)
        k = k_room.index(stage)
        t = t_room.index(stage)
        snapshot = packed(h)
        operand = gl.convert_layout(snapshot, for_rows, assert_trivial=True)
        seen = warpgroup_mma(operand, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        entry_room.index(flip).store(snapshot)
        fence_async_shared()
        tma.async_copy_shared_to_global(entry_desc, [at * V + left, 0], entry_room.index(flip))
        # Every warp has passed a barrier since the chunk before left its stage.
        ahead = n - 1 + STAGES
        request(
            k_desc, v_desc, t_desc, k_room, v_room, t_room, ready,
            gl.where(stage == 0, STAGES - 1, stage - 1),
            origin + ahead * CHUNK, key, value, ((base + ahead) * HV + head) * CHUNK,
            (n > first) & (ahead < until),
        )  # fmt: skip
        vt = v_room.index(stage).permute((1, 0)).load(over_rows).to(gl.float32)
        next_at = (base + gl.minimum(n + 1, until - 1)) * HV + head
        rows_at = rows_ptr + next_at.to(gl.int64) * (4 * CHUNK)
        next_reach = gl.load(rows_at + CHUNK + i)
        next_rest = gl.load(rows_at + 2 * CHUNK + i)
        next_beta = gl.load(rows_at + 3 * CHUNK + i)
        next_fade = gl.load(rows_at + 2 * CHUNK - 1)
        seen = warpgroup_mma_wait(0, deps=[seen])
        r = packed(beta[None, :] * (vt - reach[None, :] * seen))
        operand = gl.convert_layout(r, for_rows, assert_trivial=True)
        u = warpgroup_mma(operand, t.permute((1, 0)), zero, use_acc=False, is_async=True)
        h = h * fade
        u = warpgroup_mma_wait(0, deps=[u])
        u, wide = packed_and_back(u)
        weighted = packed(wide * rest[None, :])
        u_room.index(flip).store(u)
        operand = gl.convert_layout(weighted, for_k, assert_trivial=True)
        h = warpgroup_mma(operand, k, h, is_async=True)
        fence_async_shared()
        tma.async_copy_shared_to_global(u_desc, [at * V + left, 0], u_room.index(flip))
        tma.store_wait(2)  # the next chunk's two are free again
        h = warpgroup_mma_wait(0, deps=[h])
        reach, rest, beta, fade = next_reach, next_rest, next_beta, next_fade
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        phase = gl.where(stage == 0, 1 - phase, phase)
        flip = 1 - flip
    tma.store_wait(0)
    h = gl.convert_layout(h, by_row)
    if SPLIT:
        high = packed(h)
        low = h.to(gl.int32, bitcast=True) - (high.to(gl.int16, bitcast=True).to(gl.int32) << 16)
        ties = gl.where(low == 32768, 1, 0) << (columns % 32)[:, None]
        ties = gl.sum(ties.reshape([COLUMNS // 32, 32, K]), 1)
        lanes: gl.constexpr = [COLUMNS // 32, 1024 // COLUMNS]
        packs: gl.constexpr = gl.BlockedLayout([1, 1], lanes, [1, 4], [0, 1])
        ties = gl.convert_layout(ties, packs)
        column = left // 32 + gl.arange(0, COLUMNS // 32, gl.SliceLayout(1, packs))
        d = gl.arange(0, K, gl.SliceLayout(0, packs))
        word = head * (K * V // 32) + d[None, :] * (V // 32) + column[:, None]
        gl.store(ties_ptr + slot * ties_slot + word, ties, mask=(word >= 0) & (until > first))
        gl.store(rest_ptr + slot * rest_slot + element, low.to(gl.int16), mask=some)
        gl.store(h_ptr + slot * h_slot + element, high, mask=some)
    else:
        gl.store(h_ptr + slot * h_slot + element, h, mask=some)


def whole(
    k: torch.Tensor,
    v: torch.Tensor,
    t: torch.Tensor,
    u: torch.Tensor,
    entry: torch.Tensor,
    rows: torch.Tensor,
    planes: Sequence[torch.Tensor],
    tables: tuple[torch.Tensor, ...],
    shape: dict[str, int],
    tile: Tile,
) -> None:
    """`triton_scan.whole` from matrices; `shape` has the kernel's constants."""
    chunk, columns = shape["CHUNK"], tile.columns
    _whole[(shape["V"] // columns, shape["HV"], len(tables[0]) - 1)](
        blocks(k, chunk, shape["K"]), blocks(v, chunk, columns), blocks(t, chunk, chunk),
        blocks(u, columns, chunk), blocks(entry, columns, shape["K"]),
        rows, *tables, *strided(planes),
        **shape, COLUMNS=columns, STAGES=tile.stages, SPLIT=split(planes),
        num_warps=4, launch_pdl=True, **gpu.POLICY,
    )  # fmt: skip
