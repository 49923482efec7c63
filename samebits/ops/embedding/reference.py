"""Token embedding, one row at a time, whatever rank owns it."""

from __future__ import annotations

import torch


def lookup(ids: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    """ids [...] int64, shards of the table [V_local, H] bf16 in rank order -> [..., H] bf16."""
    rows = shards[0].shape[0]
    flat = [shards[int(i) // rows][int(i) % rows] for i in ids.reshape(-1)]
    return torch.stack(flat).reshape(*ids.shape, shards[0].shape[1])
