"""SwiGLU activation module with Megatron's constructor, on the shared operator."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from samebits.ops import silu_mul


class SiluMul(torch.nn.Module):
    """gate_up [..., 2 F] bf16 (gate first) -> [..., F] bf16."""

    def __init__(self, *, config: TransformerConfig):
        super().__init__()

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [..., 2 F] bf16 -> [..., F] bf16, by `samebits.ops.silu_mul`."""
        return silu_mul.silu_mul(gate_up)
