"""output_gate, one rounding at a time in plain torch."""

from __future__ import annotations

import torch

from samebits.ops.gate_scalar import reference_sigmoid32
from samebits.ops.scalar import reference_narrow


def output_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x, gate [..., N] bf16 -> [..., N] bf16; see the package for the order."""
    return reference_narrow(x.float() * reference_sigmoid32(gate.float()))
