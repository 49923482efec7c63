"""Attention forward on Hopper; the schedule is `sm90` in the README, the law `reference_sm90.py`.

q [T, H, D], keys and values in bf16, D 64, 128 or 256, G divides H; operands are CUDA tensors whose
last dimension is contiguous. Refuses with SB0420 (dtype, device), SB0421 (shape), SB0414 (geometry,
scale). Values of tables, starts and lengths are not read by the host, so that calls can be captured
in CUDA graphs: the engine answers for them.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
import triton
import triton.language as tl

from samebits.errors import Refused
from samebits.ops import gpu
from samebits.ops.attention.cpu import PARTITION
from samebits.ops.device import fold

TILE = 128  # keys of one step of the online softmax: part of the schedule
MERGE = 8  # partitions whose results are loaded together; moves no bit


@dataclasses.dataclass(frozen=True)
class Rows:
    """Launch geometry of the row kernel; none of it moves a bit."""

    rows: int = 128
    warps: int = 8
    stages: int = 2


# By head size: what fits in registers and shared memory.
ROWS = {64: Rows(), 128: Rows(), 256: Rows(64, 8, 1)}
DECODE = {64: (4, 3), 128: (4, 3), 256: (8, 2)}  # warps, stages; move no bit


@triton.jit
def exp2(x):
    """2**x by the chip's instruction: fp32, subnormal results +0."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _finite(m):
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _tile(q, kt, v, seen, m, w, o, c, ROWS: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Steps 1 to 5 of the schedule for ROWS rows and one tile of keys."""
    s = tl.dot(q, kt)
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(m, tl.max(s, axis=1))
    base = _finite(new)
    a = exp2((m - base) * c)
    shift = tl.broadcast_to(-(base * c)[:, None], s.shape)
    p = exp2(tl.fma(s, tl.full(s.shape, c, tl.float32), shift))
    w = tl.fma(w, a, fold(p, ROWS, TILE, 2))
    o = tl.dot(p.to(v.dtype), v, o * a[:, None])
    return new, w, o


@triton.jit
def _merge(top, total, out, m, w, o, c):
    """Step 6: one partition's result into the row's."""
    new = tl.maximum(top, m)
    base = _finite(new)
    a = exp2((top - base) * c)
    b = exp2((m - base) * c)
    total = tl.fma(w, b, total * a)
    out = tl.fma(o, tl.broadcast_to(b[:, None], o.shape), out * a[:, None])
    return new, total, out


@triton.jit
def _where(table_ptr, j, inside, PAGE: tl.constexpr):
    """Page and row that hold key j; without pages, keys are packed from row `table_ptr`."""
    if PAGE:
        block = tl.load(table_ptr + j // PAGE, mask=inside, other=0).to(tl.int64)
        row = j % PAGE
    else:
        block = tl.zeros_like(j).to(tl.int64)
        row = table_ptr + j
    return block, row.to(tl.int64)


@triton.jit
def _walk(
    q, top, total, out, k_ptr, v_ptr, table, kb, ks, vb, vs, position, length, first, last, c,
    D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PARTITION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Tiles first .. last - 1 (from a partition's first one), merged at each partition's end."""
    STEPS: tl.constexpr = PARTITION // TILE
    d = tl.arange(0, D)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    w = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, D), tl.float32)
    for tile in tl.range(first, last):
        j = tile * TILE + tl.arange(0, TILE)
        inside = j < length
        block, row = _where(table, j, inside, PAGE)
        k_at = k_ptr + (block * kb + row * ks)[None, :] + d[:, None]
        v_at = v_ptr + (block * vb + row * vs)[:, None] + d[None, :]
        if MASKED:
            kt = tl.load(k_at, mask=inside[None, :], other=0.0)
            v = tl.load(v_at, mask=inside[:, None], other=0.0)
        else:
            kt = tl.load(k_at)
            v = tl.load(v_at)
        seen = j[None, :] <= position[:, None]
        m, w, o = _tile(q, kt, v, seen, m, w, o, c, ROWS, TILE, MASKED)
        if (tile % STEPS == STEPS - 1) | (tile == last - 1):
            top, total, out = _merge(top, total, out, m, w, o, c)
            m = tl.full((ROWS,), float("-inf"), tl.float32)
            w = tl.zeros((ROWS,), tl.float32)
            o = tl.zeros((ROWS, D), tl.float32)
    return top, total, out


@triton.jit(do_not_specialize=["T"])
def _rows(
    q_ptr, k_ptr, v_ptr, y_ptr, norms_ptr, starts_ptr, lengths_ptr, table_ptr, table_stride,
    qt, qh, kb, ks, kh, vb, vs, vh, c, H, T,
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
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        out = tl.zeros((ROWS, D), tl.float32)
        STEPS: tl.constexpr = PARTITION // TILE
        whole = (lowest + 1) // PARTITION * STEPS  # tiles that every row sees in full
        top, total, out = _walk(
            q, top, total, out, k_ptr, v_ptr, table, kb, ks, vb, vs, position, length, 0, whole,
            c, D, PAGE, ROWS, TILE, PARTITION, False,
        )  # fmt: skip
        top, total, out = _walk(
            q, top, total, out, k_ptr, v_ptr, table, kb, ks, vb, vs, position, length, whole,
            tl.cdiv(highest, TILE), c, D, PAGE, ROWS, TILE, PARTITION, True,
        )  # fmt: skip
        y = tl.div_rn(out, tl.broadcast_to(total[:, None], out.shape)) + 0.0
        y_at = y_ptr + (token[:, None] * H + head) * D + d[None, :]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=(i < count)[:, None])
        if NORMS:
            norm = _finite(top) * c + tl.log2(total)
            tl.store(norms_ptr + head.to(tl.int64) * T + token, norm, mask=i < count)


@triton.jit
def _partitions(
    q_ptr, k_ptr, v_ptr, m_ptr, w_ptr, o_ptr, starts_ptr, lengths_ptr, table_ptr, table_stride,
    qt, qh, kb, ks, kh, vb, vs, vh, c, COUNT,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PARTITION: tl.constexpr,
):  # fmt: skip
    """One partition of one request's keys for the heads of one group. m, w [R, H, COUNT]."""
    request = tl.program_id(2).to(tl.int64)
    number = tl.program_id(0)
    kv = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + request)
    token = tl.load(starts_ptr + request).to(tl.int64)
    asks = tl.load(starts_ptr + request + 1) > token
    if asks & (number * PARTITION < length):
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
        first = number * PARTITION
        for at in tl.range(first, tl.minimum(first + PARTITION, length), TILE):
            j = at + tl.arange(0, TILE)
            inside = j < length
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


@triton.jit
def _finish(
    m_ptr, w_ptr, o_ptr, y_ptr, starts_ptr, lengths_ptr, c, COUNT,
    D: tl.constexpr, PARTITION: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Merge one request and head's partitions, ascending, into the row of its token."""
    request = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0)
    token = tl.load(starts_ptr + request).to(tl.int64)
    if tl.load(starts_ptr + request + 1) > token:
        row = request * heads + tl.program_id(0)
        count = tl.cdiv(tl.load(lengths_ptr + request), PARTITION)
        d = tl.arange(0, D)
        top = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        out = tl.zeros((1, D), tl.float32)
        one = tl.arange(0, 1)
        for base in tl.range(0, count, MERGE):
            for step in tl.static_range(0, MERGE):
                at = row * COUNT + base + step + one
                there = base + step < count
                m = tl.load(m_ptr + at, mask=there, other=float("-inf"))
                w = tl.load(w_ptr + at, mask=there, other=0.0)
                o = tl.load(o_ptr + at[:, None] * D + d[None, :], mask=there, other=0.0)
                top, total, out = _merge(top, total, out, m, w, o, c)
        y = tl.div_rn(out, tl.broadcast_to(total[:, None], out.shape)) + 0.0
        y_at = y_ptr + (token * heads + tl.program_id(0)) * D + d[None, :]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty))


@triton.jit
def _ex2(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, exp2(tl.load(x_ptr + i, mask=i < n)), mask=i < n)


def ex2(x: torch.Tensor) -> torch.Tensor:
    """The primitive `ex2.approx.ftz.f32`, elementwise, fp32 on CUDA."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _ex2[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024, **gpu.POLICY)
    return y


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
    geometry: Rows | None = None,
    norms: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of packed sequences -> [T, H, D] bf16. Forward only.

    q [T, H, D], k and v [T, G, D]; starts [B + 1] int32 on the GPU, cumulative, 0 to T; no sequence
    is longer than `longest`. `norms` [H, T] fp32, if given, is filled with log2 of each row's sum
    of 2**(s c), for the backward; it moves no bit of the output.
    """
    check(q, k, v, 3, scale, starts=starts)
    y = q.new_empty(q.shape)
    _launch(q, k, v, y, starts, None, None, longest, scale, geometry, norms)
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
    geometry: Rows | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of T query tokens over a paged cache -> [T, H, D] bf16; any slice of a prefill.

    The caches are [blocks, page, G, D], page 16, 32 or 64; table [R, most blocks], starts [R + 1]
    and lengths [R] as in `samebits.ops.attention.paged`, int32 on the GPU. No request has more than
    `most` query tokens. Written to `out` if given, contiguous as q is shaped.
    """
    check(q, key_cache, value_cache, 4, scale, starts=starts, lengths=lengths, table=table)
    y = q.new_empty(q.shape) if out is None else out
    _launch(q, key_cache, value_cache, y, starts, lengths, table, most, scale, geometry)
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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged` with at most one query token for each request: partitions run side by side.

    No request has more than `longest` keys; the launch, and so a CUDA graph, covers that many.
    """
    check(q, key_cache, value_cache, 4, scale, starts=starts, lengths=lengths, table=table)
    heads, size = q.shape[1:]
    requests, key_heads = lengths.shape[0], key_cache.shape[2]
    count = triton.cdiv(longest, PARTITION)
    y = q.new_empty(q.shape) if out is None else out
    if not requests:
        return y
    m = q.new_empty((requests, heads, count), dtype=torch.float32)
    w, o = torch.empty_like(m), m.new_empty((*m.shape, size))
    c = factor(scale)
    group = heads // key_heads
    warps, stages = DECODE[size]
    _partitions[(count, key_heads, requests)](
        q, key_cache, value_cache, m, w, o, starts, lengths, table, table.stride(0),
        q.stride(0), q.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3], c, count,
        GROUP=group, D=size, PAGE=key_cache.shape[1], ROWS=max(16, triton.next_power_of_2(group)),
        TILE=TILE, PARTITION=PARTITION, num_warps=warps, num_stages=stages,
        **gpu.POLICY,
    )  # fmt: skip
    _finish[(heads, requests)](
        m, w, o, y, starts, lengths, c, count, D=size, PARTITION=PARTITION, MERGE=MERGE,
        num_warps=1, **gpu.POLICY,
    )  # fmt: skip
    return y


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """x [T, N, D] as [T, N D] that bulk copies can read: its own memory where that fits, or a copy.

    They need heads side by side, and tokens 16 bytes apart or a multiple of it.
    """
    tokens, heads, size = x.shape
    width = heads * size
    fits = (
        x.stride(2) == 1
        and (heads == 1 or x.stride(1) == size)
        and (tokens == 1 or (x.stride(0) >= width and x.stride(0) % 8 == 0))
        and x.data_ptr() % 16 == 0
    )
    if not fits:
        x = x.clone(memory_format=torch.contiguous_format)
    # The stride of a dimension of one element may be anything.
    return x.as_strided((tokens, width), (x.stride(0) if tokens > 1 else width, 1))


def factor(scale: float) -> float:
    """c: the fp32 number next to scale * log2(e), the product taken in float64."""
    return float(np.float32(scale * math.log2(math.e)))


def _launch(
    q, k, v, y, starts, lengths, table, most, scale, geometry: Rows | None, norms=None
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
        GROUP=heads // k.shape[-2], D=size, PAGE=page, ROWS=geometry.rows, TILE=TILE,
        PARTITION=PARTITION, NORMS=norms is not None,
        num_warps=geometry.warps, num_stages=geometry.stages, **gpu.POLICY,
    )  # fmt: skip


def check(q, k, v, rank: int, scale: float, **tables: torch.Tensor) -> None:
    """Operands of a launcher: dtypes and devices (SB0420), shapes (SB0421), geometry (SB0414)."""
    gpu.prepare(q.device.index or 0)
    gpu.require("q", q, torch.bfloat16, q.dim() == 3, "[T, H, D]", dense=False)
    for name, x in (("keys", k), ("values", v)):
        holds = x.dim() == rank and x.shape == k.shape and x.shape[-1] == q.shape[-1]
        gpu.require(name, x, torch.bfloat16, holds, f"{rank} dimensions, the last as q's", False)
    requests = tables["starts"].shape[0] - 1
    for name, x in tables.items():
        fits = x.shape[:1] == (requests + (name == "starts"),) and x.dim() == 1 + (name == "table")
        gpu.require(name, x, torch.int32, fits, f"one entry for each of {requests} requests", False)
    require_geometry(q.shape[1], k.shape[-2], q.shape[2], k.shape[1] if rank == 4 else None, scale)


def require_geometry(heads: int, key_heads: int, size: int, page: int | None, scale: float) -> None:
    """Refuses with SB0414 what no gate covers; `page` None stands for packed keys."""
    if (
        size not in ROWS
        or key_heads < 1
        or heads % key_heads
        or heads > 64 * key_heads
        or page not in (None, 16, 32, 64)
        or not 0 < scale < math.inf
    ):
        raise Refused(
            "SB0414",
            seen=f"head size {size}, {heads} query and {key_heads} key heads, page {page}, "
            f"scale {scale}",
            required="head size 64, 128 or 256, whole groups of heads, page 16, 32, 64; scale > 0",
            hint="samebits explain SB0414",
        )
