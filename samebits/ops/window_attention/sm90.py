"""Windowed attention on Hopper: checks, counts and gradients; the law is `reference_sm90.py`."""

from __future__ import annotations

import numpy as np
import torch

from samebits.bits import mixsum
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.attention.sm90 import _cuts
from samebits.ops.attention.tables import check_packed
from samebits.ops.window_attention import REGION, triton, triton_backward
from samebits.ops.window_attention.tables import check_out, checked
from samebits.ops.window_attention.triton import PARTITION, TILE

__all__ = ["paged", "varlen"]


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
    """`samebits.ops.window_attention.paged` on CUDA; the tables are int32 on the GPU.

    `most` and `longest` as in `attention.sm90.paged`: the host reads no table. Rows of no request
    are not written. Counts the rows of q. Refuses with SB0413, SB0414, SB0416, SB0417, SB0420,
    SB0421.
    """
    window = checked(window)
    check_out(out, q)
    if most is None or longest is None or not 1 <= most <= longest:
        raise Refused(
            "SB0416",
            seen=f"most {most}, longest {longest}",
            required="the largest numbers of query tokens and of keys, 1 <= most <= longest",
            hint="samebits explain SB0416",
        )
    operands = q, key_cache, value_cache, block_table, query_start, seq_lens
    if most == 1:
        y = triton.decode(*operands, longest, scale, window, out)
    else:
        y = triton.paged(*operands, most, scale, window, out=out)
    registry.count_served(REGION, q.shape[0])
    return y


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """`samebits.ops.window_attention.varlen` on CUDA; cu_seqlens on either device is read by the
    host. Refuses with SB0414, SB0415, SB0417, SB0420, SB0421.
    """
    window = checked(window)
    starts = cu_seqlens.detach().cpu().numpy().astype(np.int64)
    check_packed(q, k, starts)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        y = _Varlen.apply(q, k, v, starts, scale, window)
    else:
        y = triton.varlen(q, k, v, *_cuts(q, starts), scale, window)
    registry.count_served(REGION, q.shape[0])
    return y


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts, scale, window):
        at, longest = _cuts(q, starts)
        norms = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        y = triton.varlen(q, k, v, at, longest, scale, window, norms=norms)
        ctx.save_for_backward(q, k, v, y, norms, at)
        ctx.numbers = longest, scale, window
        return y

    @staticmethod
    def backward(ctx, grad):
        q, k, v, y, norms, at = ctx.saved_tensors
        operands = q, k, v, y, norms, grad.to(q.dtype), at
        return *triton_backward.gradients(*operands, *ctx.numbers), None, None, None


def _probe() -> int:
    # Two sequences: one token alone, and one that leaves a partition and a tile behind; then its
    # last token by the kernels that decode.
    tokens, page, window, scale = 2 * PARTITION + 8, 16, PARTITION - 99, 64**-0.5
    q = samples.bf16((tokens, 6, 64), 1, -4, 3).cuda()
    k, v = (samples.bf16((tokens, 2, 64), seed, -4, 3).cuda() for seed in (2, 3))
    packed = triton.varlen(q, k, v, *_cuts(q, np.array([0, 1, tokens])), scale, window)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=q.device)

    pages = -(-tokens // page)
    keys, values = (x.new_zeros(pages, page, 2, 64) for x in (k, v))
    for cache, x in ((keys, k), (values, v)):
        cache.view(-1, 2, 64)[: tokens - 1] = x[1:]
    table = torch.arange(pages, dtype=torch.int32, device=q.device)[None]
    tables = table, integers(0, 1), integers(tokens - 1)
    last = triton.decode(q[-1:], keys, values, *tables, tokens, scale, window)
    return mixsum(torch.cat([packed, last]))


registry.register(
    registry.Implementation(
        region=REGION,
        id="attention.window.sm90.1",
        platform="sm90",
        constants={"partition": PARTITION, "tile": TILE, "exp2": "ex2.approx.ftz.f32"},
        modules=(
            "samebits.ops.gpu",
            "samebits.ops.device",
            "samebits.ops.attention.cpu",  # the length of a partition
            "samebits.ops.attention.triton",
            "samebits.ops.window_attention",
            "samebits.ops.window_attention.triton",
            "samebits.ops.window_attention.sm90",
        ),
        probe=_probe,
    )
)
