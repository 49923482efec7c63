"""CPU kernel of `window_attention`: the schedule of `reference.py`, in register tiles.

The loop of `attention.cpu` with a first key for every row besides its last; scores, weights and
sums are its own. Keys before the window are neither read nor multiplied.
"""

from __future__ import annotations

import numpy as np
import torch

from samebits.ops import jit
from samebits.ops.attention.cpu import (
    PARTITION,
    ROWS,
    SCORES,
    _axpy_1,
    _axpy_4,
    _scores,
    _span,
    _tasks,
    _weights,
)
from samebits.ops.jit import fma, kernel
from samebits.ops.scalar import LANES, exp32
from samebits.ops.vector import store, widen_row

_MINUS_INF = np.float32(-np.inf)
_ZERO = np.float32(0.0)


@kernel
def _one(p, i, first, last, v, d, size, out):
    """Continue the chain of row i over keys first .. last - 1, columns d to d + 15."""
    if last > first:
        at = i * SCORES + first
        _axpy_1(p, at, SCORES, v, first * size + d, size, last - first, out, i * size + d, size)


@kernel
def _values(p, first, stop, lows, limits, v, size, out):
    """out[i, :] = fma chain over p[i, j] * v[j, :], j = lows[i] .. limits[i] - 1; rows to `stop`.

    Neither limit falls from one row to the next, so four rows share keys lows[i + 3] ..
    limits[i] - 1; where these are none, rows go one by one.
    """
    for d in range(0, size, 16):
        i = first
        while i < stop:
            if i + 4 <= stop and lows[i + 3] < limits[i]:
                begin, end = lows[i + 3], limits[i]
                for r in range(i, i + 3):
                    _one(p, r, lows[r], begin, v, d, size, out)
                at, terms = i * SCORES + begin, end - begin
                _axpy_4(p, at, SCORES, v, begin * size + d, size, terms, out, i * size + d, size)
                for r in range(i + 1, i + 4):
                    _one(p, r, end, limits[r], v, d, size, out)
                i += 4
            else:
                _one(p, i, lows[i], limits[i], v, d, size, out)
                i += 1


@kernel
def _attend(
    q, q_token, q_head, k, v, base_k, base_v, block, k_row, k_head, v_row, v_head,
    starts, lengths, tasks, heads, group, size, scale, window, out, first, last,
):  # fmt: skip
    """Tasks [first, last): one (request, key head, run of query tokens) each."""
    qs = np.empty(ROWS * size, np.float32)
    ks = np.zeros(SCORES * size, np.float32)
    vs = np.empty(PARTITION * size, np.float32)
    s = np.empty(ROWS * SCORES, np.float32)
    ones = np.ones(PARTITION, np.float32)
    lows = np.empty(ROWS, np.int64)
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
        lowest = max(0, position0 - window + 1)  # first key visible to the first row
        for origin in range(lowest // PARTITION * PARTITION, reach, PARTITION):
            keys = min(PARTITION, reach - origin)
            for j in range(max(0, lowest - origin), keys):
                position = origin + j
                page, slot = position // block, position % block
                at_k = base_k[request, page] + slot * k_row + head * k_head
                at_v = base_v[request, page] + slot * v_row + head * v_head
                widen_row(k, at_k, ks, j * size, size // LANES)
                widen_row(v, at_v, vs, j * size, size // LANES)
            # Rows before `skip` end before this partition, rows from `stop` begin after it.
            skip = max(0, origin - position0) * group
            stop = min(tokens, origin + PARTITION + window - 1 - position0) * group
            for i in range(skip, stop):
                position = position0 + i // group
                lows[i] = max(0, position - window + 1 - origin)
                limits[i] = min(keys, position + 1 - origin)
            i = skip
            while i < stop:
                pair = 2 if i + 2 <= stop else 1
                low = lows[i]
                _scores(qs, i, pair, ks[low * size :], limits[i + pair - 1] - low, size, s[low:])
                i += pair
            for i in range(skip, stop):
                # Lanes are those of absolute positions: whole lanes, with a weight of +0 for keys
                # before the window.
                low = lows[i] // LANES * LANES
                at = i * SCORES + low
                for j in range(i * SCORES + low, i * SCORES + lows[i]):
                    s[j] = _MINUS_INF
                count = limits[i] - low
                padded = (count + LANES - 1) // LANES * LANES
                part_tops[i] = _weights(s, at, count, padded, scale, ones, part_sums, i)
            for i in range(skip * size, stop * size):
                part[i] = _ZERO
            _values(s, skip, stop, lows, limits, vs, size, part)
            for i in range(skip, stop):
                a = i * size
                if origin <= max(0, position0 + i // group - window + 1):
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
    window: int,
    out: torch.Tensor,
) -> None:
    """As `attention.cpu.attend`, where a query token sees the last `window` keys up to itself.

    Entries of base_k and base_v for blocks without a visible key are not used.
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
            heads, group, size, np.float32(scale), window, outs, first, last,
        )  # fmt: skip

    if len(tasks):
        jit.parallel_for(body, len(tasks))
