"""Closing of chunks in decoding, written for the bandwidth of memory.

Each program takes pieces of work in turn: some columns of the state of one value head. Bulk copies
bring the planes, u and the keys of the next pieces while one is computed, and take the new planes
away from where the old ones were. Bits are those of `triton_decode._close`.
"""

# Values of words are tuples that grow: Gluon adds tuples, and knows no starred ones.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

from collections.abc import Sequence

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
from triton.language.extra.cuda import gdc_wait

from samebits.errors import Refused
from samebits.ops import device, gpu
from samebits.ops.gdn.gluon_scan import packed
from samebits.ops.gdn.tiles_sm90 import Tile
from samebits.ops.gdn.triton_parts import strided

exp2_32 = gluon.jit(device.exp2_32.fn)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def closing(context_ptr, slots_ptr, s, rows, CHUNK: gl.constexpr):
    """1 where row s is the last of its chunk, and its slot * 2 + whether that holds a state."""
    slots = gl.load(slots_ptr + s, mask=s < rows, other=-1)
    context = gl.load(context_ptr + s, mask=s < rows, other=0)
    last = ((context % CHUNK == CHUNK - 1) & (slots >= 0)).to(gl.int32)
    return last, slots * 2 + (context >= CHUNK).to(gl.int32)


@gluon.jit
def place(work, ranks, entries, each: gl.constexpr, HV: gl.constexpr):
    """Slot, whether it has a state, and value head of one piece of work; 0 behind the last one."""
    entry = gl.sum(gl.where(ranks == work // each, entries, 0), 0)
    return entry >> 1, entry & 1, work % each // (each // HV)


@gluon.jit
def request(
    h_desc, rest_desc, u_desc, k_desc, h_room, rest_room, u_room, k_room, ready, stage,
    slot, head, left, live,
    HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Ask for what one piece of work reads, into one stage."""
    at = ready.index(stage)
    size: gl.constexpr = 2 * h_desc.block_type.nbytes
    mbarrier.expect(at, size + u_desc.block_type.nbytes + k_desc.block_type.nbytes, pred=live)
    key = head // (HV // HK) * K
    tma.async_copy_global_to_shared(
        u_desc, [slot, head * CHUNK, left], at, u_room.index(stage), pred=live
    )
    tma.async_copy_global_to_shared(k_desc, [slot, key, 0], at, k_room.index(stage), pred=live)
    tma.async_copy_global_to_shared(
        h_desc, [slot, head * K, left], at, h_room.index(stage), pred=live
    )
    tma.async_copy_global_to_shared(
        rest_desc, [slot, head * K, left], at, rest_room.index(stage), pred=live
    )


@gluon.jit
def words(
    ties_ptr, ties_slot, slot, head, left, layout: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Addresses of the ties of some columns: one [K] for each 32 of them."""
    d = gl.arange(0, K, layout)
    at = ties_ptr + slot.to(gl.int64) * ties_slot + head * (K * V // 32) + left // 32
    found = ()
    for word in gl.static_range(COLUMNS // 32):
        found = found + (at + d * (V // 32) + word,)
    return found


@gluon.jit
def loaded(pointers):
    """What is at each of a tuple of addresses."""
    found = ()
    for i in gl.static_range(len(pointers)):
        found = found + (gl.load(pointers[i]),)
    return found


@gluon.jit(do_not_specialize=["rows"])  # a captured batch must not need a kernel of its own
def _close(
    h_desc, rest_desc, u_desc, k_desc, ties_ptr, ties_slot, gamma_ptr, gamma_slot,
    context_ptr, slots_ptr, rows,
    HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, CHUNK: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    """Boundary states of the rows that are the last of their chunk, shared out among all programs.

    Work is numbered row by row, head by head, block by block of columns.
    """
    warps: gl.constexpr = gl.num_warps()
    state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, COLUMNS, 16])
    by_row: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // COLUMNS, COLUMNS // 8], [warps, 1], [1, 0]
    )
    # Every warp has the whole table: a look at it needs no exchange between warps.
    table: gl.constexpr = gl.SliceLayout(
        0, gl.BlockedLayout([1, TABLE // 32], [1, 32], [warps, 1], [1, 0])
    )
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    parts: gl.constexpr = V // COLUMNS
    each: gl.constexpr = HV * parts
    here = gl.program_id(0)
    step = gl.num_programs(0)

    h_room = gl.allocate_shared_memory(h_desc.dtype, [STAGES, 1, K, COLUMNS], h_desc.layout)
    rest_room = gl.allocate_shared_memory(
        rest_desc.dtype, [STAGES, 1, K, COLUMNS], rest_desc.layout
    )
    u_room = gl.allocate_shared_memory(u_desc.dtype, [STAGES, 1, CHUNK, COLUMNS], u_desc.layout)
    k_room = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, K, CHUNK], k_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()

    c = gl.arange(0, COLUMNS, gl.SliceLayout(0, state))
    j = gl.arange(0, CHUNK, gl.SliceLayout(1, by_row))
    done = 0
    turn = 0
    for from_ in range(0, rows, TABLE):
        s = from_ + gl.arange(0, TABLE, flat)
        last, _ = closing(context_ptr, slots_ptr, s, rows, CHUNK)
        before = (gl.associative_scan(last, 0, _plus) - last).to(gl.int16)
        s = from_ + gl.arange(0, TABLE, table)
        last, entries = closing(context_ptr, slots_ptr, s, rows, CHUNK)
        ranks = done + gl.convert_layout(before, table).to(gl.int32)
        ranks = gl.where(last > 0, ranks, -1)
        count = gl.sum(last, 0)
        end = (done + count) * each
        # The first piece of work of these rows that is this program's.
        first = (done * each + step - 1 - here) // step * step + here
        if from_ == 0:
            gdc_wait()
        for ahead in gl.static_range(STAGES):
            work = first + ahead * step
            slot, _, head = place(work, ranks, entries, each, HV)
            request(
                h_desc, rest_desc, u_desc, k_desc, h_room, rest_room, u_room, k_room, ready,
                (turn + ahead) % STAGES, slot, head, work % parts * COLUMNS, work < end,
                HK, HV, K, CHUNK,
            )  # fmt: skip
        slot, live, head = place(first, ranks, entries, each, HV)
        left = first % parts * COLUMNS
        ties_at = words(
            ties_ptr, ties_slot, slot, head, left, gl.SliceLayout(1, state), K, V, COLUMNS
        )
        ties = loaded(ties_at)
        gamma_at = gamma_ptr + slot.to(gl.int64) * gamma_slot + head * CHUNK
        gamma = gl.load(gamma_at + j)
        final = gl.load(gamma_at + CHUNK - 1)
        for work in range(first, end, step):
            stage = turn % STAGES
            next_work = work + step
            next_slot, next_live, next_head = place(next_work, ranks, entries, each, HV)
            next_left = next_work % parts * COLUMNS
            next_ties_at = words(
                ties_ptr, ties_slot, next_slot, next_head, next_left, gl.SliceLayout(1, state),
                K, V, COLUMNS,
            )  # fmt: skip
            next_ties = loaded(next_ties_at)
            gamma_at = gamma_ptr + next_slot.to(gl.int64) * gamma_slot + next_head * CHUNK
            next_gamma = gl.load(gamma_at + j)
            next_final = gl.load(gamma_at + CHUNK - 1)

            mbarrier.wait(ready.index(stage), turn // STAGES & 1)
            u = u_room.index(stage).reshape([CHUNK, COLUMNS])
            k = k_room.index(stage).reshape([K, CHUNK])
            planes = h_room.index(stage).reshape([K, COLUMNS])
            rests = rest_room.index(stage).reshape([K, COLUMNS])
            weighted = packed(u.load(by_row).to(gl.float32) * exp2_32(final - gamma)[:, None])
            u.store(weighted)
            h = planes.load(state).to(gl.int16, bitcast=True).to(gl.int32) << 16
            h = h + rests.load(state).to(gl.int32)
            tie = gl.zeros([K, COLUMNS], gl.int32, state)
            for word in gl.static_range(COLUMNS // 32):
                # First by what a thread's columns share.
                mine = ties[word][:, None] >> (c & 6)[None, :] >> (c & 25)[None, :]
                tie = gl.where((c // 32 == word)[None, :], mine, tie)
            h = (h + ((tie & 1) << 16)).to(gl.float32, bitcast=True)
            h = gl.where(live > 0, h, 0.0) * exp2_32(final)
            fence_async_shared()
            h = warpgroup_mma(k, u, h, is_async=True)
            h = warpgroup_mma_wait(0, deps=[h])

            # The stage that the piece before has left takes the one behind those under way.
            tma.store_wait(0)
            later = work + (STAGES - 1) * step
            slot_then, _, head_then = place(later, ranks, entries, each, HV)
            request(
                h_desc, rest_desc, u_desc, k_desc, h_room, rest_room, u_room, k_room, ready,
                (turn + STAGES - 1) % STAGES, slot_then, head_then, later % parts * COLUMNS,
                (work > first) & (later < end), HK, HV, K, CHUNK,
            )  # fmt: skip
            high = packed(h)
            rest = h.to(gl.int32, bitcast=True)
            rest = rest - (high.to(gl.int16, bitcast=True).to(gl.int32) << 16)
            planes.store(high)
            rests.store(rest.to(gl.int16))
            fence_async_shared()
            gl.thread_barrier()  # behind every warp's fence, which the one between stores is not
            tma.async_copy_shared_to_global(h_desc, [slot, head * K, left], h_room.index(stage))
            tma.async_copy_shared_to_global(
                rest_desc, [slot, head * K, left], rest_room.index(stage)
            )
            tie = gl.where(rest == 32768, 1, 0) << (c % 32)[None, :]
            for word in gl.static_range(COLUMNS // 32):
                mine = gl.sum(gl.where((c // 32 == word)[None, :], tie, 0), 1)
                gl.store(ties_at[word], mine)
            slot, live, head, left = next_slot, next_live, next_head, next_left
            ties, ties_at = next_ties, next_ties_at
            gamma, final = next_gamma, next_final
            turn += 1
        tma.store_wait(0)
        done += count


def pieces(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """State tensor x [slots, heads, n, columns of all] to be copied by blocks of rows x columns.

    Refuses with SB0482 where a slot does not begin at a multiple of 16 bytes.
    """
    stride = x.stride(0)
    if x.data_ptr() % 16 or stride * x.element_size() % 16:
        raise Refused(
            "SB0482",
            seen=f"a slot of {stride * x.element_size()} bytes from address {x.data_ptr()}",
            required="slots that begin at multiples of 16 bytes",
            hint="samebits explain SB0482",
        )
    kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.int16
    block = [1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    shape = [len(x), x.shape[1] * x.shape[2], x.shape[3]]
    return TensorDescriptor(x, shape, [stride, x.shape[3], 1], block, layout)


def serves(key_size: int, size: int) -> bool:
    """Not for heads narrower than a warpgroup's product, nor under the interpreter."""
    return min(key_size, size) >= 64 and not triton.knobs.runtime.interpret


def close(
    planes: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    shape: dict[str, int],
    tile: Tile,
    table: int,
    most: int,
) -> None:
    """Launch `_close` behind the launch that it waits for, with at most `most` programs.

    planes, kept    boundary, rest and ties; gamma, k and u, all of `state_spec`
    tables          context and slots [N] int32
    shape           the kernel's constants
    table           sequences that a program looks at together, a power of two from 128 on
    Refuses with SB0482.
    """
    high, rest, ties = planes
    gamma, keys, u = kept
    key_size, size, chunk = shape["K"], shape["V"], shape["CHUNK"]
    columns, rows = tile.fitted(size), len(tables[0])
    work = rows * shape["HV"] * (size // columns)
    _close[(min(work, most),)](
        pieces(high, key_size, columns), pieces(rest, key_size, columns),
        pieces(u, chunk, columns), pieces(keys, key_size, chunk),
        *strided([ties, gamma]), *tables, rows,
        **shape, COLUMNS=columns, STAGES=tile.stages, TABLE=table,
        num_warps=tile.warps, launch_pdl=True, **gpu.POLICY,
    )  # fmt: skip
