"""Token embedding on CUDA: copies of rows, so the bits of every platform."""

from __future__ import annotations

import torch
import torch.distributed as dist

from samebits.bits import mixsum
from samebits.ops import gpu, registry, samples
from samebits.ops.checks import place, require_shard

__all__ = ["lookup"]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, start, group):
        ctx.save_for_backward(ids)
        ctx.rows, ctx.start = weight.shape[0], start
        return _forward(ids, weight, start, group)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        return None, _weight_grad(ids, grad, ctx.rows, ctx.start), None, None


def lookup(
    ids: torch.Tensor,
    weight: torch.Tensor,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`samebits.ops.embedding.lookup` on CUDA, without its check of ids.

    The host reads no id, so that a call can be captured: one outside of a single rank's table
    stops the GPU with a device-side assertion; one that no rank of a group owns gives zero bits.
    Gradient rows of equal ids are added in an order that does not change from run to run. Refuses
    with SB0420, SB0421, SB0423.
    """
    gpu.require_dtype("ids", ids, torch.int64)
    holds = weight.dim() == 2 and weight.numel() > 0
    gpu.require("weight", weight, torch.bfloat16, holds, "[V_local, H]", dense=False)
    ranks, rank = place(group)
    rows = weight.shape[0]
    require_shard("SB0423", "rows", (ranks, rank), start=start, held=rows, width=rows)
    registry.count_served("embedding", ids.numel())
    shared = group if ranks > 1 else None
    if torch.is_grad_enabled() and weight.requires_grad:
        return _Lookup.apply(ids, weight, start, shared)
    return _forward(ids, weight, start, shared)


def _forward(
    ids: torch.Tensor, weight: torch.Tensor, start: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    weight = weight.detach()
    if group is None:
        return torch.nn.functional.embedding(ids, weight)
    local = ids - start
    owned = (local >= 0) & (local < weight.shape[0])
    rows = torch.nn.functional.embedding(torch.where(owned, local, 0), weight)
    # Zero bytes, not a product with zero: that would keep a NaN and turn a -1 into a -0.
    rows = torch.where(owned[..., None], rows.view(torch.int16), 0).contiguous()
    dist.all_reduce(rows.view(torch.uint8), op=dist.ReduceOp.SUM, group=group)
    return rows.view(torch.bfloat16)


def _weight_grad(ids: torch.Tensor, grad: torch.Tensor, rows: int, start: int) -> torch.Tensor:
    """[rows, H] bf16: sums over equal ids in fp32, one rounding. No atomics: ids are sorted."""
    local = ids.reshape(-1) - start
    at = torch.where((local >= 0) & (local < rows), local, rows)  # others meet in a row of no one
    total = grad.new_zeros((rows + 1, grad.shape[-1]), dtype=torch.float32)
    total.index_put_((at,), grad.reshape(-1, grad.shape[-1]).float(), accumulate=True)
    return total[:rows].to(torch.bfloat16)


def _probe() -> int:
    ids = torch.tensor([[0, 6, 2], [2, 5, 1]]).cuda()
    return mixsum(_forward(ids, samples.bf16((7, 11), 5).cuda(), 0, None))


registry.register(
    registry.Implementation(
        region="embedding",
        id="embedding.sm90.1",
        platform="sm90",
        constants={"combine": "selection"},
        modules=("samebits.ops.gpu", "samebits.ops.embedding", "samebits.ops.embedding.sm90"),
        probe=_probe,
    )
)
