"""silu_mul, one rounding at a time in plain torch."""

from __future__ import annotations

import torch

from samebits.ops.scalar import reference_exp32, reference_narrow


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2F] bf16 -> [..., F] bf16; see the package for the order."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    s = 1 / (1 + reference_exp32(-gate))
    return reference_narrow((gate * s) * up)
