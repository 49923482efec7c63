"""Gradients of packed windowed attention on Hopper, from the forward's output and log-sum-exp.

The scheme of `attention.triton_backward` with fewer tiles, and its kernel `_delta`: all sums in
fp32 and in a fixed order, no atomics, so equal inputs give equal bits; no bit promise beyond. A
query i sees keys i - W + 1 .. i, so a tile of keys is seen by the queries up to W - 1 after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from samebits.ops import gpu
from samebits.ops.attention.triton import as_matrix, exp2, factor
from samebits.ops.attention.triton_backward import KEYS, QUERIES, Tile, deltas

# By head size: what fits in registers and shared memory. `moving` has to divide `fixed`.
TILES = {
    64: (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    128: (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    256: (KEYS, QUERIES),
}


@triton.jit
def _softmax(s, dp, norm, delta, i, j, count, c, W, MASKED: tl.constexpr):
    """p and ds of one tile; norm, delta and i of queries, j of keys, each along its own axis."""
    p = exp2(s * c - norm)
    ds = p * (dp - delta)
    if MASKED:
        seen = (j <= i) & (j > i - W) & (i < count)
        p = tl.where(seen, p, 0.0)
        ds = tl.where(seen, ds, 0.0)
    return p, ds


@triton.jit
def _keys_step(
    dk, dv, k, v, q_desc, dy_desc, l_at, delta_at, row, column, j, first, count, c, W,
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
        norm = tl.load(l_at + i, mask=inside, other=0.0)
        delta = tl.load(delta_at + i, mask=inside, other=0.0)
    else:
        norm = tl.load(l_at + i)
        delta = tl.load(delta_at + i)
    s = tl.dot(k, tl.trans(q))
    dp = tl.dot(v, tl.trans(dy))
    p, ds = _softmax(
        s, dp, norm[None, :], delta[None, :], i[None, :], j[:, None], count, c, W, MASKED
    )
    dv = tl.dot(p.to(dy.dtype), dy, dv)
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["T", "W"])
def _keys(
    q_desc, k_desc, v_desc, dy_desc, l_ptr, delta_ptr, dk_ptr, dv_ptr, starts_ptr, T, c, scale, W,
    GROUP: tl.constexpr, D: tl.constexpr, FIXED: tl.constexpr, MOVING: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv [T, G, D] of one tile of keys."""
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
        # Tiles of queries, counted from `first`: `near` .. `far` - 1 see every key in full.
        steps = tl.cdiv(tl.minimum(count - first, FIXED - 1 + W), MOVING)
        near = tl.minimum(FIXED // MOVING, steps)
        far = tl.maximum(tl.minimum(count - first, W) // MOVING, near)
        for member in tl.range(0, GROUP):
            head = key_head * GROUP + member
            l_at = l_ptr + head.to(tl.int64) * T + start
            delta_at = delta_ptr + head.to(tl.int64) * T + start
            for n in tl.range(0, near + steps - far, num_stages=1):
                i = first + tl.where(n < near, n, n - near + far) * MOVING
                dk, dv = _keys_step(
                    dk, dv, k, v, q_desc, dy_desc, l_at, delta_at, start, head * D, j, i, count, c,
                    W, MOVING, True,
                )  # fmt: skip
            for n in tl.range(near, far, num_stages=STAGES):
                i = first + n * MOVING
                dk, dv = _keys_step(
                    dk, dv, k, v, q_desc, dy_desc, l_at, delta_at, start, head * D, j, i, count, c,
                    W, MOVING, False,
                )  # fmt: skip
        d = tl.arange(0, D)
        token = (start + j).to(tl.int64)[:, None]
        at = (token * tl.num_programs(1) + key_head) * D + d[None, :]
        inside = (j < count)[:, None]
        tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)
        tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _queries_step(
    dq, q, dy, norm, delta, k_desc, v_desc, row, column, i, first, count, c, W,
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
    _, ds = _softmax(
        s, dp, norm[:, None], delta[:, None], i[:, None], j[None, :], count, c, W, MASKED
    )
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit(do_not_specialize=["T", "W"])
def _queries(
    q_desc, k_desc, v_desc, dy_desc, l_ptr, delta_ptr, dq_ptr, starts_ptr, T, c, scale, W,
    GROUP: tl.constexpr, D: tl.constexpr, FIXED: tl.constexpr, MOVING: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dq [T, H, D] of one tile of queries."""
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
        # Tiles of keys: `near` .. `far` - 1 are seen in full by every query.
        highest = tl.minimum(first + FIXED, count)
        low = tl.maximum(first - W + 1, 0) // MOVING
        steps = tl.cdiv(highest, MOVING)
        near = tl.minimum(tl.cdiv(tl.maximum(highest - W, 0), MOVING), steps)
        far = tl.maximum(first // MOVING, near)
        for n in tl.range(0, near - low + steps - far, num_stages=1):
            at = tl.where(low + n < near, low + n, low + n - near + far)
            dq = _queries_step(
                dq, q, dy, norm, delta, k_desc, v_desc, start, column, i, at * MOVING, count, c, W,
                MOVING, True,
            )  # fmt: skip
        for n in tl.range(near, far, num_stages=STAGES):
            dq = _queries_step(
                dq, q, dy, norm, delta, k_desc, v_desc, start, column, i, n * MOVING, count, c, W,
                MOVING, False,
            )  # fmt: skip
        d = tl.arange(0, D)
        token = (start + i).to(tl.int64)[:, None]
        at = (token * tl.num_programs(1) + head) * D + d[None, :]
        tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(i < count)[:, None])


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
    window: int,
    tiles: tuple[Tile, Tile] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq [T, H, D], dk and dv [T, G, D] bf16 of packed sequences.

    q, k, v, starts, longest, scale, window as in `triton.varlen`, which gave y [T, H, D] and norms
    [H, T] fp32; dy [T, H, D] bf16.
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
    keys, queries = tiles or TILES[size]

    def operands(tile: Tile, *fixed: int) -> list[TensorDescriptor]:
        rows = [tile.fixed if i in fixed else tile.moving for i in range(4)]
        pairs = zip(matrices, rows, strict=True)
        return [TensorDescriptor.from_tensor(x, [n, size]) for x, n in pairs]

    numbers = (tokens, factor(scale), scale, window)
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
