"""Rotary embedding against the same formula in torch operators, bf16, on this machine's threads."""

from __future__ import annotations

from functools import partial

import torch

from samebits.bench.timing import require_bits, row
from samebits.ops import rotary, samples
from samebits.ops.rotary import reference


def _native(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def rows() -> list[dict]:
    """Decode, small and large batches of SmolLM2's 9 query and 3 key heads."""
    table, cells = rotary.table(2048, 64, 1e5), []
    for count in (1, 16, 1024):
        x, positions = samples.bf16((count, 12, 64), 1, -3, 3), torch.arange(count)
        part, at = x[-4:], positions[-4:]
        require_bits("rotary", rotary.apply(part, at, table), reference.apply(part, at, 64, 1e5))
        cells.append(
            row(
                f"rotary {count}x12x64 bf16",
                partial(rotary.apply, x, positions, table),
                partial(_native, x, positions, table),
                "torch operators in fp32",
            )
        )
    return cells
