"""Causal attention whose bits depend on a token's own keys and position, and on nothing else.

Keys are cut at multiples of `PARTITION` of the absolute position; partitions are merged ascending
(`reference.py`). Prefill, any slice of it, decode and training walk the same partitions, and a
paged cache and contiguous keys give the same bits. Inputs are bf16; anything else is refused
(SB0420 dtype or device, SB0421 shape, SB0413 layout, SB0414 geometry, SB0415 tables). A
NaN result carries no bit promise: comparisons fail on every NaN.
"""

from __future__ import annotations

import numpy as np
import torch

from samebits.bits import mixsum
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.attention import cpu
from samebits.ops.attention.cpu import PARTITION
from samebits.ops.attention.tables import check_packed, check_starts, out_of_range
from samebits.ops.checks import require_dtype, require_shape
from samebits.ops.scalar import LANES

__all__ = ["PARTITION", "paged", "varlen"]


def paged(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    most: int | None = None,
    longest: int | None = None,
) -> torch.Tensor:
    """Attention of T query tokens over a paged cache -> [T, H, D] bf16 (written to `out` if given).

    q            [T, H, D] bf16; the last dimension contiguous
    key_cache    [blocks, block_size, G, D] bf16, any strides with the last dimension contiguous;
    value_cache  likewise; G divides H
    block_table  [R, max blocks] integers; row r lists the blocks of request r in order
    query_start  [R + 1] integers, cumulative, 0 to T (rows past query_start[R] are not written)
    seq_lens     [R] integers: keys of request r; its i-th query sits at position
                 seq_lens[r] - (number of its queries) + i and sees the keys up to itself
    most         no request has more query tokens, and
    longest      none has more keys: needed on CUDA, where the host reads no table; else ignored
    Forward only. Refuses with SB0413 to SB0415, SB0420, SB0421. CUDA tensors: `sm90.paged`, whose
    schedule and bits are its own.
    """
    if q.is_cuda:
        from samebits.ops.attention import sm90

        return sm90.paged(
            q, key_cache, value_cache, block_table, query_start, seq_lens, scale, out,
            most=most, longest=longest,
        )  # fmt: skip
    _check_operands(q, key_cache, value_cache, rank=4, scale=scale)
    blocks, block_size, key_heads, _ = key_cache.shape
    starts, lengths = _integers(query_start), _integers(seq_lens)
    table = _integers(block_table)
    check_starts(starts, lengths, tokens=q.shape[0])
    if table.ndim != 2 or table.shape[0] != len(lengths):
        raise out_of_range(f"block_table {list(table.shape)}", f"[{len(lengths)}, max blocks]")
    pages = -(-lengths // block_size)
    used = np.arange(table.shape[1]) < pages[:, None]
    bad = ((table < 0) | (table >= blocks)) & used
    if bad.any() or (pages > table.shape[1]).any():
        request = int(np.argmax(bad.any(1) | (pages > table.shape[1])))
        raise out_of_range(
            f"request {request}: {lengths[request]} keys, blocks {table[request, :8].tolist()}",
            f"blocks of {block_size} for every key, each in [0, {blocks})",
        )
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
    elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise Refused(
            "SB0413",
            seen=f"out {list(out.shape)} {out.dtype} with strides {list(out.stride())}",
            required=f"contiguous {list(q.shape)} {q.dtype}",
            hint="samebits explain SB0413",
        )
    registry.count_served("attention", int(starts[-1]))
    cpu.attend(
        q,
        key_cache,
        value_cache,
        table * key_cache.stride(0),
        table * value_cache.stride(0),
        block_size,
        (key_cache.stride(1), value_cache.stride(1)),
        (key_cache.stride(2), value_cache.stride(2)),
        key_heads,
        starts,
        lengths,
        scale,
        out,
    )
    return out


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of packed sequences -> [T, H, D] bf16, differentiable in q, k and v.

    q [T, H, D], k and v [T, G, D] bf16, G divides H, the last dimension contiguous; cu_seqlens
    [B + 1] integers, cumulative, 0 to T. The bits of a token are those of `paged`. The backward is
    computed in fp32 per sequence and rounded once. Refuses with SB0413 to SB0415, SB0420, SB0421.
    CUDA tensors: `sm90.varlen`.
    """
    if q.is_cuda:
        from samebits.ops.attention import sm90

        return sm90.varlen(q, k, v, cu_seqlens, scale)
    _check_operands(q, k, v, rank=3, scale=scale)
    starts = _integers(cu_seqlens)
    check_packed(q, k, starts)
    registry.count_served("attention", q.shape[0])
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Varlen.apply(q, k, v, starts, scale)
    return _contiguous(q, k, v, starts, scale)


def _contiguous(q, k, v, starts, scale, dtype=torch.bfloat16) -> torch.Tensor:
    """`varlen` without checks: packed keys are one page per sequence."""
    out = torch.empty(q.shape, dtype=dtype)
    first = starts[:-1, None]
    cpu.attend(
        q,
        k,
        v,
        first * k.stride(0),
        first * v.stride(0),
        max(1, q.shape[0]),
        (k.stride(0), v.stride(0)),
        (k.stride(1), v.stride(1)),
        k.shape[1],
        starts,
        np.diff(starts),
        scale,
        out,
    )
    return out


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts, scale):
        ctx.save_for_backward(q, k, v)
        ctx.starts, ctx.scale = starts, scale
        return _contiguous(q, k, v, starts, scale)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        grads = [torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v)]
        for start, stop in zip(ctx.starts[:-1], ctx.starts[1:], strict=True):
            span = slice(int(start), int(stop))
            parts = _sequence_gradients(q[span], k[span], v[span], grad[span], ctx.scale)
            for whole, part in zip(grads, parts, strict=True):
                whole[span] = part.to(whole.dtype)
        return *grads, None, None


def _sequence_gradients(q, k, v, grad, scale):
    """Gradients of one causal sequence in fp32; softmax is recomputed, nothing was saved."""
    length, heads, size = q.shape
    key_heads = k.shape[1]
    group = heads // key_heads
    # [G, group, L, D] for queries, [G, 1, L, D] for keys: heads of one group share a key head.
    qs, g = (x.float().view(length, key_heads, group, size).permute(1, 2, 0, 3) for x in (q, grad))
    ks, vs = (x.float().permute(1, 0, 2).unsqueeze(1) for x in (k, v))
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    p = ((qs @ ks.mT) * scale).masked_fill(mask, -torch.inf).softmax(-1)
    grad_v = (p.mT @ g).sum(1)
    dp = g @ vs.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    grad_q = (ds @ ks).permute(2, 0, 1, 3).reshape(length, heads, size)
    grad_k = (ds.mT @ qs).sum(1)
    return grad_q, grad_k.permute(1, 0, 2), grad_v.permute(1, 0, 2)


def _integers(x: torch.Tensor) -> np.ndarray:
    return x.detach().numpy().astype(np.int64)


def _check_operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rank: int, scale: float
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_dtype(name, tensor, torch.bfloat16)
    require_shape("q", q, q.dim() == 3, "[T, H, D]")
    require_shape("k", k, k.dim() == rank and k.shape[-1] == q.shape[-1], "[..., G, D], D as q")
    require_shape("v", v, v.shape == k.shape, str(list(k.shape)))
    heads, size, key_heads = q.shape[1], q.shape[2], k.shape[-2]
    if (
        size == 0
        or size % LANES
        or key_heads == 0
        or heads % key_heads
        or heads > key_heads * cpu.ROWS
    ):
        raise Refused(
            "SB0414",
            seen=f"head size {size}, {heads} query heads, {key_heads} key heads",
            required=f"a multiple of {LANES}; query heads a multiple of key heads",
            hint="samebits explain SB0414",
        )
    if not 0 < scale < float("inf"):
        raise Refused(
            "SB0414",
            seen=f"scale {scale}",
            required="a positive finite scale",
            hint="samebits explain SB0414",
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(-1) != 1 or any(stride < 0 for stride in tensor.stride()):
            raise Refused(
                "SB0413",
                seen=f"{name} with strides {list(tensor.stride())}",
                required="a contiguous last dimension",
                hint="samebits explain SB0413",
            )


def _probe() -> int:
    # Two requests: one token alone, and one that crosses a partition with an incomplete tile.
    starts = np.array([0, 1, PARTITION + 8])
    q = samples.bf16((PARTITION + 8, 6, 32), 1, -4, 3)
    k, v = (samples.bf16((PARTITION + 8, 2, 32), seed, -4, 3) for seed in (2, 3))
    # Before and after rounding: bf16 hides most changes of order.
    return mixsum(
        torch.cat(
            [
                _contiguous(q, k, v, starts, 32**-0.5, dtype).float()
                for dtype in (torch.float32, torch.bfloat16)
            ]
        )
    )


registry.register(
    registry.Implementation(
        region="attention",
        id="attention.cpu.1",
        platform="cpu",
        constants={"lanes": LANES, "partition": PARTITION},
        modules=(
            "samebits.ops.jit",
            "samebits.ops.scalar",
            "samebits.ops.vector",
            "samebits.ops.attention",
            "samebits.ops.attention.cpu",
        ),
        probe=_probe,
    )
)
