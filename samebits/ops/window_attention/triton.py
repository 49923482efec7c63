"""Windowed attention forward on Hopper; the law is `reference_sm90.py`.

The loops of `attention.triton` from the first tile of keys that a row sees; what is computed inside
of them is its own. q [T, H, D], keys and values in bf16, D 64, 128 or 256, G divides H; operands
are CUDA tensors whose last dimension is contiguous; a window is an integer from 1, at most
`tables.WIDEST`. Refuses with SB0420 (dtype, device), SB0421 (shape), SB0414 (geometry, scale).
Values of tables, starts and lengths are not read by the host, so that calls can be captured in CUDA
graphs. Keys before the window of a block's first row are not read, nor are their table entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.attention.triton import (
    DECODE,
    MERGE,
    PARTITION,
    ROWS,
    TILE,
    Rows,
    _finish,
    _finite,
    _merge,
    _tile,
    _where,
    check,
    factor,
)


@triton.jit
def _walk(
    q, m, w, o, top, total, out, k_ptr, v_ptr, table, kb, ks, vb, vs, position, begin, length,
    first, last, end, c, W,
    D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PARTITION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Tiles first .. last - 1 of keys begin .. length - 1, merged where a partition ends.

    Tile `end` - 1 is the last of all, and merged too. m, w, o are those of an open partition.
    """
    STEPS: tl.constexpr = PARTITION // TILE
    d = tl.arange(0, D)
    for tile in tl.range(first, last):
        j = tile * TILE + tl.arange(0, TILE)
        inside = (j >= begin) & (j < length)
        block, row = _where(table, j, inside, PAGE)
        k_at = k_ptr + (block * kb + row * ks)[None, :] + d[:, None]
        v_at = v_ptr + (block * vb + row * vs)[:, None] + d[None, :]
        if MASKED:
            kt = tl.load(k_at, mask=inside[None, :], other=0.0)
            v = tl.load(v_at, mask=inside[:, None], other=0.0)
        else:
            kt = tl.load(k_at)
            v = tl.load(v_at)
        seen = (j[None, :] <= position[:, None]) & (j[None, :] > (position - W)[:, None])
        m, w, o = _tile(q, kt, v, seen, m, w, o, c, ROWS, TILE, MASKED)
        if (tile % STEPS == STEPS - 1) | (tile == end - 1):
            top, total, out = _merge(top, total, out, m, w, o, c)
            m = tl.full((ROWS,), float("-inf"), tl.float32)
            w = tl.zeros((ROWS,), tl.float32)
            o = tl.zeros((ROWS, D), tl.float32)
    return m, w, o, top, total, out


@triton.jit(do_not_specialize=["T", "W"])
def _rows(
    q_ptr, k_ptr, v_ptr, y_ptr, norms_ptr, starts_ptr, lengths_ptr, table_ptr, table_stride,
    qt, qh, kb, ks, kh, vb, vs, vh, c, H, T, W,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PARTITION: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """ROWS query tokens of one request and head; the last tile, which has most keys, first."""
    request = tl.program_id(2)
    head = tl.program_id(1)
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    if part * ROWS < count:
        if PAGE:
            length = tl.load(lengths_ptr + request)
            table = table_ptr + request.to(tl.int64) * table_stride
        else:
            length = count
            table = start
        d = tl.arange(0, D)
        i = part * ROWS + tl.arange(0, ROWS)
        token = (start + i).to(tl.int64)
        q_at = q_ptr + token[:, None] * qt + head.to(tl.int64) * qh + d[None, :]
        q = tl.load(q_at, mask=(i < count)[:, None], other=0.0)
        before = length - count
        position = before + i
        lowest = before + part * ROWS
        highest = tl.minimum(lowest + ROWS, length)
        k_ptr += (head // GROUP).to(tl.int64) * kh
        v_ptr += (head // GROUP).to(tl.int64) * vh
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        w = tl.zeros((ROWS,), tl.float32)
        o = tl.zeros((ROWS, D), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        out = tl.zeros((ROWS, D), tl.float32)
        begin = tl.maximum(lowest - W + 1, 0)  # the first key that some row sees
        end = tl.cdiv(highest, TILE)
        # Tiles `whole` .. `after` - 1 are those that every row sees in full.
        whole = tl.cdiv(tl.maximum(highest - W, 0), TILE)
        after = tl.maximum((lowest + 1) // TILE, whole)
        m, w, o, top, total, out = _walk(
            q, m, w, o, top, total, out, k_ptr, v_ptr, table, kb, ks, vb, vs, position, begin,
            length, begin // TILE, whole, end, c, W, D, PAGE, ROWS, TILE, PARTITION, True,
        )  # fmt: skip
        m, w, o, top, total, out = _walk(
            q, m, w, o, top, total, out, k_ptr, v_ptr, table, kb, ks, vb, vs, position, begin,
            length, whole, after, end, c, W, D, PAGE, ROWS, TILE, PARTITION, False,
        )  # fmt: skip
        m, w, o, top, total, out = _walk(
            q, m, w, o, top, total, out, k_ptr, v_ptr, table, kb, ks, vb, vs, position, begin,
            length, after, end, end, c, W, D, PAGE, ROWS, TILE, PARTITION, True,
        )  # fmt: skip
        y = tl.div_rn(out, tl.broadcast_to(total[:, None], out.shape)) + 0.0
        y_at = y_ptr + (token[:, None] * H + head) * D + d[None, :]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=(i < count)[:, None])
        if NORMS:
            norm = _finite(top) * c + tl.log2(total)
            tl.store(norms_ptr + head.to(tl.int64) * T + token, norm, mask=i < count)


@triton.jit(do_not_specialize=["COUNT", "W"])
def _partitions(
    q_ptr, k_ptr, v_ptr, m_ptr, w_ptr, o_ptr, reach_ptr, starts_ptr, lengths_ptr, table_ptr,
    table_stride, qt, qh, kb, ks, kh, vb, vs, vh, c, COUNT, W,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PARTITION: tl.constexpr,
):  # fmt: skip
    """One partition, counted from the window's first, for the heads of one group.

    m, w [R, H, COUNT]; reach [R]: keys from the start of the window's first partition.
    """
    request = tl.program_id(2).to(tl.int64)
    number = tl.program_id(0)
    kv = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + request)
    token = tl.load(starts_ptr + request).to(tl.int64)
    asks = tl.load(starts_ptr + request + 1) > token
    begin = tl.maximum(length - W, 0)
    origin = begin // PARTITION * PARTITION
    first = origin + number * PARTITION
    if asks & (first < length):
        if (number == 0) & (kv == 0):
            tl.store(reach_ptr + request, length - origin)
        table = table_ptr + request * table_stride
        d = tl.arange(0, D)
        i = tl.arange(0, ROWS)
        head = kv * GROUP + i
        q_at = q_ptr + token * qt + head[:, None] * qh + d[None, :]
        q = tl.load(q_at, mask=(i < GROUP)[:, None], other=0.0)
        k_ptr += kv * kh
        v_ptr += kv * vh
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        w = tl.zeros((ROWS,), tl.float32)
        o = tl.zeros((ROWS, D), tl.float32)
        low = tl.maximum(first, begin // TILE * TILE)
        for at in tl.range(low, tl.minimum(first + PARTITION, length), TILE):
            j = at + tl.arange(0, TILE)
            inside = (j >= begin) & (j < length)
            block, row = _where(table, j, inside, PAGE)
            k_at = k_ptr + (block * kb + row * ks)[None, :] + d[:, None]
            v_at = v_ptr + (block * vb + row * vs)[:, None] + d[None, :]
            kt = tl.load(k_at, mask=inside[None, :], other=0.0)
            v = tl.load(v_at, mask=inside[:, None], other=0.0)
            m, w, o = _tile(q, kt, v, inside[None, :], m, w, o, c, ROWS, TILE, True)
        to = (request * tl.num_programs(1) * GROUP + head) * COUNT + number
        tl.store(m_ptr + to, m, mask=i < GROUP)
        tl.store(w_ptr + to, w, mask=i < GROUP)
        tl.store(o_ptr + to[:, None] * D + d[None, :], o, mask=(i < GROUP)[:, None])


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
    geometry: Rows | None = None,
    norms: torch.Tensor | None = None,
) -> torch.Tensor:
    """Windowed attention of packed sequences -> [T, H, D] bf16, as `attention.triton.varlen`."""
    check(q, k, v, 3, scale, starts=starts)
    y = q.new_empty(q.shape)
    _launch(q, k, v, y, starts, None, None, longest, scale, window, geometry, norms)
    return y


def paged(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    scale: float,
    window: int,
    geometry: Rows | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """T query tokens over a paged cache -> [T, H, D] bf16, as `attention.triton.paged`."""
    check(q, key_cache, value_cache, 4, scale, starts=starts, lengths=lengths, table=table)
    y = q.new_empty(q.shape) if out is None else out
    operands = q, key_cache, value_cache, y, starts, lengths, table
    _launch(*operands, most, scale, window, geometry)
    return y


def decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged` with at most one query token for each request: partitions run side by side.

    No request has more than `longest` keys; the launch, and so a CUDA graph, covers as many
    partitions as a window of these can touch.
    """
    check(q, key_cache, value_cache, 4, scale, starts=starts, lengths=lengths, table=table)
    heads, size = q.shape[1:]
    requests, key_heads = lengths.shape[0], key_cache.shape[2]
    count = min(triton.cdiv(longest, PARTITION), triton.cdiv(window - 1, PARTITION) + 1)
    y = q.new_empty(q.shape) if out is None else out
    if not requests:
        return y
    m = q.new_empty((requests, heads, count), dtype=torch.float32)
    w, o = torch.empty_like(m), m.new_empty((*m.shape, size))
    reach, c, group = torch.empty_like(lengths), factor(scale), heads // key_heads
    warps, stages = DECODE[size]
    _partitions[(count, key_heads, requests)](
        q, key_cache, value_cache, m, w, o, reach, starts, lengths, table, table.stride(0),
        q.stride(0), q.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3], c, count,
        window, GROUP=group, D=size, PAGE=key_cache.shape[1],
        ROWS=max(16, triton.next_power_of_2(group)), TILE=TILE, PARTITION=PARTITION,
        num_warps=warps, num_stages=stages, **gpu.POLICY,
    )  # fmt: skip
    _finish[(heads, requests)](
        m, w, o, y, starts, reach, c, count, D=size, PARTITION=PARTITION, MERGE=MERGE,
        num_warps=1, **gpu.POLICY,
    )  # fmt: skip
    return y


def _launch(
    q, k, v, y, starts, lengths, table, most, scale, window, geometry: Rows | None, norms=None
) -> None:
    tokens, heads, size = q.shape
    geometry = geometry or ROWS[size]
    if not tokens or not most:
        return
    if table is None:
        page, stride, key_strides, value_strides = 0, 0, (0, *k.stride()[:2]), (0, *v.stride()[:2])
        lengths = table = starts
    else:
        page, stride = k.shape[1], table.stride(0)
        key_strides, value_strides = k.stride()[:3], v.stride()[:3]
    _rows[(triton.cdiv(most, geometry.rows), heads, len(starts) - 1)](
        q, k, v, y, y if norms is None else norms, starts, lengths, table, stride,
        q.stride(0), q.stride(1), *key_strides, *value_strides, factor(scale), heads, tokens,
        window, GROUP=heads // k.shape[-2], D=size, PAGE=page, ROWS=geometry.rows, TILE=TILE,
        PARTITION=PARTITION, NORMS=norms is not None,
        num_warps=geometry.warps, num_stages=geometry.stages, **gpu.POLICY,
    )  # fmt: skip
