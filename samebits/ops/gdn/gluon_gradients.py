"""Gradients of the operands at the rows of whole chunks: `triton_backward._gradients` for 64
columns of V at a time, which arrive by bulk copies while those before them are worked on.

Two warpgroups share the columns of dq and dk. What belongs to pairs of rows, of scores and of L,
is stacked: one warpgroup has the gradient of the one, the other that of the other.
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
from samebits.ops.gdn.gluon_scan import blocks, packed

COLUMNS = 64
WARPS = 8


@gluon.jit
def _request(
    do_desc, v_desc, dr_desc, u_desc, entry_desc, dexit_desc,
    pairs, v_room, u_room, entry_room, dexit_room, ready, stage,
    token, at, head, left, V: gl.constexpr, CHUNK: gl.constexpr, live,
):  # fmt: skip
    """Ask for some columns of the operands of a chunk and value head, into one stage."""
    bar = ready.index(stage)
    size: gl.constexpr = (
        do_desc.block_type.nbytes
        + v_desc.block_type.nbytes
        + dr_desc.block_type.nbytes
        + u_desc.block_type.nbytes
        + entry_desc.block_type.nbytes
        + dexit_desc.block_type.nbytes
    )
    value = head * V + left
    row = at * V + left
    pair = pairs.index(stage)
    mbarrier.expect(bar, size, pred=live)
    tma.async_copy_global_to_shared(
        do_desc, [token, value], bar, pair.slice(0, CHUNK, dim=0), pred=live
    )
    tma.async_copy_global_to_shared(
        dr_desc, [at * CHUNK, left], bar, pair.slice(CHUNK, CHUNK, dim=0), pred=live
    )
    tma.async_copy_global_to_shared(u_desc, [row, 0], bar, u_room.index(stage), pred=live)
    tma.async_copy_global_to_shared(entry_desc, [row, 0], bar, entry_room.index(stage), pred=live)
    tma.async_copy_global_to_shared(dexit_desc, [row, 0], bar, dexit_room.index(stage), pred=live)
    tma.async_copy_global_to_shared(v_desc, [token, value], bar, v_room.index(stage), pred=live)


@gluon.jit
def _gradients(
    q_desc, k_desc, do_desc, v_desc, dr_desc, u_desc, entry_desc, dexit_desc, dq_desc, dk_desc,
    rows_ptr, dv_ptr, dg_ptr, dbeta_ptr, scale, places_ptr,
    HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, CHUNK: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Gradients of the operands at the rows of one chunk and key head, if the chunk is whole."""
    gdc_launch_dependents()
    gdc_wait()
    over_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, K // 2, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, over_k, 2)
    stacked: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, CHUNK, 16])
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    by_state: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [8, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, over_k)
    PARTS: gl.constexpr = V // COLUMNS
    MEMBERS: gl.constexpr = HV // HK

    chunk = gl.program_id(0)
    key_head = gl.program_id(1)
    sequence = gl.load(places_ptr + 4 * chunk)
    token = gl.load(places_ptr + 4 * chunk + 1)
    low = gl.load(places_ptr + 4 * chunk + 2)
    high = gl.load(places_ptr + 4 * chunk + 3)
    if (sequence >= 0) & (high - low == CHUNK):
        q = gl.allocate_shared_memory(q_desc.dtype, [CHUNK, K], q_desc.layout)
        k = gl.allocate_shared_memory(k_desc.dtype, [CHUNK, K], k_desc.layout)
        pairs = gl.allocate_shared_memory(do_desc.dtype, [2, 2 * CHUNK, COLUMNS], do_desc.layout)
        v_room = gl.allocate_shared_memory(v_desc.dtype, [2, CHUNK, COLUMNS], v_desc.layout)
        u_room = gl.allocate_shared_memory(u_desc.dtype, [2, COLUMNS, CHUNK], u_desc.layout)
        entry_room = gl.allocate_shared_memory(entry_desc.dtype, [2, COLUMNS, K], entry_desc.layout)
        dexit_room = gl.allocate_shared_memory(dexit_desc.dtype, [2, COLUMNS, K], dexit_desc.layout)
        inner = gl.allocate_shared_memory(do_desc.dtype, [2 * CHUNK, CHUNK], do_desc.layout)
        outer = gl.allocate_shared_memory(do_desc.dtype, [2 * CHUNK, CHUNK], do_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
        for n in gl.static_range(3):
            mbarrier.init(ready.index(n), count=1)
        fence_async_shared()
        for n in gl.static_range(2):
            head = key_head * MEMBERS + n // PARTS
            _request(
                do_desc, v_desc, dr_desc, u_desc, entry_desc, dexit_desc,
                pairs, v_room, u_room, entry_room, dexit_room, ready, n,
                token, chunk * HV + head, head, n % PARTS * COLUMNS, V, CHUNK,
                n < MEMBERS * PARTS,
            )  # fmt: skip
        mbarrier.expect(ready.index(2), q_desc.block_type.nbytes + k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [token, key_head * K], ready.index(2), q)
        tma.async_copy_global_to_shared(k_desc, [token, key_head * K], ready.index(2), k)

        i = gl.arange(0, CHUNK, rows)
        of_operand = gl.arange(0, CHUNK, gl.SliceLayout(1, operand))
        down = gl.arange(0, 2 * CHUNK, gl.SliceLayout(1, stacked))
        across = gl.arange(0, CHUNK, gl.SliceLayout(0, stacked))
        line = gl.arange(0, CHUNK, gl.SliceLayout(1, by_row))
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, by_row))
        of_scores = down < CHUNK
        row = down % CHUNK
        dq = gl.zeros([CHUNK, K], gl.float32, over_k)
        dk = gl.zeros([CHUNK, K], gl.float32, over_k)
        by_query = gl.zeros([CHUNK], gl.float32, rows)
        by_key = gl.zeros([CHUNK], gl.float32, rows)
        step = 0
        for member in range(MEMBERS):
            head = key_head * MEMBERS + member
            at = chunk * HV + head
            rows_at = rows_ptr + at.to(gl.int64) * (4 * CHUNK)
            reach = gl.load(rows_at + CHUNK + of_operand)[:, None]
            rest = gl.load(rows_at + 2 * CHUNK + of_operand)[:, None]
            beta = gl.load(rows_at + 3 * CHUNK + i)
            beta_line = gl.load(rows_at + 3 * CHUNK + line)
            fade = gl.load(rows_at + 2 * CHUNK - 1)
            takes = gl.zeros([CHUNK, K], gl.float32, over_k)
            squares = gl.zeros([2 * CHUNK, CHUNK], gl.float32, stacked)
            dbeta = gl.zeros([CHUNK], gl.float32, gl.SliceLayout(1, by_row))
            faded = gl.zeros([COLUMNS], gl.float32, gl.SliceLayout(1, by_state))
            for part in gl.static_range(PARTS):
                stage = step % 2
                mbarrier.wait(ready.index(stage), step // 2 % 2)
                pair = pairs.index(stage)
                do_room = pair.slice(0, CHUNK, dim=0)
                dr_room = pair.slice(CHUNK, CHUNK, dim=0)
                entry = entry_room.index(stage)
                u = u_room.index(stage)
                squares = warpgroup_mma(pair, u, squares, is_async=True)
                scaled = do_room.load(operand).to(gl.float32) * (scale * reach)
                scaled = packed(scaled)
                dq = warpgroup_mma(scaled, entry, dq, is_async=True)
                minus = packed(dr_room.load(operand).to(gl.float32) * -reach)
                takes = warpgroup_mma(minus, entry, takes, is_async=True)
                weighted = u.permute((1, 0)).load(operand).to(gl.float32) * rest
                weighted = packed(weighted)
                dk = warpgroup_mma(weighted, dexit_room.index(stage), dk, is_async=True)
                wide = dr_room.load(by_row).to(gl.float32)
                dbeta += gl.sum(wide * v_room.index(stage).load(by_row).to(gl.float32), 1)
                dv_at = dv_ptr + ((token + line).to(gl.int64) * HV + head)[:, None] * V
                dv_at = dv_at + part * COLUMNS + column[None, :]
                gl.store(dv_at, packed(beta_line[:, None] * wide))
                squares, dq, takes, dk = warpgroup_mma_wait(0, deps=[squares, dq, takes, dk])
                # Here the products' left operands have given back their registers.
                state = entry.load(by_state).to(gl.float32)
                faded += gl.sum(state * dexit_room.index(stage).load(by_state).to(gl.float32), 1)
                gl.thread_barrier()  # nobody reads this stage any more
                ahead = step + 2
                next_head = key_head * MEMBERS + ahead // PARTS
                _request(
                    do_desc, v_desc, dr_desc, u_desc, entry_desc, dexit_desc,
                    pairs, v_room, u_room, entry_room, dexit_room, ready, stage,
                    token, chunk * HV + next_head, next_head, ahead % PARTS * COLUMNS, V, CHUNK,
                    ahead < MEMBERS * PARTS,
                )  # fmt: skip
                step += 1

            if member == 0:
                mbarrier.wait(ready.index(2), 0)
            written = gl.sum(k.load(over_k).to(gl.float32) * dk, 1)
            gamma_down = gl.load(rows_at + row)[:, None]
            gamma_across = gl.load(rows_at + across)[None, :]
            decay = gl.exp2(gamma_down - gamma_across)
            reached = (row[:, None] > across[None, :]) | (
                of_scores[:, None] & (row[:, None] == across[None, :])
            )
            factor = gl.where(of_scores, scale, -1.0)[:, None]
            squares = gl.where(reached, squares * factor * decay, 0.0)
            beta_down = gl.where(of_scores, 1.0, gl.load(rows_at + 3 * CHUNK + row))
            inner.store(packed(squares))
            outer.store(packed(squares * beta_down[:, None]))
            fence_async_shared()
            gl.thread_barrier()
            dq = warpgroup_mma(inner.slice(0, CHUNK, dim=0), k, dq, is_async=True)
            takes = warpgroup_mma(inner.slice(CHUNK, CHUNK, dim=0), k, takes, is_async=True)
            scores = outer.slice(0, CHUNK, dim=0).permute((1, 0))
            lower = outer.slice(CHUNK, CHUNK, dim=0).permute((1, 0))
            dk = warpgroup_mma(scores, q, dk, is_async=True)
            dk = warpgroup_mma(lower, k, dk, is_async=True)
            dq, takes, dk = warpgroup_mma_wait(0, deps=[dq, takes, dk])

            keys = k.load(over_k).to(gl.float32)
            taken = gl.sum(keys * takes, 1)
            given = gl.sum(keys * dk, 1)
            asked = gl.sum(q.load(over_k).to(gl.float32) * dq, 1)
            dgamma = asked - by_query + beta * taken - (given - by_key)
            end = gl.sum(written - by_key, 0) + fade * gl.sum(faded, 0)
            dgamma += gl.where(i == CHUNK - 1, end, 0.0)
            # gamma_i holds g of all rows up to i.
            later = gl.convert_layout(dgamma, gl.SliceLayout(1, by_row))
            upto = gl.arange(0, CHUNK, gl.SliceLayout(0, by_row))
            dg = gl.sum(gl.where(line[:, None] >= upto[None, :], later[:, None], 0.0), 0)
            gl.store(dg_ptr + (token + upto).to(gl.int64) * HV + head, dg)
            dbeta += gl.convert_layout(taken, gl.SliceLayout(1, by_row))
            gl.store(dbeta_ptr + (token + line).to(gl.int64) * HV + head, dbeta)
            dk += beta[:, None] * takes
            by_query = asked
            by_key = given + beta * taken
        gl.thread_barrier()
        q.store(packed(dq))
        k.store(packed(dk))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(dq_desc, [token, key_head * K], q)
        tma.async_copy_shared_to_global(dk_desc, [token, key_head * K], k)
        tma.store_wait(0)


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    u: torch.Tensor,
    entry: torch.Tensor,
    dr: torch.Tensor,
    dexit: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    others: tuple[torch.Tensor | float, ...],
    shape: dict[str, int],
    chunks: int,
) -> None:
    """Launch it; operands and work as `triton_backward` has them, `others` and `shape` are the
    kernel's next arguments and constants."""
    chunk, key_size = shape["CHUNK"], shape["K"]
    q, k, v, grad, dq, dk = (x.flatten(1) for x in (q, k, v, grad, dq, dk))
    u, entry, dr, dexit = (x.flatten(0, 2) for x in (u, entry, dr, dexit))
    by_token = [blocks(x, chunk, key_size) for x in (q, k)]
    by_value = [blocks(x, chunk, COLUMNS) for x in (grad, v, dr)]
    by_state = [blocks(x, COLUMNS, key_size) for x in (entry, dexit)]
    _gradients[(chunks, shape["HK"])](
        *by_token, *by_value, blocks(u, COLUMNS, chunk), *by_state,
        *(blocks(x, chunk, key_size) for x in (dq, dk)), *others,
        **shape, COLUMNS=COLUMNS, num_warps=WARPS, launch_pdl=True, **gpu.POLICY,
    )  # fmt: skip
