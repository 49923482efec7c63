"""Attention on Hopper: checks, counts and gradients; the schedule is `sm90` in the README."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from samebits.bits import mixsum
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.attention import triton
from samebits.ops.attention.tables import check_packed
from samebits.ops.attention.triton import PARTITION, TILE

__all__ = ["paged", "varlen"]


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
    """`samebits.ops.attention.paged` on CUDA; the tables are int32 on the GPU.

    The host reads no table, so that a call can be captured; the engine answers for their values and
    for `most` and `longest`, without which SB0416. Where `most` is 1 the partitions of a request
    run side by side, for at most `longest` keys. Rows of no request are not written. Counts the
    rows of q. Refuses with SB0413, SB0414, SB0416, SB0420, SB0421.
    """
    if most is None or longest is None or most < 1 or longest < most:
        raise Refused(
            "SB0416",
            seen=f"most {most}, longest {longest}",
            required="the largest numbers of query tokens and of keys, 1 <= most <= longest",
            hint="samebits explain SB0416",
        )
    if out is not None and (
        out.shape != q.shape
        or out.dtype != q.dtype
        or out.device != q.device
        or not out.is_contiguous()
    ):
        raise Refused(
            "SB0413",
            seen=f"out {list(out.shape)} {out.dtype} with strides {list(out.stride())}",
            required=f"contiguous {list(q.shape)} {q.dtype} on {q.device}",
            hint="samebits explain SB0413",
        )
    tables = block_table, query_start, seq_lens
    if most == 1:
        y = triton.decode(q, key_cache, value_cache, *tables, longest, scale, out)
    else:
        y = triton.paged(q, key_cache, value_cache, *tables, most, scale, out=out)
    registry.count_served("attention", q.shape[0])
    return y


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> torch.Tensor:
    """`samebits.ops.attention.varlen` on CUDA; cu_seqlens on either device is read by the host.

    The backward is torch's flash attention, recomputed per run of equally long sequences in its
    deterministic form: no atomics, no L x L matrix. Refuses with SB0414, SB0415, SB0420, SB0421.
    """
    starts = cu_seqlens.detach().cpu().numpy().astype(np.int64)
    check_packed(q, k, starts)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        y = _Varlen.apply(q, k, v, starts, scale)
    else:
        y = _packed(q, k, v, starts, scale)
    registry.count_served("attention", q.shape[0])
    return y


def _packed(q, k, v, starts: np.ndarray, scale: float) -> torch.Tensor:
    at = torch.from_numpy(starts.astype(np.int32)).to(q.device)
    return triton.varlen(q, k, v, at, int(np.diff(starts).max(initial=0)), scale)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts, scale):
        ctx.save_for_backward(q, k, v)
        ctx.starts, ctx.scale = starts, scale
        return _packed(q, k, v, starts, scale)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        for count, length, first in _runs(ctx.starts):
            span = slice(first, first + count * length)
            parts = _gradients(q[span], k[span], v[span], grad[span], count, ctx.scale)
            for whole, part in zip(grads, parts, strict=True):
                whole[span] = part
        return *grads, None, None


def _runs(starts: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(number, length, first row) of every run of equally long sequences; empty ones left out."""
    first = 0
    for length, run in itertools.groupby(np.diff(starts).tolist()):
        count = len(list(run))
        if length:
            yield count, length, first
        first += count * length


def _gradients(q, k, v, grad, count: int, scale: float) -> tuple[torch.Tensor, ...]:
    """Gradients of `count` causal sequences: q and grad [count * L, H, D], k and v [.., G, D]."""
    group = q.shape[1] // k.shape[1]

    def batched(x: torch.Tensor) -> torch.Tensor:
        return x.detach().reshape(count, -1, *x.shape[1:]).transpose(1, 2)

    def wide(x: torch.Tensor) -> torch.Tensor:
        return batched(x).repeat_interleave(group, dim=1)

    def narrow(x: torch.Tensor, heads: int) -> torch.Tensor:
        x = x.unflatten(1, (heads, -1)).float().sum(2)  # heads of one group share a key head
        return x.transpose(1, 2).reshape(-1, *k.shape[1:]).to(k.dtype)

    qs, ks, vs = (x.requires_grad_() for x in (batched(q), wide(k), wide(v)))
    with torch.enable_grad(), _deterministic(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        y = torch.nn.functional.scaled_dot_product_attention(
            qs, ks, vs, is_causal=True, scale=scale
        )
        dq, dk, dv = torch.autograd.grad(y, (qs, ks, vs), batched(grad.to(q.dtype)))
    dq = dq.transpose(1, 2).reshape(q.shape)
    return dq, narrow(dk, k.shape[1]), narrow(dv, k.shape[1])


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """torch chooses the backward without atomics; its setting is then what it was."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warn)


def _probe() -> int:
    # Two requests: one token alone, and one that crosses a partition with an incomplete tile; then
    # its last token by the kernels that decode.
    tokens = PARTITION + 8
    q = samples.bf16((tokens, 6, 64), 1, -4, 3).cuda()
    k, v = (samples.bf16((tokens, 2, 64), seed, -4, 3).cuda() for seed in (2, 3))
    packed = _packed(q, k, v, np.array([0, 1, tokens]), 64**-0.5)
    keys, values = (x.new_zeros(18, 16, 2, 64) for x in (k, v))
    for cache, x in ((keys, k), (values, v)):
        cache.view(-1, 2, 64)[: tokens - 1] = x[1:]

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=q.device)

    table = torch.arange(18, dtype=torch.int32, device=q.device)[None]
    last = triton.decode(
        q[-1:], keys, values, table, integers(0, 1), integers(tokens - 1), tokens, 64**-0.5
    )
    return mixsum(torch.cat([packed, last]))


registry.register(
    registry.Implementation(
        region="attention",
        id="attention.sm90.1",
        platform="sm90",
        constants={"partition": PARTITION, "tile": TILE, "exp2": "ex2.approx.ftz.f32"},
        modules=(
            "samebits.ops.gpu",
            "samebits.ops.device",
            "samebits.ops.attention",
            "samebits.ops.attention.cpu",  # the length of a partition
            "samebits.ops.attention.triton",
            "samebits.ops.attention.sm90",
        ),
        probe=_probe,
    )
)
