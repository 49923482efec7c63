"""From a Hugging Face `config.json` to Megatron's real `GPTModel`.

Supported: dense decoders with RMSNorm, SwiGLU, rotary positions and grouped query attention -
Llama (SmolLM2), Qwen2 (biases of q, k and v), Qwen3 (q/k norms), and Qwen3.5's text model (gated
delta nets beside full attention with output gates, zero-centred norms, rotary positions over a part
of the head). Everything else is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samebits import runtime
from samebits.errors import Refused

HYBRID = "Qwen3_5ForCausalLM"
HEAD_DIM = 128  # of linear attention
QWEN2 = "Qwen2ForCausalLM"  # q, k and v have a bias, whatever the configuration says
# Name -> has q/k norms.
ARCHITECTURES = {"LlamaForCausalLM": False, QWEN2: False, "Qwen3ForCausalLM": True, HYBRID: True}


@dataclass(frozen=True)
class LinearAttention:
    """The gated delta nets of a hybrid model, and what comes with them: `rotary_share` of a head
    of full attention turns with the position. `pattern` has 1 for a linear layer and 0 for full
    attention."""

    pattern: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    rotary_share: float

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values, which pass through the convolution."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @staticmethod
    def of(config: dict, rope: dict, path: Path) -> LinearAttention:
        """Read a config of Qwen3.5's text model; SB0605 for what nobody proved or it leaves out."""
        sizes = _positive(
            config,
            path,
            *("linear_num_key_heads", "linear_num_value_heads"),
            *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
        )
        key_heads, value_heads, *head_dims, conv_width = sizes
        if value_heads % key_heads or any(size != HEAD_DIM for size in head_dims):
            raise _unproved(
                f"{key_heads} key heads of {head_dims[0]}, {value_heads} value heads of "
                f"{head_dims[1]} in {path}",
                f"linear attention with heads of {HEAD_DIM}, value heads a multiple of key heads",
            )
        return LinearAttention(
            pattern=_pattern(config, path),
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=head_dims[0],
            value_dim=head_dims[1],
            conv_width=conv_width,
            rotary_share=_rotary_share(config, rope, path),
        )


def _unproved(seen: str, required: str) -> Refused:
    return Refused("SB0605", seen=seen, required=required, hint="samebits explain SB0605")


def _positive(config: dict, path: Path, *names: str) -> list[int]:
    """Values of entries that must be there: the rollout engine would go on with defaults."""
    lacking = [n for n in names if not isinstance(config.get(n), int) or config[n] < 1]
    if lacking:
        raise _unproved(
            ", ".join(f"{n}={config.get(n)}" for n in lacking) + f" in {path}", "positive integers"
        )
    return [config[n] for n in names]


def _pattern(config: dict, path: Path) -> tuple[int, ...]:
    """1 for a linear layer, 0 for full attention, from `layer_types` or the interval instead."""
    kinds = {"linear_attention": 1, "full_attention": 0}
    layers, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        (interval,) = _positive(config, path, "full_attention_interval")
        return tuple(int((layer + 1) % interval > 0) for layer in range(layers))
    unknown = sorted({t for t in types if t not in kinds})
    if unknown or len(types) != layers:
        raise _unproved(
            f"{len(types)} layer_types, unknown {unknown}, in {path}",
            f"{layers}, each one of {', '.join(kinds)}",
        )
    return tuple(kinds[t] for t in types)


def _rotary_shares(config: dict, rope: dict) -> set[float]:
    """The share of a head that turns, wherever the config says it."""
    found = (place.get("partial_rotary_factor") for place in (rope, config))
    return {float(share) for share in found if share is not None}


def _rotary_share(config: dict, rope: dict, path: Path) -> float:
    shares = _rotary_shares(config, rope)
    if len(shares) != 1:
        raise _unproved(f"partial_rotary_factor {sorted(shares)} in {path}", "exactly one value")
    return shares.pop()


@dataclass(frozen=True)
class Architecture:
    """The numbers of a supported model. `model_type` and sizes as published."""

    name: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool
    qk_norm: bool
    qkv_bias: bool = False
    linear: LinearAttention | None = None

    def is_linear(self, layer: int) -> bool:
        """Whether decoder layer `layer` is a gated delta net."""
        return self.linear is not None and bool(self.linear.pattern[layer])

    @staticmethod
    def load(model_dir: Path) -> Architecture:
        """Read `config.json`; refuse what nobody proved (SB0601, SB0602, SB0605)."""
        path = Path(model_dir) / "config.json"
        config = json.loads(path.read_text())
        name = (config.get("architectures") or ["none"])[0]
        if name not in ARCHITECTURES:
            raise Refused(
                "SB0601",
                seen=f"architecture {name} in {path}",
                required=f"one of {', '.join(ARCHITECTURES)}",
                hint="samebits case list",
            )
        dtype = config.get("dtype") or config.get("torch_dtype")
        if dtype != "bfloat16":
            raise Refused(
                "SB0602",
                seen=f"dtype {dtype} in {path}",
                required="bfloat16",
                hint="samebits explain SB0602",
            )
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        _refuse_features(config, rope, path, name)
        heads = config["num_attention_heads"]
        return Architecture(
            name=name,
            model_type=config["model_type"],
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            norm_eps=float(config["rms_norm_eps"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=ARCHITECTURES[name],
            qkv_bias=name == QWEN2,
            linear=LinearAttention.of(config, rope, path) if name == HYBRID else None,
        )

    def refuse_tp(self, size: int) -> None:
        """SB0603 unless every rank gets whole head groups, FFN columns and vocabulary rows."""
        parts = {"key-value heads": self.kv_heads, "FFN width": self.ffn, "vocabulary": self.vocab}
        if self.linear is not None:
            parts["linear attention's key heads"] = self.linear.key_heads
        leaves = {}
        if runtime.aligned():
            contract = runtime.contract()
            leaves = {
                f"leaves of {region}": contract.plan(region).leaves
                for region in ("gemm.row", "logprob")
            }
        bad = {what: n for what, n in (parts | leaves).items() if size < 1 or n % size}
        if bad:
            raise Refused(
                "SB0603",
                seen=f"tensor-parallel size {size}; "
                + ", ".join(f"{what} {n}" for what, n in bad.items()),
                required="a size that divides all of them",
                hint="samebits explain SB0603",
            )


def _refuse_features(config: dict, rope: dict, path: Path, name: str) -> None:
    hybrid = name == HYBRID
    width = config["num_attention_heads"] * (config.get("head_dim") or 0)
    found = {
        "attention_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "attention_dropout": config.get("attention_dropout", 0) > 0,
        "hidden_dropout": config.get("hidden_dropout", 0) > 0,
        "rope scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
        "mrope_section": "mrope_section" in rope,  # positions in more than one dimension
        "partial rotary": not hybrid and bool(_rotary_shares(config, rope) - {1.0}),
        "sliding window": bool(config.get("use_sliding_window", False)),
        "pretraining_tp": config.get("pretraining_tp", 1) != 1,
        "activation": config.get("hidden_act", "silu") != "silu",
        "attn_output_gate": bool(config.get("attn_output_gate", hybrid)) != hybrid,
        # "swish" is another name of silu
        "output_gate_type": config.get("output_gate_type", "silu") not in ("silu", "swish"),
        "layer_scale": bool(config.get("layer_scale", False)),
        # Of the rollout engine's Qwen2: it takes the size of a head from the two others.
        "head_dim": name == QWEN2 and width not in (0, config["hidden_size"]),
        "qk_norm": bool(config.get("qk_norm", False)),
        "is_causal": not config.get("is_causal", True),
        "dual_chunk_attention_config": config.get("dual_chunk_attention_config") is not None,
    }
    names = [name for name, present in found.items() if present]
    if names:
        raise _unproved(
            f"{', '.join(names)} in {path}",
            "no dropout, rotary scaling or sections, window, chunks, layer scale, or activation "
            "other than silu; a bias of queries, keys and values in Qwen2, whose heads divide the "
            "hidden size, and no other; an output gate of attention in hybrid models only",
        )


def transformer_config(arch: Architecture, tp: int):
    """Megatron's configuration of `arch`: bf16, no fusion, no dropout, no bias but of q, k, v."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=arch.ffn,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_te_activation_func=runtime.aligned("act.silu_mul"),
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **_hybrid_options(arch.linear),
    )


def _hybrid_options(linear: LinearAttention | None) -> dict[str, Any]:
    """What Megatron's configuration says of gated delta nets, and of the attention beside them."""
    if linear is None:
        return {}
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": list(linear.pattern),
        "linear_conv_kernel_dim": linear.conv_width,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "deterministic_mode": True,  # under which Megatron's own rule is computed in torch
    }


def build_model(arch: Architecture, tp: int) -> torch.nn.Module:
    """`GPTModel` with uninitialised weights, on one tensor-parallel rank of `tp`."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from samebits.hooks.megatron.spec import block_spec

    config = transformer_config(arch, tp)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config),
        vocab_size=arch.vocab,
        max_sequence_length=arch.max_positions,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        rotary_percent=arch.linear.rotary_share if arch.linear else 1.0,
    )
    return model.bfloat16()  # Megatron's own norms start in fp32
