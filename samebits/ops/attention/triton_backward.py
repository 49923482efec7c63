"""Gradients of packed causal attention on Hopper, from the forward's output and log-sum-exp.

Three launches, all sums in fp32 and in a fixed order, no atomics, so equal inputs give equal bits;
no bit promise beyond. With L2 = log2 of the sum of a row's exponentials (base 2, factor c inside):

    _delta   delta[h, t] = sum over d of dy y
    _keys    one tile of keys and key head: p = ex2(s c - L2), dv = sum of p dy,
             dk = scale * sum of p (dp - delta) q, over the heads of the group, then over queries
    _queries one tile of queries and head: dq = scale * sum of p (dp - delta) k over keys
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from samebits.ops import gpu
from samebits.ops.attention.triton import as_matrix, exp2, factor


@dataclasses.dataclass(frozen=True)
class Tile:
    """Launch geometry of one gradient kernel: `fixed` rows stay, `moving` rows pass by."""

    fixed: int
    moving: int
    warps: int
    stages: int


# What fits in registers and shared memory at head size 256. `moving` has to divide `fixed`: tiles
# on the diagonal start where a fixed one does.
KEYS, QUERIES = Tile(64, 32, 8, 2), Tile(64, 64, 8, 1)
DELTA = 64  # rows of a block of `_delta`


@triton.jit(do_not_specialize=["T"])
def _delta(y_ptr, dy_ptr, delta_ptr, gt, T, D: tl.constexpr, ROWS: tl.constexpr):
    """delta [H, T] fp32; y [T, H, D] contiguous."""
    heads = tl.num_programs(1)
    head = tl.program_id(1)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    inside = (t < T)[:, None]
    token = t.to(tl.int64)[:, None]
    y = tl.load(y_ptr + (token * heads + head) * D + d[None, :], mask=inside, other=0.0)
    dy = tl.load(dy_ptr + token * gt + head * D + d[None, :], mask=inside, other=0.0)
    sums = tl.sum(y.to(tl.float32) * dy.to(tl.float32), axis=1)
    tl.store(delta_ptr + head.to(tl.int64) * T + t, sums, mask=t < T)


@triton.jit
def _keys_step(
    dk, dv, k, v, q_desc, dy_desc, l_at, delta_at, row, column, j, first, count, c,
    MOVING: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Queries first .. of one head into the gradients of keys j."""
    q = q_desc.load([row + first, column])
    dy = dy_desc.load([row + first, column])
    i = first + tl.arange(0, MOVING)
    if MASKED:
        inside = i < count
        # What follows the sequence is not its own, and may be NaN.
        dy = tl.where(inside[:, None], dy, 0.0)
        q = tl.where(inside[:, None], q, 0.0)
        norm = tl.load(l_at + first + tl.arange(0, MOVING), mask=inside, other=0.0)
        delta = tl.load(delta_at + first + tl.arange(0, MOVING), mask=inside, other=0.0)
    else:
        norm = tl.load(l_at + first + tl.arange(0, MOVING))
        delta = tl.load(delta_at + first + tl.arange(0, MOVING))
    s = tl.dot(k, tl.trans(q))
    dp = tl.dot(v, tl.trans(dy))
    p = exp2(s * c - norm[None, :])
    if MASKED:
        p = tl.where((j[:, None] <= i[None, :]) & inside[None, :], p, 0.0)
    dv = tl.dot(p.to(dy.dtype), dy, dv)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["T"])
def _keys(
    q_desc, k_desc, v_desc, dy_desc, l_ptr, delta_ptr, dk_ptr, dv_ptr, starts_ptr, T, c, scale,
    GROUP: tl.constexpr, D: tl.constexpr, FIXED: tl.constexpr, MOVING: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv [T, G, D] of one tile of keys; the first tile, which most queries see, first."""
    tl.static_assert(FIXED % MOVING == 0)
    sequence = tl.program_id(2)
    key_head = tl.program_id(1)
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    first = tl.program_id(0) * FIXED
    if first < count:
        j = first + tl.arange(0, FIXED)
        k = k_desc.load([start + first, key_head * D])
        v = v_desc.load([start + first, key_head * D])
        dk = tl.zeros((FIXED, D), tl.float32)
        dv = tl.zeros((FIXED, D), tl.float32)
        edge = tl.minimum(first + FIXED, tl.cdiv(count, MOVING) * MOVING)
        whole = tl.maximum(count // MOVING * MOVING, edge)
        masked = (edge - first) // MOVING
        steps = masked + tl.where(whole < count, 1, 0)
        for member in tl.range(0, GROUP):
            head = key_head * GROUP + member
            l_at = l_ptr + head.to(tl.int64) * T + start
            delta_at = delta_ptr + head.to(tl.int64) * T + start
            for n in tl.range(0, steps, num_stages=1):
                i = tl.where(n < masked, first + n * MOVING, whole)
                dk, dv = _keys_step(
                    dk, dv, k, v, q_desc, dy_desc, l_at, delta_at, start, head * D, j, i, count, c,
                    MOVING, True,
                )  # fmt: skip
            for i in tl.range(edge, whole, MOVING, num_stages=STAGES):
                dk, dv = _keys_step(
                    dk, dv, k, v, q_desc, dy_desc, l_at, delta_at, start, head * D, j, i, count, c,
                    MOVING, False,
                )  # fmt: skip
        d = tl.arange(0, D)
        token = (start + j).to(tl.int64)[:, None]
        at = (token * tl.num_programs(1) + key_head) * D + d[None, :]
        inside = (j < count)[:, None]
        tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)
        tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _queries_step(
    dq, q, dy, norm, delta, k_desc, v_desc, row, column, i, first, count, c,
    MOVING: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys first .. into the gradient of queries i."""
    k = k_desc.load([row + first, column])
    v = v_desc.load([row + first, column])
    j = first + tl.arange(0, MOVING)
    if MASKED:
        k = tl.where((j < count)[:, None], k, 0.0)
    s = tl.dot(q, tl.trans(k))
    dp = tl.dot(dy, tl.trans(v))
    p = exp2(s * c - norm[:, None])
    ds = p * (dp - delta[:, None])
    if MASKED:
        ds = tl.where(j[None, :] <= i[:, None], ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit(do_not_specialize=["T"])
def _queries(
    q_desc, k_desc, v_desc, dy_desc, l_ptr, delta_ptr, dq_ptr, starts_ptr, T, c, scale,
    GROUP: tl.constexpr, D: tl.constexpr, FIXED: tl.constexpr, MOVING: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dq [T, H, D] of one tile of queries; the last tile, which sees most keys, first."""
    tl.static_assert(FIXED % MOVING == 0)
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * FIXED
    if first < count:
        i = first + tl.arange(0, FIXED)
        q = q_desc.load([start + first, head * D])
        dy = dy_desc.load([start + first, head * D])
        row = head.to(tl.int64) * T + start + i
        norm = tl.load(l_ptr + row, mask=i < count, other=0.0)
        delta = tl.load(delta_ptr + row, mask=i < count, other=0.0)
        column = head // GROUP * D
        dq = tl.zeros((FIXED, D), tl.float32)
        for j in tl.range(0, first, MOVING, num_stages=STAGES):
            dq = _queries_step(
                dq, q, dy, norm, delta, k_desc, v_desc, start, column, i, j, count, c,
                MOVING, False,
            )  # fmt: skip
        for j in tl.range(first, tl.minimum(first + FIXED, count), MOVING, num_stages=1):
            dq = _queries_step(
                dq, q, dy, norm, delta, k_desc, v_desc, start, column, i, j, count, c, MOVING, True
            )
        d = tl.arange(0, D)
        token = (start + i).to(tl.int64)[:, None]
        at = (token * tl.num_programs(1) + head) * D + d[None, :]
        tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(i < count)[:, None])


def deltas(y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """[H, T] fp32 of y [T, H, D], contiguous, and dy."""
    tokens, heads, size = y.shape
    delta = y.new_empty((heads, tokens), dtype=torch.float32)
    of_dy = as_matrix(dy)
    _delta[(triton.cdiv(tokens, DELTA), heads)](
        y, of_dy, delta, of_dy.stride(0), tokens, D=size, ROWS=DELTA, num_warps=4,
    )  # fmt: skip
    return delta


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
    keys: Tile = KEYS,
    queries: Tile = QUERIES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq [T, H, D], dk and dv [T, G, D] bf16 of packed sequences.

    q, k, v, starts, longest, scale as in `triton.varlen`, which gave y [T, H, D] and norms [H, T]
    fp32; dy [T, H, D] bf16.
    """
    gpu.prepare(q.device.index or 0)
    tokens, heads, size = q.shape
    key_heads = k.shape[1]
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if not tokens or not longest:
        return dq, dk, dv
    delta = deltas(y, dy)
    sequences = len(starts) - 1
    matrices = [as_matrix(x) for x in (q, k, v, dy)]

    def operands(tile: Tile, *fixed: int) -> list[TensorDescriptor]:
        rows = [tile.fixed if i in fixed else tile.moving for i in range(4)]
        pairs = zip(matrices, rows, strict=True)
        return [TensorDescriptor.from_tensor(x, [n, size]) for x, n in pairs]

    numbers = (tokens, factor(scale), scale)
    _keys[(triton.cdiv(longest, keys.fixed), key_heads, sequences)](
        *operands(keys, 1, 2), norms, delta, dk, dv, starts, *numbers,
        GROUP=heads // key_heads, D=size, FIXED=keys.fixed, MOVING=keys.moving,
        STAGES=keys.stages, num_warps=keys.warps,
    )  # fmt: skip
    _queries[(triton.cdiv(longest, queries.fixed), heads, sequences)](
        *operands(queries, 0, 3), norms, delta, dq, starts, *numbers,
        GROUP=heads // key_heads, D=size, FIXED=queries.fixed, MOVING=queries.moving,
        STAGES=queries.stages, num_warps=queries.warps,
    )  # fmt: skip
    return dq, dk, dv
