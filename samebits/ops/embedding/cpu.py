"""Row selection. No arithmetic on values: only copies, and integer sums with zero bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist


def local_rows(ids: torch.Tensor, weight: torch.Tensor, start: int) -> torch.Tensor:
    """[..., H] bf16: the owned rows among `ids`, zero bits for ids of other ranks."""
    local = ids - start
    owned = (local >= 0) & (local < weight.shape[0])
    rows = weight.detach()[torch.where(owned, local, 0)]
    rows[~owned] = 0
    return rows


def forward(
    ids: torch.Tensor, weight: torch.Tensor, start: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """[..., H] bf16; ids are in range. With a group, byte sums in which one term is not zero."""
    if group is None:
        return weight.detach()[ids]
    rows = local_rows(ids, weight, start)
    dist.all_reduce(rows.view(torch.uint8), op=dist.ReduceOp.SUM, group=group)
    return rows


def weight_grad(ids: torch.Tensor, grad: torch.Tensor, rows: int, start: int) -> torch.Tensor:
    """[rows, H] bf16: sums over equal ids in fp32, one rounding."""
    local = ids.reshape(-1) - start
    owned = (local >= 0) & (local < rows)
    total = torch.zeros(rows, grad.shape[-1], dtype=torch.float32)
    total.index_add_(0, local[owned], grad.reshape(-1, grad.shape[-1])[owned].float())
    return total.to(torch.bfloat16)
