"""Attention on Hopper: checks, counts and gradients; the schedule is `sm90` in the README."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from samebits.bits import mixsum
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.attention import (
    gluon_backward,
    gluon_parts,
    gluon_rows,
    triton,
    triton_backward,
)
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

    Gradients come from the output and the norms of its rows, with all sums in a fixed order.
    Refuses with SB0414, SB0415, SB0420, SB0421.
    """
    starts = cu_seqlens.detach().cpu().numpy().astype(np.int64)
    check_packed(q, k, starts)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        y = _Varlen.apply(q, k, v, starts, scale)
    else:
        y = _packed(q, k, v, *_cuts(q, starts), scale)
    registry.count_served("attention", q.shape[0])
    return y


def _cuts(q: torch.Tensor, starts: np.ndarray) -> tuple[torch.Tensor, int]:
    """`starts` beside q, int32, and the longest sequence."""
    at = torch.from_numpy(starts.astype(np.int32)).to(q.device)
    return at, int(np.diff(starts).max(initial=0))


def kernels(size: int) -> tuple[ModuleType, ModuleType]:
    """Modules that hold `varlen` and `gradients` of packed sequences for heads of `size`."""
    if size in gluon_parts.SIZES:
        return gluon_rows, gluon_backward
    return triton, triton_backward


def _packed(q, k, v, at: torch.Tensor, longest: int, scale: float, norms=None) -> torch.Tensor:
    rows, _ = kernels(q.shape[-1])
    return rows.varlen(q, k, v, at, longest, scale, norms=norms)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts, scale):
        at, ctx.longest = _cuts(q, starts)
        norms = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        y = _packed(q, k, v, at, ctx.longest, scale, norms)
        ctx.save_for_backward(q, k, v, y, norms, at)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, grad):
        q, k, v, y, norms, at = ctx.saved_tensors
        _, back = kernels(q.shape[-1])
        dy = grad.to(q.dtype)
        return *back.gradients(q, k, v, y, norms, dy, at, ctx.longest, ctx.scale), None, None


def _probe() -> int:
    # Two requests: one token alone, and one that crosses a partition with an incomplete tile; then
    # its last token by the kernels that decode.
    tokens = PARTITION + 8
    q = samples.bf16((tokens, 6, 64), 1, -4, 3).cuda()
    k, v = (samples.bf16((tokens, 2, 64), seed, -4, 3).cuda() for seed in (2, 3))
    packed = _packed(q, k, v, *_cuts(q, np.array([0, 1, tokens])), 64**-0.5)
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
            "samebits.ops.attention.gluon_parts",
            "samebits.ops.attention.gluon_rows",
            "samebits.ops.gdn.gluon_scan",  # the rounding of outputs and weights
            "samebits.ops.attention.sm90",
        ),
        probe=_probe,
    )
)
