"""Parts of the hybrid block that are not ours: the negative control, and stock regions of others.

Megatron builds this block with Transformer Engine only; here its local layers stand in, with the
norms of torch, since Megatron's local norm takes no zero-centred weight.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from samebits.hooks.megatron.gdn.layer import KeepsDecayInFp32
from samebits.hooks.megatron.gdn.norm import shared_by_ranks


class TorchNorm(torch.nn.Module):
    """torch's RMSNorm of [..., hidden_size] with Megatron's constructor."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] bf16 -> same shape, in the order of reduction that torch chooses."""
        return torch.nn.functional.rms_norm(x, self.weight.shape, self._factor(), self.eps)

    def _factor(self) -> torch.Tensor:
        return shared_by_ranks(self.weight)


class TorchZeroCentredNorm(TorchNorm):
    """The same with the factor 1 + weight."""

    def _factor(self) -> torch.Tensor:
        return 1 + self.weight


def delta_net() -> tuple[type, type]:
    """Megatron's gated delta net, and the norm of its output."""
    # Megatron compiles a few small functions, anew for each shape: a minute for a batch on a CPU.
    torch.compiler.set_stance("force_eager")
    return KeepsDecayInFp32, TorchNorm
