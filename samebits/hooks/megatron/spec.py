"""The spec provider: which class computes each part of a GPT layer.

Aligned, every part that does arithmetic is one of this package's modules over `samebits.ops`;
residual additions stay Megatron's (one bf16 addition each, elementwise). Stock, the layer is
Megatron's own local spec, untouched, and serves as negative control. Where only some regions are
aligned, the parts of all others are those of that local spec.
"""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from samebits import runtime
from samebits.errors import Refused
from samebits.hooks.megatron.activation import SiluMul
from samebits.hooks.megatron.attention import CoreAttention
from samebits.hooks.megatron.linear import ColumnParallel, RowParallel
from samebits.hooks.megatron.norm import RMSNorm


class SamebitsSpecProvider(LocalSpecProvider):
    """Megatron's provider protocol, answered with the shared operators where they are aligned."""

    def column_parallel_linear(self, biased: bool = False) -> type:
        """Linear layer whose output rows are split over ranks; `biased` if it is to add a bias."""
        region = "gemm.bias" if biased else "gemm.column"
        return _ours(region, ColumnParallel) or super().column_parallel_linear()

    def row_parallel_linear(self) -> type:
        """Linear layer whose inputs are split over ranks."""
        return _ours("gemm.row", RowParallel) or super().row_parallel_linear()

    def fuse_layernorm_and_linear(self) -> bool:
        """False: a norm is a layer of its own."""
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        """None: there is no fused layer."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False):
        """RMSNorm for every place, of queries and keys too."""
        return _ours("norm.rms", RMSNorm) or super().layer_norm(rms_norm, for_qk, has_residual)

    def self_attention(self) -> type:
        """Megatron's own module: it only connects the parts."""
        return SelfAttention

    def core_attention(self) -> type:
        """Attention between the linear layers."""
        return _ours("attention", CoreAttention) or super().core_attention()

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool):
        """Refused SB0605: experts have no operator here."""
        raise Refused(
            "SB0605",
            seen="a mixture-of-experts layer",
            required="a dense MLP",
            hint="samebits explain SB0605",
        )

    def activation_func(self) -> type:
        """The MLP's activation, gate and up in one tensor; asked for where it is aligned."""
        return SiluMul


def _ours(region: str, kind: type) -> type | None:
    """`kind` where `region` is aligned."""
    return kind if runtime.aligned(region) else None


def attention_spec(config: TransformerConfig, provider: SamebitsSpecProvider) -> ModuleSpec:
    """Causal self-attention from `provider`."""
    qk_norm = provider.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=provider.self_attention(),
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(config.add_qkv_bias),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def layer_spec(provider: SamebitsSpecProvider, attention: ModuleSpec) -> ModuleSpec:
    """One decoder layer around `attention`. Needs `config.use_te_activation_func`, the switch
    under which Megatron's MLP takes its activation from the provider, where that is aligned."""
    norm = provider.layer_norm(rms_norm=True, has_residual=True)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=get_mlp_module_spec_for_backend(
                provider, use_te_activation_func=runtime.aligned("act.silu_mul")
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules | ModuleSpec:
    """The decoder block for `GPTModel`: ours where aligned, Megatron's local spec when stock."""
    if config.experimental_attention_variant is not None:
        from samebits.hooks.megatron import gdn

        return gdn.block_spec(config)
    if not runtime.regions():
        return get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization=config.normalization
        )
    provider = SamebitsSpecProvider()
    layer = layer_spec(provider, attention_spec(config, provider))
    return TransformerBlockSubmodules(
        layer_specs=[layer] * config.num_layers, layer_norm=provider.layer_norm(rms_norm=True)
    )
