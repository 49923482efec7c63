"""Token embedding: a copy of table rows, also when ranks own parts of the table."""

from __future__ import annotations

import torch
import torch.distributed as dist

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.checks import place, require_dtype, require_ids, require_shape, require_shard
from samebits.ops.embedding import cpu

__all__ = ["lookup"]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, start, group):
        ctx.save_for_backward(ids)
        ctx.rows, ctx.start = weight.shape[0], start
        return cpu.forward(ids, weight, start, group)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        return None, cpu.weight_grad(ids, grad, ctx.rows, ctx.start), None, None


def lookup(
    ids: torch.Tensor,
    weight: torch.Tensor,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """ids [...] int64, weight [V_local, H] bf16 -> [..., H] bf16: row `id` of the whole table.

    Rank r of a `group` of t owns rows start = r * V_local to start + V_local, and every rank
    passes the same ids and gets the whole result. Ranks are combined by selection: the bytes of a
    row travel as integers, and every rank but its owner contributes zero bytes, so a -0 stays -0.

    Differentiable in weight: gradient rows are added in fp32 in the order of `ids`, rounded once;
    each rank gets the gradient of its own rows. Refuses other dtypes (SB0420), shapes (SB0421),
    ids that no rank owns (SB0422), and shards that do not tile the table (SB0423). CUDA tensors:
    `sm90.lookup`.
    """
    if weight.is_cuda:
        from samebits.ops.embedding import sm90

        return sm90.lookup(ids, weight, start, group)
    require_dtype("ids", ids, torch.int64)
    require_dtype("weight", weight, torch.bfloat16)
    require_shape("weight", weight, weight.dim() == 2 and weight.numel() > 0, "[V_local, H]")
    ranks, rank = place(group)
    rows = weight.shape[0]
    require_shard("SB0423", "rows", (ranks, rank), start=start, held=rows, width=rows)
    require_ids("SB0422", "token", ids, ranks * rows)
    registry.count_served("embedding", ids.numel())
    shared = group if ranks > 1 else None
    if torch.is_grad_enabled() and weight.requires_grad:
        return _Lookup.apply(ids, weight, start, shared)
    return cpu.forward(ids, weight, start, shared)


def _probe() -> int:
    ids = torch.tensor([[0, 6, 2], [2, 5, 1]])
    return mixsum(cpu.forward(ids, samples.bf16((7, 11), 5), 0, None))


registry.register(
    registry.Implementation(
        region="embedding",
        id="embedding.cpu.1",
        platform="cpu",
        constants={"combine": "selection"},
        modules=("samebits.ops.embedding", "samebits.ops.embedding.cpu"),
        probe=_probe,
    )
)
