"""Out-of-tree zero-centred norm: vLLM instantiates it instead of its own class."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm

from samebits.ops import rms_norm


class AlignedGemmaRMSNorm(GemmaRMSNorm):
    """x [..., H] bf16 times 1 + weight; with a residual, x + residual is rounded to bf16 first."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        """x [..., H] bf16; with a residual, x + residual is rounded to bf16 before it is normed."""
        if residual is None:
            return self._norm(x)
        residual = x + residual
        return self._norm(residual), residual

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm.rms_norm(x, self.weight.data, self.variance_epsilon, zero_centred=True)


def register() -> None:
    """Register the class with vLLM's out-of-tree registry; once per process."""
    GemmaRMSNorm.register_oot(AlignedGemmaRMSNorm, name="GemmaRMSNorm")
