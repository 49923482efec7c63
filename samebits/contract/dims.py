"""The dimensions of a model that decide its arithmetic, in one form from every kind of config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from samebits.contract import canonical

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
}
_LINEAR_ATTENTION = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def architecture_of(name: str) -> str:
    """The recipe's name of the architecture of a Hugging Face class, or the class itself."""
    return _ARCHITECTURES.get(name, name)


def dims_of(config: Any, architecture: str | None = None) -> dict[str, Any]:
    """Dimensions of a Hugging Face config (object or dict) or of a recipe's `model.config`.

    Real numbers become float32 bit patterns, because the kernels compute with float32. A config
    that names no architecture is taken to be `architecture`.
    """
    get = config.get if isinstance(config, Mapping) else lambda n, d=None: getattr(config, n, d)
    rope = get("rope_parameters") or get("rope_scaling") or {}
    declared = get("architectures") or []
    model_type = get("model_type")
    named = architecture_of(declared[0]) if declared else model_type
    theta = get("rope_theta") if get("rope_theta") is not None else rope.get("rope_theta")
    eps = get("rms_norm_eps")
    dims: dict[str, Any] = {"architecture": named or architecture}
    for name in _SIZES:
        dims[name] = get(name)
    if dims["num_key_value_heads"] is None:
        dims["num_key_value_heads"] = dims["num_attention_heads"]
    heads, hidden = dims["num_attention_heads"], dims["hidden_size"]
    dims["head_dim"] = get("head_dim") or (hidden // heads if heads and hidden else None)
    dims["rms_norm_eps"] = None if eps is None else canonical.float_bits(float(eps))
    dims["rope_theta"] = None if theta is None else canonical.float_bits(float(theta))
    dims["rope_type"] = rope.get("rope_type", "default")
    dims["tie_word_embeddings"] = int(bool(get("tie_word_embeddings", False)))
    dims["attention_bias"] = int(bool(get("attention_bias", False)))
    dims["activation"] = get("hidden_act") or "silu"
    if dims["architecture"] == "qwen2":
        dims["qkv_bias"] = 1  # of the class; no entry of the configuration says it
    if dims["architecture"] == "qwen3_5_text":
        dims |= _hybrid(get, rope)
    return dims


def _hybrid(get: Callable[..., Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the arithmetic of a decoder with Gated DeltaNet layers beyond a dense one."""
    dims = {name: get(name) for name in _LINEAR_ATTENTION}
    layers, interval = get("num_hidden_layers"), get("full_attention_interval")
    types = get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(layers)
    ]
    share = get("partial_rotary_factor") or rope.get("partial_rotary_factor")
    dims["layer_types"] = " ".join(types)
    dims["partial_rotary_factor"] = None if share is None else canonical.float_bits(float(share))
    return dims
