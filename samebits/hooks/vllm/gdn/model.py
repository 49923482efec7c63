"""The text-only Qwen3.5 decoder, of vLLM's Qwen3-Next layers.

vLLM registers Qwen3.5 with its vision tower only, and the module that holds the text-only class
cannot be imported without image libraries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP
from vllm.model_executor.models.qwen3_next import Qwen3NextDecoderLayer
from vllm.model_executor.models.utils import maybe_prefix

from samebits.errors import Refused
from samebits.hooks.vllm.gdn import layers, state

# published projection -> (fused parameter, its part)
_FUSED: dict[str, tuple[str, Any]] = {
    "in_proj_qkv": ("in_proj_qkvz", (0, 1, 2)),
    "in_proj_z": ("in_proj_qkvz", 3),
    "in_proj_b": ("in_proj_ba", 0),
    "in_proj_a": ("in_proj_ba", 1),
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class DecoderLayer(Qwen3NextDecoderLayer):
    """vLLM's decoder layer with the layers of this package inside."""

    def __init__(self, vllm_config: VllmConfig, index: int, prefix: str) -> None:
        nn.Module.__init__(self)
        config = vllm_config.model_config.hf_text_config
        self.layer_type, self.layer_scale = config.layer_types[index], False
        if self.layer_type == "linear_attention":
            self.linear_attn = layers.delta_net_class()(
                config=config, vllm_config=vllm_config, prefix=f"{prefix}.linear_attn"
            )
        else:
            self.self_attn = layers.attention_class()(
                config,
                model_config=vllm_config.model_config,
                cache_config=vllm_config.cache_config,
                prefix=f"{prefix}.self_attn",
            )
        self.mlp = Qwen2MoeMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, prefix=f"{prefix}.mlp"
        )
        self.input_layernorm = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Decoder(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(vllm_config, index, f"{prefix}.layers.{index}")
            for index in range(config.num_hidden_layers)
        )
        self.norm = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """hidden_states [T, H] bf16 at `positions` -> [T, H] after the last norm."""
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, positions=positions)
        return self.norm(hidden_states, residual)[0]


class Qwen3_5ForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """Published tensor names are those of the text checkpoint; no pipeline stages."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_text_config
        self.model = Decoder(vllm_config, maybe_prefix(prefix, "model"))
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(
                config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
            )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] -> [T, H] bf16."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Token ids or embeddings of a step -> hidden states [T, H] bf16."""
        rows = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model(rows, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """hidden_states [T, H] bf16 -> logits [T, V] fp32."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy published tensors; returns the parameters that were filled."""
        parameters = dict(self.named_parameters())
        filled = set()
        for name, tensor in weights:
            parent, _, leaf = name.removesuffix(".weight").rpartition(".")
            fused, *part = _FUSED.get(leaf, (leaf,))
            target = f"{parent}.{fused}.weight" if part else name
            if target not in parameters:
                raise Refused(
                    "SB0508",
                    seen=f"`{name}`",
                    required="the published name of a tensor of the model",
                    hint="samebits explain SB0508",
                )
            parameter = parameters[target]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor, *part)
            filled.add(target)
        return filled

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig):
        """Shapes of the tensors of one state, for vLLM's cache."""
        return tuple(shape for _, shape, _ in cls._spec(vllm_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig):
        """Their dtypes, in the same order."""
        return tuple(dtype for _, _, dtype in cls._spec(vllm_config))

    @classmethod
    def get_mamba_state_copy_func(cls):
        """A block's state moves whole, every tensor of it."""
        return (get_temporal_copy_spec,) * state.tensors()

    @staticmethod
    def _spec(vllm_config: VllmConfig) -> state.Spec:
        model = vllm_config.model_config
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return state.spec_of(model.hf_text_config, model.dtype, ranks)
