"""RMSNorm module with Megatron's constructor, on the shared operator."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from samebits.errors import Refused
from samebits.ops import rms_norm


class RMSNorm(torch.nn.Module):
    """x [..., hidden_size] bf16 -> same shape; `weight` [hidden_size] bf16."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise Refused(
                "SB0605",
                seen=f"normalization {config.normalization}, "
                f"zero-centred weight {config.layernorm_zero_centered_gamma}",
                required="RMSNorm with a plain weight",
                hint="samebits explain SB0605",
            )
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] bf16 -> same shape, by `samebits.ops.rms_norm`."""
        return rms_norm.rms_norm(x, self.weight, self.eps)
