"""silu_mul against torch's silu and product, bf16, on this machine's threads."""

from __future__ import annotations

from functools import partial

import torch

from samebits.bench.timing import require_bits, row
from samebits.ops import samples
from samebits.ops.silu_mul import reference, silu_mul


def _native(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rows() -> list[dict]:
    """Decode, small and large batches of SmolLM2's intermediate size."""
    table = []
    for count in (1, 16, 1024):
        x = samples.bf16((count, 2 * 1536), 1, -3, 3)
        require_bits("silu_mul", silu_mul(x[:4]), reference.silu_mul(x[:4]))
        table.append(
            row(
                f"silu_mul {count}x1536 bf16",
                partial(silu_mul, x),
                partial(_native, x),
                "torch silu(gate) * up",
            )
        )
    return table
