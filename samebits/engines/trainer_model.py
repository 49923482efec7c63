"""From a Hugging Face `config.json` to Megatron's real `GPTModel`, and back to published names.

Supported: dense decoders with RMSNorm, SwiGLU, rotary positions over the whole head and grouped
query attention - Llama (SmolLM2) and Qwen3 (q/k norms). Everything else is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samebits import runtime
from samebits.errors import Refused

ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # name -> has q/k norms


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
        _refuse_features(config, rope, path)
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
        )

    def refuse_tp(self, size: int) -> None:
        """SB0603 unless every rank gets whole head groups, FFN columns and vocabulary rows."""
        parts = {"key-value heads": self.kv_heads, "FFN width": self.ffn, "vocabulary": self.vocab}
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


def _refuse_features(config: dict, rope: dict, path: Path) -> None:
    found = {
        "attention_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "attention_dropout": config.get("attention_dropout", 0) > 0,
        "hidden_dropout": config.get("hidden_dropout", 0) > 0,
        "rope scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
        "partial rotary": config.get("partial_rotary_factor", 1.0) != 1.0,
        "sliding window": bool(config.get("use_sliding_window", False)),
        "pretraining_tp": config.get("pretraining_tp", 1) != 1,
        "activation": config.get("hidden_act", "silu") != "silu",
    }
    names = [name for name, present in found.items() if present]
    if names:
        raise Refused(
            "SB0605",
            seen=f"{', '.join(names)} in {path}",
            required="no dropout, bias, rotary scaling, window, or activation other than silu",
            hint="samebits explain SB0605",
        )


def transformer_config(arch: Architecture, tp: int):
    """Megatron's configuration of `arch`: bf16, no fusion, no dropout, no bias."""
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
        use_te_activation_func=runtime.aligned(),
        add_bias_linear=False,
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
    )


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
    )
    return model.bfloat16()  # Megatron's own norms start in fp32


@dataclass(frozen=True)
class Slot:
    """Where one published tensor lives: a view of this rank's parameter.

    `view` has the shape of the rank's shard up to leading splits; `shard_dim` is the dimension of
    the published tensor that ranks cut, or None for a copy on every rank.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None
    view: torch.Tensor


def slots(
    arch: Architecture,
    model: Any,
    tp: int,
    of: Callable[[torch.nn.Parameter], torch.Tensor] = torch.Tensor.detach,
) -> Iterator[Slot]:
    """Every published tensor of `arch` with its place in this rank's `model`, in forward order.

    `of` picks what is looked at: the parameter itself, or a tensor of its shape such as its
    gradient. Megatron keeps q, k and v of one head group side by side in one weight, and gate
    over up in another; the views undo both, so loading and exporting are plain copies.
    """
    h, d, f = arch.hidden, arch.head_dim, arch.ffn
    groups, ratio = arch.kv_heads // tp, arch.heads // arch.kv_heads
    yield Slot(
        "model.embed_tokens.weight",
        (arch.vocab, h),
        0,
        of(model.embedding.word_embeddings.weight),
    )
    for i, layer in enumerate(model.decoder.layers):
        prefix = f"model.layers.{i}."
        attention, mlp = layer.self_attention, layer.mlp
        yield Slot(prefix + "input_layernorm.weight", (h,), None, of(layer.input_layernorm.weight))
        qkv = of(attention.linear_qkv.weight).view(groups, ratio + 2, d, h)
        parts = (("q", arch.heads, qkv[:, :ratio]), ("k", arch.kv_heads, qkv[:, ratio]))
        for letter, heads, view in (*parts, ("v", arch.kv_heads, qkv[:, ratio + 1])):
            yield Slot(f"{prefix}self_attn.{letter}_proj.weight", (heads * d, h), 0, view)
        yield Slot(
            prefix + "self_attn.o_proj.weight",
            (h, arch.heads * d),
            1,
            of(attention.linear_proj.weight),
        )
        if arch.qk_norm:
            yield Slot(
                prefix + "self_attn.q_norm.weight", (d,), None, of(attention.q_layernorm.weight)
            )
            yield Slot(
                prefix + "self_attn.k_norm.weight", (d,), None, of(attention.k_layernorm.weight)
            )
        yield Slot(
            prefix + "post_attention_layernorm.weight",
            (h,),
            None,
            of(layer.pre_mlp_layernorm.weight),
        )
        gate, up = of(mlp.linear_fc1.weight).view(2, f // tp, h)
        yield Slot(prefix + "mlp.gate_proj.weight", (f, h), 0, gate)
        yield Slot(prefix + "mlp.up_proj.weight", (f, h), 0, up)
        yield Slot(prefix + "mlp.down_proj.weight", (h, f), 1, of(mlp.linear_fc2.weight))
    yield Slot("model.norm.weight", (h,), None, of(model.decoder.final_layernorm.weight))
    if not arch.tied:
        yield Slot("lm_head.weight", (arch.vocab, h), 0, of(model.output_layer.weight))
