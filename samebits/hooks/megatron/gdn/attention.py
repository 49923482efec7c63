"""Full attention with an output gate: Megatron's module, the gate on the shared operator."""

from __future__ import annotations

import torch
from megatron.core.transformer.attention import SelfAttention

from samebits.ops import output_gate


class GatedSelfAttention(SelfAttention):
    """Needs `config.attention_output_gate`; queries and gates come from one projection."""

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x [s, b, H * D] bf16, gate [s, b, H, D] bf16 -> [s, b, H * D] bf16."""
        return output_gate.output_gate(x, gate.reshape(x.shape))
