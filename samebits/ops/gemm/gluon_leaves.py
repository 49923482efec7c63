"""Row-parallel products with many rows: leaves of the plan folded beside a running product.

One warp asks for operands by bulk copies, two warpgroups multiply, each a tile of its own 64 rows.
Neither waits for the other, so the products of one run while the other folds a leaf. Bits are those
of `kernels_sm90`: one chain of MMA for each leaf, folded by the plan's tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from samebits.errors import Refused
from samebits.ops import gpu
from samebits.plan import ReductionPlan

if TYPE_CHECKING:
    from samebits.ops.gemm.triton import Tile

HALF = gl.constexpr(64)  # rows of a warpgroup
WIDE = gl.constexpr(128)  # columns of a tile


@gluon.jit
def _place(tile, M, N, GROUP: gl.constexpr):
    """First row and column of a tile; GROUP tiles of rows share the weights they read."""
    down = (M + 2 * HALF - 1) // (2 * HALF)
    across = (N + WIDE - 1) // WIDE
    group = tile // (GROUP * across)
    height = gl.minimum(down - group * GROUP, GROUP)
    within = tile - group * (GROUP * across)
    return (group * GROUP + within % height) * (2 * HALF), (within // height) * WIDE


@gluon.jit
def _tiles(M, N):
    """How many tiles there are."""
    return ((M + 2 * HALF - 1) // (2 * HALF)) * ((N + WIDE - 1) // WIDE)


@gluon.jit
def _after(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and its phase."""
    following = gl.where(stage == STAGES - 1, 0, stage + 1)
    return following, gl.where(following == 0, 1 - phase, phase)


@gluon.jit
def _fetch(x_desc, w_desc, x_room, w_room, ready, empty, stage, phase, row, col, k):
    """Ask for one step of both operands, once its stage is free."""
    mbarrier.wait(empty.index(stage), 1 - phase)
    at = ready.index(stage)
    mbarrier.expect(at, 2 * x_desc.block_type.nbytes + w_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [row, k], at, x_room.index(2 * stage))
    tma.async_copy_global_to_shared(x_desc, [row + HALF, k], at, x_room.index(2 * stage + 1))
    tma.async_copy_global_to_shared(w_desc, [col, k], at, w_room.index(stage))


@gluon.jit
def _chain(
    x_room, w_room, ready, empty, stage, phase,
    MINE: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """One leaf of this warpgroup's rows: fp32 [HALF, WIDE]; and the stage to go on with."""
    acc = gl.zeros([HALF, WIDE], gl.float32, layout)
    for k in range(STEPS):
        mbarrier.wait(ready.index(stage), phase)
        acc = warpgroup_mma(
            x_room.index(2 * stage + MINE), w_room.index(stage).permute((1, 0)), acc,
            use_acc=k > 0, is_async=True,
        )  # fmt: skip
        acc = warpgroup_mma_wait(1, deps=[acc])
        gl.thread_barrier()  # all warps have read the stage before
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        mbarrier.arrive(empty.index(before), pred=k > 0)
        stage, phase = _after(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    gl.thread_barrier()
    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
    return acc, stage, phase


@gluon.jit
def _store(y_desc, row, col, acc, room):
    """Round and store through shared memory; a store before this one is over first."""
    tma.store_wait(0)
    gl.thread_barrier()
    room.store(acc.to(y_desc.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(y_desc, [row, col], room)


@gluon.jit
def _settle(
    acc, part_ptr, y_desc, row, col, room,
    LEAF: gl.constexpr, LEAVES: gl.constexpr, SIZE: gl.constexpr,
):  # fmt: skip
    """Fold acc [HALF, WIDE], subtree LEAF of LEAVES, into those kept; keep or store what results.

    Each thread reads what it wrote itself: no barrier, and the order of memory is one thread's.
    """
    layout: gl.constexpr = acc.type.layout
    i = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    j = gl.arange(0, WIDE, gl.SliceLayout(0, layout))
    at = part_ptr + i[:, None] * WIDE + j[None, :]
    if LEAF % 2 == 1:
        acc = gl.load(at, cache_modifier=".cg") + acc
    if LEAF % 4 == 3:
        acc = gl.load(at + SIZE, cache_modifier=".cg") + acc
    if LEAF % 8 == 7:
        acc = gl.load(at + 2 * SIZE, cache_modifier=".cg") + acc
    if LEAF == LEAVES - 1:
        _store(y_desc, row, col, acc, room)
    else:
        LEVEL: gl.constexpr = 0 if LEAF % 2 == 0 else (1 if LEAF % 4 == 1 else 2)
        gl.store(at + LEVEL * SIZE, acc, cache_modifier=".cg")


@gluon.jit
def _multiply(
    y_desc, x_room, w_room, y_room, ready, empty, part_ptr, M, N,
    MINE: gl.constexpr, STEPS: gl.constexpr, LEAVES: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """One of the two warpgroups: rows MINE * HALF.. of every tile of this block."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    SIZE: gl.constexpr = HALF * WIDE
    mine_ptr = part_ptr + (gl.program_id(0) * 2 + MINE) * (3 * SIZE)
    room = y_room.index(MINE)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), _tiles(M, N), gl.num_programs(0)):
        row, col = _place(tile, M, N, GROUP)
        row += MINE * HALF
        for pair in gl.static_range(LEAVES // 2):
            left, stage, phase = _chain(
                x_room, w_room, ready, empty, stage, phase, MINE, STEPS, STAGES, layout
            )
            right, stage, phase = _chain(
                x_room, w_room, ready, empty, stage, phase, MINE, STEPS, STAGES, layout
            )
            both = left + right
            _settle(both, mine_ptr, y_desc, row, col, room, pair, LEAVES // 2, SIZE)
    tma.store_wait(0)


@gluon.jit
def _ask(
    x_desc, w_desc, x_room, w_room, ready, empty, M, N,
    K: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The warp that asks for operands, up to STAGES steps ahead."""
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), _tiles(M, N), gl.num_programs(0)):
        row, col = _place(tile, M, N, GROUP)
        for k in range(0, K, BK):
            _fetch(x_desc, w_desc, x_room, w_room, ready, empty, stage, phase, row, col, k)
            stage, phase = _after(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["M", "N"])
def _leaves(
    x_desc, w_desc, y_desc, part_ptr, M, N,
    K: gl.constexpr, LEAVES: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """y [M, N] of x [M, K] and w [N, K]; part_ptr: fp32 [blocks, 2, 3, HALF, WIDE]."""
    x_room = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, HALF, BK], x_desc.layout)
    w_room = gl.allocate_shared_memory(w_desc.dtype, [STAGES, WIDE, BK], w_desc.layout)
    y_room = gl.allocate_shared_memory(y_desc.dtype, [2, HALF, WIDE], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    STEPS: gl.constexpr = K // LEAVES // BK
    gl.warp_specialize(
        [
            (_multiply, (y_desc, x_room, w_room, y_room, ready, empty, part_ptr, M, N,
                         0, STEPS, LEAVES, STAGES, GROUP)),
            (_multiply, (y_desc, x_room, w_room, y_room, ready, empty, part_ptr, M, N,
                         1, STEPS, LEAVES, STAGES, GROUP)),
            (_ask, (x_desc, w_desc, x_room, w_room, ready, empty, M, N,
                    K, BK, STAGES, GROUP)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def _blocks(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A contiguous matrix to be copied by blocks of rows x columns."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return TensorDescriptor.from_tensor(x, [rows, columns], layout)


def launch(tile: Tile, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, leaves: int) -> None:
    """As `triton.launch`, for tiles of 128 x 128, y bf16, 2, 4 or 8 leaves of whole steps; else
    SB0453."""
    processors = gpu.prepare(x.device.index or 0)
    (m, k), n = x.shape, y.shape[1]
    length, size = ReductionPlan(leaves).cuts(k)[0][1], (2 * HALF.value, WIDE.value)
    even = length % tile.bk == 0 and leaves in (2, 4, 8)
    if not even or y.dtype != torch.bfloat16 or (tile.bm, tile.bn) != size:
        raise Refused(
            "SB0453",
            seen=f"K = {k}, {leaves} leaves, output {y.dtype}, {tile}",
            required=f"2, 4 or 8 leaves of whole steps of {tile.bk}, bfloat16, a tile of {size}",
            hint="samebits explain SB0453",
        )
    part = y.new_empty(processors * 6 * HALF.value * WIDE.value, dtype=torch.float32)
    count = -(-m // tile.bm) * -(-n // tile.bn)
    _leaves[(min(processors, count),)](
        _blocks(x, HALF.value, tile.bk), _blocks(w, tile.bn, tile.bk),
        _blocks(y, HALF.value, tile.bn), part, m, n, K=k, LEAVES=leaves, BK=tile.bk,
        STAGES=tile.stages, GROUP=tile.group, num_warps=4, maxnreg=168, **gpu.POLICY,
    )  # fmt: skip
