"""The hybrid block: gated delta nets and gated full attention in the configured pattern.

Parts of aligned regions are ours; all others are Megatron's local ones and those of `stock`.
"""

from __future__ import annotations

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
)
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from samebits import runtime
from samebits.errors import Refused
from samebits.hooks.megatron.gdn import stock
from samebits.hooks.megatron.gdn.attention import GatedSelfAttention
from samebits.hooks.megatron.gdn.layer import GatedDeltaNet
from samebits.hooks.megatron.gdn.norm import GatedRMSNorm, ZeroCentredRMSNorm
from samebits.hooks.megatron.spec import SamebitsSpecProvider, attention_spec, layer_spec


class HybridSpecProvider(SamebitsSpecProvider):
    """The dense provider's answers, but for zero-centred norms and gated attention."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False):
        """Every norm over the hidden size, and of queries and keys, adds 1 to its weight."""
        ours = runtime.aligned("norm.rms_zero_centred")
        return ZeroCentredRMSNorm if ours else stock.TorchZeroCentredNorm

    def self_attention(self) -> type:
        """Attention whose output is gated by the shared operator where that is aligned."""
        return GatedSelfAttention if runtime.aligned("attention.gate") else super().self_attention()


def refuse_unproved(config: TransformerConfig) -> None:
    """SB0605 for another linear attention, norm or gate than the operators compute."""
    seen = {
        "experimental_attention_variant": config.experimental_attention_variant,
        "normalization": config.normalization,
        "layernorm_zero_centered_gamma": config.layernorm_zero_centered_gamma,
        "attention_output_gate": config.attention_output_gate,
        "qk_layernorm": config.qk_layernorm,
    }
    required = dict(zip(seen, ("gated_delta_net", "RMSNorm", True, True, True), strict=True))
    wrong = [name for name in seen if seen[name] != required[name]]
    if wrong:
        raise Refused(
            "SB0605",
            seen=", ".join(f"{name}={seen[name]}" for name in wrong),
            required=", ".join(f"{name}={required[name]}" for name in wrong),
            hint="samebits explain SB0605",
        )


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """One spec for each layer of `config.linear_attention_freq`, and the final norm."""
    refuse_unproved(config)
    provider = HybridSpecProvider()
    ours = runtime.aligned("gdn.core")
    net, norm = (GatedDeltaNet, GatedRMSNorm) if ours else stock.delta_net()
    linear = ModuleSpec(
        module=net,
        submodules=GatedDeltaNetSubmodules(
            in_proj=provider.column_parallel_linear(),
            out_norm=norm,
            out_proj=provider.row_parallel_linear(),
        ),
    )
    # By the pattern's entries: 1 is linear attention.
    layers = [layer_spec(provider, a) for a in (attention_spec(config, provider), linear)]
    return TransformerBlockSubmodules(
        layer_specs=[layers[kind] for kind in get_linear_attention_pattern(config)],
        layer_norm=provider.layer_norm(rms_norm=True),
    )
