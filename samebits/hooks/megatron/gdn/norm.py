"""The two norms of a hybrid block with Megatron's constructor, on the shared operators."""

from __future__ import annotations

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from samebits.ops import gated_rms_norm, rms_norm


class _Weighted(torch.nn.Module):
    """`weight` [hidden_size] bf16."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))


class ZeroCentredRMSNorm(_Weighted):
    """x [..., hidden_size] bf16 -> same shape; the factor is 1 + weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] bf16 -> same shape."""
        return rms_norm.rms_norm(x, self.weight, self.eps, zero_centred=True)


class GatedRMSNorm(_Weighted):
    """x [..., hidden_size] bf16 or fp32, z bf16 -> bf16; all heads share the plain weight."""

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """x [..., V] as the core's schedule leaves it, z [..., V] bf16 -> [..., V] bf16."""
        return gated_rms_norm.gated_rms_norm(
            x, z, shared_by_ranks(self.weight), self.eps, wide=x.dtype == torch.float32
        )


def shared_by_ranks(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself; its gradient is summed over the ranks, each of which sees its own heads.

    Megatron sums such gradients for the q and k norms of full attention only.
    """
    return copy_to_tensor_model_parallel_region(weight, group=get_tensor_model_parallel_group())
