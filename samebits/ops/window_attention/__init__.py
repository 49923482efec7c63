"""Causal attention with a sliding window: a token sees the last `window` keys up to itself.

As `samebits.ops.attention`, and with its bits wherever the window is at least as long as what a
token could see. Keys are cut at multiples of `PARTITION` of the absolute position, never of the
window's start, so that prefill, any slice of it, decode and training walk the same partitions
(`reference.py`); partitions before the window are skipped. Keys before the window of a request's
first query token are never read: neither their memory nor their entries of a block table matter.
Neither engine routes a layer here. Inputs are bf16; anything else is refused (SB0420 dtype or
device, SB0421 shape, SB0413 layout, SB0414 geometry, SB0415 tables, SB0417 window). A NaN result
carries no bit promise.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.attention import PARTITION, _check_operands, _integers
from samebits.ops.attention.tables import check_packed, check_starts, out_of_range
from samebits.ops.scalar import LANES
from samebits.ops.window_attention import cpu
from samebits.ops.window_attention.tables import check_out, checked

__all__ = ["PARTITION", "paged", "varlen"]

REGION = "attention.window"
ROWS = 512  # query tokens whose scores the backward keeps at once


def paged(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor | None = None,
    *,
    most: int | None = None,
    longest: int | None = None,
) -> torch.Tensor:
    """Attention of T query tokens over a paged cache -> [T, H, D] bf16 (written to `out` if given).

    Arguments as in `samebits.ops.attention.paged`. window: number of keys that a query token sees,
    itself among them. Blocks of a request without a key that one of its query tokens sees may hold
    anything, and so may their entries in the table. Forward only. Refuses with SB0413 to SB0415,
    SB0417, SB0420, SB0421. CUDA tensors: `sm90.paged`, whose schedule and bits are its own.
    """
    if q.is_cuda:
        from samebits.ops.window_attention import sm90

        return sm90.paged(
            q, key_cache, value_cache, block_table, query_start, seq_lens, scale, window, out,
            most=most, longest=longest,
        )  # fmt: skip
    window = checked(window)
    _check_operands(q, key_cache, value_cache, rank=4, scale=scale)
    block_size, key_heads = key_cache.shape[1:3]
    starts, lengths = _integers(query_start), _integers(seq_lens)
    check_starts(starts, lengths, tokens=q.shape[0])
    table = _integers(block_table)
    if table.ndim != 2 or table.shape[0] != len(lengths):
        raise out_of_range(f"block_table {list(table.shape)}", f"[{len(lengths)}, max blocks]")
    _check_blocks(table, np.maximum(0, lengths - np.diff(starts) - window + 1), lengths, key_cache)
    check_out(out, q)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
    registry.count_served(REGION, int(starts[-1]))
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
        window,
        out,
    )
    return out


def _check_blocks(
    table: np.ndarray, lowest: np.ndarray, lengths: np.ndarray, cache: torch.Tensor
) -> None:
    """Blocks that hold keys `lowest` [R] to `lengths` [R] lie in the cache (SB0415)."""
    blocks, size = cache.shape[:2]
    columns, pages = np.arange(table.shape[1]), -(-lengths // size)
    used = (columns >= (lowest // size)[:, None]) & (columns < pages[:, None])
    bad = (((table < 0) | (table >= blocks)) & used).any(1) | (pages > table.shape[1])
    if bad.any():
        r = int(np.argmax(bad))
        raise out_of_range(
            f"request {r}: keys {lowest[r]} to {lengths[r]}, blocks {table[r, :8].tolist()}",
            f"blocks of {size} for every key that is seen, each in [0, {blocks})",
        )


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Windowed attention of packed sequences -> [T, H, D] bf16, differentiable in q, k and v.

    Arguments as in `samebits.ops.attention.varlen`, window as in `paged`, whose bits a token has.
    The backward is computed in fp32, some hundred query tokens at a time, and rounded once. Refuses
    with SB0413 to SB0415, SB0417, SB0420, SB0421. CUDA tensors: `sm90.varlen`.
    """
    if q.is_cuda:
        from samebits.ops.window_attention import sm90

        return sm90.varlen(q, k, v, cu_seqlens, scale, window)
    window = checked(window)
    _check_operands(q, k, v, rank=3, scale=scale)
    starts = _integers(cu_seqlens)
    check_packed(q, k, starts)
    registry.count_served(REGION, q.shape[0])
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Varlen.apply(q, k, v, starts, scale, window)
    return _contiguous(q, k, v, starts, scale, window)


def _contiguous(q, k, v, starts, scale, window, dtype=torch.bfloat16) -> torch.Tensor:
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
        window,
        out,
    )
    return out


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts, scale, window):
        ctx.save_for_backward(q, k, v)
        ctx.starts, ctx.scale, ctx.window = starts.tolist(), scale, window
        return _contiguous(q, k, v, starts, scale, window)

    @staticmethod
    def backward(ctx, grad):
        wide = [x.float() for x in ctx.saved_tensors]
        grads = [torch.zeros_like(x) for x in wide]
        for start, stop in itertools.pairwise(ctx.starts):
            for a in range(start, stop, ROWS):
                b = min(a + ROWS, stop)
                low = max(start, a - ctx.window + 1)
                spans = slice(a, b), slice(low, b), slice(low, b)
                qs, ks, vs = (x[span] for x, span in zip(wide, spans, strict=True))
                found = _gradients(qs, ks, vs, grad[a:b].float(), ctx.scale, ctx.window)
                for whole, span, part in zip(grads, spans, found, strict=True):
                    whole[span] += part
        return *(x.bfloat16() for x in grads), None, None, None


def _gradients(q, k, v, grad, scale, window):
    """Gradients of the last len(q) tokens of keys k and v, fp32; softmax is computed again."""
    late, group = len(k) - len(q), q.shape[1] // k.shape[1]
    behind = torch.arange(len(q))[:, None] + late - torch.arange(len(k))[None]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        qs, ks, vs = (x.transpose(0, 1) for x in leaves)
        ks, vs = (x.repeat_interleave(group, 0) for x in (ks, vs))
        s = (qs @ ks.mT * scale).masked_fill((behind < 0) | (behind >= window), -torch.inf)
        return torch.autograd.grad((s.softmax(-1) @ vs).transpose(0, 1), leaves, grad)


def _probe() -> int:
    # Three requests: one token alone; one shorter than the window; one that leaves a partition
    # behind, begins inside of one and crosses into the next.
    ends = [0, 1, 40, 40 + 2 * PARTITION + 8]
    q = samples.bf16((ends[-1], 6, 32), 1, -4, 3)
    k, v = (samples.bf16((ends[-1], 2, 32), seed, -4, 3) for seed in (2, 3))
    # Before and after rounding: bf16 hides most changes of order.
    return mixsum(
        torch.cat(
            [
                _contiguous(q, k, v, np.array(ends), 32**-0.5, PARTITION - 99, dtype).float()
                for dtype in (torch.float32, torch.bfloat16)
            ]
        )
    )


registry.register(
    registry.Implementation(
        region=REGION,
        id="attention.window.cpu.1",
        platform="cpu",
        constants={"lanes": LANES, "partition": PARTITION},
        modules=(
            "samebits.ops.jit",
            "samebits.ops.scalar",
            "samebits.ops.vector",
            "samebits.ops.attention.cpu",
            "samebits.ops.window_attention",
            "samebits.ops.window_attention.cpu",
        ),
        probe=_probe,
    )
)
