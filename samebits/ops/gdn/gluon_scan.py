"""The serial pass of `triton_scan.py` over whole chunks, written for the latency of its chain.

One warpgroup owns 64 columns. Its three products per chunk are asynchronous and take their left
operands from registers; operands on the right arrive by bulk copies some chunks ahead, and what is
stored leaves while products run. Bits are those of `triton_scan._whole`.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from samebits.ops import gpu
from samebits.ops.gdn.tiles_sm90 import Tile


@gluon.jit
def packed(x):
    """fp32 to bf16, ties to even, two by one instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def packed_and_back(x):
    """`packed`, and its fp32 value."""
    return gl.inline_asm_elementwise(
        "{cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000;}",
        "=r,=r,=r,r,r", [x], dtype=(gl.bfloat16, gl.float32), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def request(
    k_desc, v_desc, t_desc, k_room, v_room, t_room, ready, stage, token, key, value, square, live
):
    """Ask for the operands of one chunk, into one stage."""
    at = ready.index(stage)
    mbarrier.expect(
        at,
        k_desc.block_type.nbytes + v_desc.block_type.nbytes + t_desc.block_type.nbytes,
        pred=live,
    )
    tma.async_copy_global_to_shared(k_desc, [token, key], at, k_room.index(stage), pred=live)
    tma.async_copy_global_to_shared(v_desc, [token, value], at, v_room.index(stage), pred=live)
    tma.async_copy_global_to_shared(t_desc, [square, 0], at, t_room.index(stage), pred=live)


@gluon.jit
def _whole(
    k_desc, v_desc, t_desc, u_desc, entry_desc, rows_ptr, base_ptr, starts_ptr, context_ptr,
    slots_ptr, h_ptr, h_slot,
    HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, CHUNK: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr,
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
    entry_room = gl.allocate_shared_memory(entry_desc.dtype, [2, COLUMNS, K], entry_desc.layout)
    u_room = gl.allocate_shared_memory(u_desc.dtype, [2, COLUMNS, CHUNK], u_desc.layout)
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

    columns = left + gl.arange(0, COLUMNS, gl.SliceLayout(1, over_k))
    d = gl.arange(0, K, gl.SliceLayout(0, over_k))
    h_at = h_ptr + slot * h_slot + head * (K * V) + d[None, :] * V + columns[:, None]
    some = (columns >= 0)[:, None] & (d >= 0)[None, :]
    h = gl.load(h_at, mask=some & (context > 0), other=0.0)

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
    gl.store(h_at, h, mask=some & (chunks > 0))


def serves(k: torch.Tensor, size: int, raw: bool) -> bool:
    """Whether the kernel is for such keys and such columns of V; under the interpreter it is not,
    which knows neither warpgroups nor bulk copies."""
    return size >= 64 and k.shape[2] >= 64 and not raw and not triton.knobs.runtime.interpret


def blocks(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A contiguous bf16 matrix to be copied by blocks of rows x columns."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return TensorDescriptor.from_tensor(x, [rows, columns], layout)


def whole(
    k: torch.Tensor,
    v: torch.Tensor,
    t: torch.Tensor,
    u: torch.Tensor,
    entry: torch.Tensor,
    rows: torch.Tensor,
    h: torch.Tensor,
    tables: tuple[torch.Tensor, ...],
    shape: dict[str, int],
    tile: Tile,
) -> None:
    """`triton_scan.whole` from matrices; `shape` has the kernel's constants."""
    chunk, columns = shape["CHUNK"], tile.columns
    _whole[(shape["V"] // columns, shape["HV"], len(tables[0]) - 1)](
        blocks(k, chunk, shape["K"]), blocks(v, chunk, columns), blocks(t, chunk, chunk),
        blocks(u, columns, chunk), blocks(entry, columns, shape["K"]),
        rows, *tables, h, h.stride(0),
        **shape, COLUMNS=columns, STAGES=tile.stages, num_warps=4, launch_pdl=True, **gpu.POLICY,
    )  # fmt: skip
