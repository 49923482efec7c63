"""Outputs of chunk_row, every chunk by itself, with all its operands under way at once.

Bulk copies bring q, k, the snapshot of the state and u while decays are computed; products follow
as operands arrive. Bits are those of `triton_chunk._rows`.
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

from samebits.ops import device, gpu
from samebits.ops.gdn.gluon_scan import blocks, packed, packed_and_back
from samebits.ops.gdn.tiles_sm90 import Tile

exp2_32 = gluon.jit(device.exp2_32.fn)


@gluon.jit
def _rows(
    q_desc, k_desc, u_desc, entry_desc, rows_ptr, o_ptr, scale, places_ptr, slots_ptr,
    ok_ptr, ok_slot,
    HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, CHUNK: gl.constexpr,
    COLUMNS: gl.constexpr, OPEN: gl.constexpr,
):  # fmt: skip
    """Outputs of one chunk and value head, some columns."""
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    by_key: gl.constexpr = gl.BlockedLayout([8, 1], [CHUNK // 8, 256 // CHUNK], [1, 4], [0, 1])
    gdc_launch_dependents()
    gdc_wait()

    left = gl.program_id(0) * COLUMNS
    head = gl.program_id(1)
    chunk = gl.program_id(2)
    sequence = gl.load(places_ptr + 4 * chunk)
    first = gl.load(places_ptr + 4 * chunk + 1)
    low = gl.load(places_ptr + 4 * chunk + 2)
    high = gl.load(places_ptr + 4 * chunk + 3)
    i = gl.arange(0, CHUNK, gl.SliceLayout(1, wide))
    columns = left + gl.arange(0, COLUMNS, gl.SliceLayout(0, wide))
    inside = ((i >= low) & (i < high))[:, None] & (columns >= 0)[None, :]
    o_at = o_ptr + ((first + i).to(gl.int64) * HV + head)[:, None] * V + columns[None, :]
    if sequence >= 0:
        key_head = head // (HV // HK)
        at = chunk * HV + head
        q = gl.allocate_shared_memory(q_desc.dtype, [CHUNK, K], q_desc.layout)
        k = gl.allocate_shared_memory(k_desc.dtype, [CHUNK, K], k_desc.layout)
        u = gl.allocate_shared_memory(u_desc.dtype, [COLUMNS, CHUNK], u_desc.layout)
        entry = gl.allocate_shared_memory(entry_desc.dtype, [COLUMNS, K], entry_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(ready.index(0), count=1)
        mbarrier.init(ready.index(1), count=1)
        fence_async_shared()
        mbarrier.expect(ready.index(0), q_desc.block_type.nbytes + k_desc.block_type.nbytes)
        mbarrier.expect(ready.index(1), u_desc.block_type.nbytes + entry_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [first, key_head * K], ready.index(0), q)
        tma.async_copy_global_to_shared(k_desc, [first, key_head * K], ready.index(0), k)
        tma.async_copy_global_to_shared(entry_desc, [at * V + left, 0], ready.index(1), entry)
        tma.async_copy_global_to_shared(u_desc, [at * V + left, 0], ready.index(1), u)
        gl.thread_barrier()  # else the last copy is issued behind the exponentials

        rows_at = rows_ptr + at.to(gl.int64) * (4 * CHUNK)
        down = gl.arange(0, CHUNK, gl.SliceLayout(1, square))
        across = gl.arange(0, CHUNK, gl.SliceLayout(0, square))
        gamma_down = gl.load(rows_at + down)[:, None]
        gamma_across = gl.load(rows_at + across)[None, :]
        reach = gl.load(rows_at + CHUNK + i)[:, None]
        reached = down[:, None] >= across[None, :]
        decay = exp2_32(gamma_down - gamma_across)
        nothing = gl.zeros([CHUNK, CHUNK], gl.float32, square)
        no_rows = gl.zeros([CHUNK, COLUMNS], gl.float32, wide)
        mbarrier.wait(ready.index(0), 0)
        if OPEN and low > 0:
            slot = gl.load(slots_ptr + sequence).to(gl.int64)
            j = gl.arange(0, CHUNK, gl.SliceLayout(1, by_key))[:, None]
            d = gl.arange(0, K, gl.SliceLayout(0, by_key))[None, :]
            kept_at = ok_ptr + slot * ok_slot + key_head * (K * CHUNK) + d * CHUNK + j
            older = (j < low) & (d >= 0)
            kept = gl.load(kept_at, mask=older, other=0.0)
            k.store(gl.where(older, kept, k.load(by_key)))
            fence_async_shared()
            gl.thread_barrier()
        raw = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(ready.index(1), 0)
        o = warpgroup_mma(q, entry.permute((1, 0)), no_rows, use_acc=False, is_async=True)
        raw = warpgroup_mma_wait(1, deps=[raw])
        # A row behind the chunk's end may hold anything, also what is no number.
        exact = gl.where(reached, raw * decay, 0.0)
        scores, rounded = packed_and_back(exact)
        rest = gl.convert_layout(packed(exact - rounded), operand, assert_trivial=True)
        scores = gl.convert_layout(scores, operand, assert_trivial=True)
        o = reach * warpgroup_mma_wait(0, deps=[o])
        o = warpgroup_mma(rest, u.permute((1, 0)), o, is_async=True)
        o = warpgroup_mma(scores, u.permute((1, 0)), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        gl.store(o_at, scale * o, mask=inside)
    else:
        gl.store(o_at, gl.zeros([CHUNK, COLUMNS], gl.float32, wide), mask=inside)


def rows(
    q: torch.Tensor,
    k: torch.Tensor,
    u: torch.Tensor,
    entry: torch.Tensor,
    rest: tuple[torch.Tensor | float | int, ...],
    shape: dict[str, int],
    chunks: int,
    tile: Tile,
) -> None:
    """Launch `_rows` for matrices q, k [T, HK K], u [chunks HV V, CHUNK], entry [chunks HV V, K];
    `rest` are the other operands and `shape` the constants of the kernel."""
    columns, chunk, key_size = tile.fitted(shape["V"]), shape["CHUNK"], shape["K"]
    _rows[(shape["V"] // columns, shape["HV"], chunks)](
        blocks(q, chunk, key_size), blocks(k, chunk, key_size), blocks(u, columns, chunk),
        blocks(entry, columns, key_size), *rest,
        **shape, COLUMNS=columns, num_warps=4, launch_pdl=True, **gpu.POLICY,
    )  # fmt: skip
