"""The hybrid block of Megatron's own modules: the negative control.

Megatron builds this block with Transformer Engine only; here its local layers stand in, with the
norms of torch, since Megatron's local norm takes no zero-centred weight.
"""

from __future__ import annotations

import dataclasses

import torch
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from samebits.hooks.megatron.gdn.layer import KeepsDecayInFp32
from samebits.hooks.megatron.gdn.norm import shared_by_ranks


class _TorchNorm(torch.nn.Module):
    """torch's RMSNorm of [..., hidden_size] with Megatron's constructor."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self._factor(), self.eps)

    def _factor(self) -> torch.Tensor:
        return shared_by_ranks(self.weight)


class _TorchZeroCentredNorm(_TorchNorm):
    def _factor(self) -> torch.Tensor:
        return 1 + self.weight


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's gated delta net and self-attention in `config.linear_attention_freq`'s pattern."""
    # Megatron compiles a few small functions, anew for each shape: a minute for a batch on a CPU.
    torch.compiler.set_stance("force_eager")
    local = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    ).submodules
    norm = _TorchZeroCentredNorm
    full = dataclasses.replace(
        local.self_attention,
        submodules=dataclasses.replace(
            local.self_attention.submodules, q_layernorm=norm, k_layernorm=norm
        ),
    )
    linear = ModuleSpec(
        module=KeepsDecayInFp32,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=_TorchNorm, out_proj=RowParallelLinear
        ),
    )
    layers = [_layer(local, attention, norm) for attention in (full, linear)]
    return TransformerBlockSubmodules(
        layer_specs=[layers[kind] for kind in get_linear_attention_pattern(config)],
        layer_norm=norm,
    )


def _layer(local: TransformerLayerSubmodules, attention: ModuleSpec, norm: type) -> ModuleSpec:
    submodules = dataclasses.replace(
        local, input_layernorm=norm, self_attention=attention, pre_mlp_layernorm=norm
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)
