"""CPU kernel of `attention`: the schedule of `reference.py`, in register tiles.

One kernel serves the paged cache and contiguous keys: both are rows found through a table of base
offsets. Tiles of query rows share the widened keys of a partition; every row keeps its own chains.
"""

from __future__ import annotations

import numpy as np
import torch

from samebits.ops import jit
from samebits.ops.jit import fma, kernel
from samebits.ops.scalar import LANES, exp32
from samebits.ops.vector import axpy_tile, dot_tile, store, widen_row

PARTITION = 256  # keys per leaf, by absolute position
ROWS = 48  # most query rows (tokens x heads of one key head) that share one pass over the keys
STEP_ROWS = ROWS  # rows dealt per task
SCORES = PARTITION + 2  # room for the scores of one row: whole tiles of three

_dot_1x1 = dot_tile(1, 1)
_dot_1x3 = dot_tile(1, 3)
_dot_2x3 = dot_tile(2, 3)
_axpy_1 = axpy_tile(1, 2)
_axpy_4 = axpy_tile(4, 2)

_MINUS_INF = np.float32(-np.inf)
_ZERO = np.float32(0.0)


@kernel
def _scores(q, row, rows, k, keys, size, out):
    """out[i, j] = dot(q row i, key j) for `rows` (1 or 2) rows from `row`, keys 0 .. keys - 1.

    Whole tiles: up to two scores too many, of stale keys, which nobody reads.
    """
    steps = size // LANES
    qa, oa = row * size, row * SCORES
    for j in range(0, keys, 3):
        if rows == 2:
            _dot_2x3(q, qa, size, k, j * size, size, steps, out, oa + j, SCORES)
        else:
            _dot_1x3(q, qa, size, k, j * size, size, steps, out, oa + j, SCORES)


@kernel
def _weights(s, at, keys, padded, scale, ones, sums, row):
    """Replace scores by exp(scale * s - max), +0 beyond `keys`; sums[row] = their lane sum."""
    weights = s[at : at + padded]  # indices from 0 spare the loops a check for negative ones
    top = _MINUS_INF
    for j in range(keys):
        value = scale * weights[j]
        weights[j] = value
        top = value if value > top else top
    for j in range(keys):
        weights[j] = exp32(weights[j] - top)
    for j in range(keys, padded):
        weights[j] = _ZERO
    # fma(p, 1, lane) is lane + p; adding +0 beyond `keys` leaves a sum of values >= +0 as it is.
    _dot_1x1(s, at, padded, ones, 0, padded, padded // LANES, sums, row, 1)
    return top


@kernel
def _values(p, first, rows, limits, v, size, out):
    """out[i, :] = fma chain over p[i, j] * v[j, :], j = 0 .. limits[i] - 1; rows from `first`."""
    for d in range(0, size, 16):
        i = first
        while i < rows:
            tile = 4 if i + 4 <= rows else 1
            common = limits[i]  # limits never fall from one row to the next
            pa, oa = i * SCORES, i * size + d
            if tile == 4:
                _axpy_4(p, pa, SCORES, v, d, size, common, out, oa, size)
            else:
                _axpy_1(p, pa, SCORES, v, d, size, common, out, oa, size)
            for r in range(1, tile):
                more = limits[i + r] - common
                if more > 0:
                    at = pa + r * SCORES + common
                    va = common * size + d
                    _axpy_1(p, at, SCORES, v, va, size, more, out, oa + r * size, size)
            i += tile


@kernel
def _attend(
    q, q_token, q_head, k, v, base_k, base_v, block, k_row, k_head, v_row, v_head,
    starts, lengths, tasks, heads, group, size, scale, out, first, last,
):  # fmt: skip
    """Tasks [first, last): one (request, key head, run of query tokens) each."""
    qs = np.empty(ROWS * size, np.float32)
    ks = np.zeros(SCORES * size, np.float32)
    vs = np.empty(PARTITION * size, np.float32)
    s = np.empty(ROWS * SCORES, np.float32)
    ones = np.ones(PARTITION, np.float32)
    limits = np.empty(ROWS, np.int64)
    tops = np.empty(ROWS, np.float32)
    sums = np.empty(ROWS, np.float32)
    part_tops = np.empty(ROWS, np.float32)
    part_sums = np.empty(ROWS, np.float32)
    acc = np.empty(ROWS * size, np.float32)
    part = np.empty(ROWS * size, np.float32)
    for task in range(first, last):
        request, head = tasks[task, 0], tasks[task, 1]
        token0, tokens = tasks[task, 2], tasks[task, 3]
        rows = tokens * group
        begin = starts[request]
        position0 = lengths[request] - (starts[request + 1] - begin) + token0
        for i in range(rows):
            token, h = begin + token0 + i // group, head * group + i % group
            source = token * q_token + h * q_head
            widen_row(q, source, qs, i * size, size // LANES)
        reach = position0 + tokens  # keys visible to the last row
        for origin in range(0, reach, PARTITION):
            keys = min(PARTITION, reach - origin)
            for j in range(keys):
                position = origin + j
                page, slot = position // block, position % block
                at_k = base_k[request, page] + slot * k_row + head * k_head
                at_v = base_v[request, page] + slot * v_row + head * v_head
                widen_row(k, at_k, ks, j * size, size // LANES)
                widen_row(v, at_v, vs, j * size, size // LANES)
            skip = max(0, origin - position0) * group  # rows that end before this partition
            for i in range(skip, rows):
                limits[i] = min(keys, position0 + i // group + 1 - origin)
            i = skip
            while i < rows:
                pair = 2 if i + 2 <= rows else 1
                _scores(qs, i, pair, ks, limits[i + pair - 1], size, s)
                i += pair
            for i in range(skip, rows):
                padded = (limits[i] + LANES - 1) // LANES * LANES
                part_tops[i] = _weights(s, i * SCORES, limits[i], padded, scale, ones, part_sums, i)
            for i in range(skip * size, rows * size):
                part[i] = _ZERO
            _values(s, skip, rows, limits, vs, size, part)
            for i in range(skip, rows):
                a = i * size
                if origin == 0:
                    tops[i], sums[i] = part_tops[i], part_sums[i]
                    for d in range(a, a + size):
                        acc[d] = part[d]
                else:
                    top = part_tops[i] if part_tops[i] > tops[i] else tops[i]
                    old, new = exp32(tops[i] - top), exp32(part_tops[i] - top)
                    tops[i] = top
                    sums[i] = fma(part_sums[i], new, sums[i] * old)
                    for d in range(a, a + size):
                        acc[d] = fma(part[d], new, acc[d] * old)
        for i in range(rows):
            token, h = begin + token0 + i // group, head * group + i % group
            for d in range(size):
                store(out, (token * heads + h) * size + d, acc[i * size + d] / sums[i])


def _span(x: torch.Tensor) -> np.ndarray:
    """Flat bf16 bits of the memory that a strided tensor reaches, from its first element."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return jit.as_numpy(x.detach().as_strided((reach,), (1,)))


def _tasks(starts: np.ndarray, lengths: np.ndarray, key_heads: int, group: int) -> np.ndarray:
    """(request, key head, first query token, tokens), dealt so that equal spans cost the same."""
    step = max(1, STEP_ROWS // group)
    rows = []
    for request in range(len(lengths)):
        count = int(starts[request + 1] - starts[request])
        before = int(lengths[request]) - count
        for first in range(0, count, step):
            tokens = min(step, count - first)
            cost = tokens * (before + first + tokens)
            rows += [(cost, request, head, first, tokens) for head in range(key_heads)]
    rows.sort(reverse=True)
    hands = torch.get_num_threads()
    dealt = [row[1:] for hand in range(hands) for row in rows[hand::hands]]
    return np.array(dealt, np.int64).reshape(-1, 4)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    base_k: np.ndarray,
    base_v: np.ndarray,
    block: int,
    row: tuple[int, int],
    head: tuple[int, int],
    key_heads: int,
    starts: np.ndarray,
    lengths: np.ndarray,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of q [T, H, D] into out [T, H, D], bf16, or fp32 before that rounding.

    Key `position` of a request lies at base[request, position // block] + position % block * row
    + head * head stride, counted in elements from the first element of k (of v).
    """
    heads, size = q.shape[1:]
    group = heads // key_heads
    tasks = _tasks(starts, lengths, key_heads, group)
    qs, outs = _span(q), jit.as_numpy(out).reshape(-1)
    ks, vs = _span(k), _span(v)

    def body(first: int, last: int) -> None:
        _attend(
            qs, q.stride(0), q.stride(1), ks, vs, base_k, base_v, block,
            row[0], head[0], row[1], head[1], starts, lengths, tasks,
            heads, group, size, np.float32(scale), outs, first, last,
        )  # fmt: skip

    if len(tasks):
        jit.parallel_for(body, len(tasks))
