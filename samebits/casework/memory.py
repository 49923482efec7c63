"""Bytes that follow from a model's dimensions: weights, keys and values, recurrent states.

Counted from shapes and dtypes, not measured: activations, workspaces, optimizer state and what an
engine reserves for itself are not in here. `config` is the `model.config` of a recipe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_BF16, _FP32 = 2, 4
# Optimizer -> fp32 values that it keeps for a parameter: itself, and Adam's two moments.
_KEPT = {"adam": 3, "sgd": 1}


def is_linear(config: Mapping[str, Any], layer: int) -> bool:
    """Whether decoder layer `layer` keeps a recurrent state instead of keys and values."""
    interval = config.get("full_attention_interval")
    return interval is not None and (layer + 1) % interval != 0


def _linear_layers(config: Mapping[str, Any]) -> int:
    return sum(is_linear(config, layer) for layer in range(config["num_hidden_layers"]))


def page_groups(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(layers of a group, groups with full attention, groups with states): layers of a hybrid model
    share pages in groups, as vLLM cuts them.

    A group has as many layers as there are of the rarer kind, or of the other if that has less than
    1.5 times as many. A sequence takes a page of each group with states, and one of each group with
    full attention for every page of its tokens. A model without states has one group.
    """
    linear = _linear_layers(config)
    full = config["num_hidden_layers"] - linear
    if not linear or not full:
        return linear + full, int(full > 0), int(linear > 0)
    group = min(linear, full)
    if max(linear, full) < 1.5 * group:
        group = max(linear, full)
    return group, -(-full // group), -(-linear // group)


def kv_bytes(config: Mapping[str, Any], tp: int = 1, layers: int | None = None) -> int:
    """Keys and values of one token on one of `tp` ranks, in all layers with full attention."""
    if layers is None:
        layers = config["num_hidden_layers"] - _linear_layers(config)
    heads = config["num_key_value_heads"] // tp
    return 2 * layers * heads * config["head_dim"] * _BF16


def state_bytes(
    config: Mapping[str, Any],
    schedule: str | None,
    tp: int = 1,
    layers: int | None = None,
    platform: str = "cpu",
) -> int:
    """Recurrent state of one sequence on one rank; `schedule` None is that of the stock engine.

    The stock engine keeps one fp32 state per value head and the window of the convolution.
    """
    if layers is None:
        layers = _linear_layers(config)
    if not layers:
        return 0
    keys, values = (config[f"linear_num_{part}_heads"] // tp for part in ("key", "value"))
    key_dim, value_dim = (config[f"linear_{part}_head_dim"] for part in ("key", "value"))
    channels = 2 * keys * key_dim + values * value_dim
    window = (config["linear_conv_kernel_dim"] - 1) * channels * _BF16
    if schedule is None:
        return layers * (values * key_dim * value_dim * _FP32 + window)
    from samebits.ops import gdn

    spec = gdn.state_spec(schedule, keys, values, key_dim, value_dim, platform)
    return layers * (sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in spec) + window)


def pass_bytes(config: Mapping[str, Any]) -> int:
    """What one token adds to a forward pass that a backward follows, on one rank of a dense model.

    In bf16, for each layer: the inputs of two norms and two products, queries, keys and values at
    three places, what the MLP multiplies. Once: a row of logits and its gradient in fp32, and that
    rounded to bf16.
    """
    attention = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * config[
        "head_dim"
    ]
    layer = 5 * config["hidden_size"] + 3 * attention + 3 * config["intermediate_size"]
    logits = config["vocab_size"] * (2 * _FP32 + _BF16)
    return config["num_hidden_layers"] * layer * _BF16 + logits


def recurrent_bytes(config: Mapping[str, Any], *, stock: bool) -> int:
    """What one token adds to `pass_bytes`, which counts full attention, for recurrent layers.

    For each of these, in ours: all that is projected, fp32 queries and keys before their norm, both
    and values behind it, fp32 outputs and these normed, a row of T. In Megatron's, which computes
    the rule in torch (`stock`): gates and what is convolved at several places, a second product of
    the MLP, and of every head in fp32 fifteen vectors and the triangles of a chunk's inverse, one
    for each of its rows.
    """
    if config.get("full_attention_interval") is None:
        return 0
    from samebits.ops.gdn import CHUNK

    heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    inner = heads * size
    if stock:
        layer = 8 * _BF16 * inner + 4 * _BF16 * (keys + inner)
        layer += 2 * _BF16 * config["intermediate_size"]
        layer += heads * (15 * size + CHUNK * CHUNK // 3) * _FP32
    else:
        layer = (keys + 2 * inner + 2 * heads) * _BF16 + keys * (_FP32 + _BF16)
        layer += inner * (2 * _BF16 + _FP32) + heads * CHUNK * _BF16
    return _linear_layers(config) * layer


def rl_bytes(config: Mapping[str, Any], optimizer: str) -> int:
    """What an RL run keeps for the parameters on one rank: weights in both engines, a gradient in
    fp32, and the optimizer's."""
    each = 2 * _BF16 + _FP32 + _KEPT[optimizer] * _FP32
    return parameters(config, qk_norm=False) * each  # norms are a millionth of all


def parameters(
    config: Mapping[str, Any], qk_norm: bool, tp: int = 1, *, qkv_bias: bool = False
) -> int:
    """Parameters on one of `tp` ranks: cut by heads, columns and vocabulary rows; norms are whole.

    qk_norm    queries and keys have a norm of their own (Qwen3, and Qwen3.5's full attention)
    qkv_bias   the projection of queries, keys and values has a bias (Qwen2)
    """
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    hybrid = config.get("full_attention_interval") is not None
    gates = 2 if hybrid else 1  # the gate of the output comes with the queries
    full = hidden * head_dim * (gates * heads + 2 * kv_heads + heads) // tp
    full += 2 * head_dim * qk_norm
    full += head_dim * (heads + 2 * kv_heads) // tp * qkv_bias
    linear = _linear_parameters(config, tp) if hybrid else 0
    count = 0
    for layer in range(config["num_hidden_layers"]):
        count += linear if is_linear(config, layer) else full
        count += 3 * hidden * config["intermediate_size"] // tp + 2 * hidden
    tables = 1 if config["tie_word_embeddings"] else 2
    return count + tables * config["vocab_size"] * hidden // tp + hidden


def _linear_parameters(config: Mapping[str, Any], tp: int) -> int:
    keys, values = (config[f"linear_num_{part}_heads"] // tp for part in ("key", "value"))
    key_dim, value_dim = (config[f"linear_{part}_head_dim"] for part in ("key", "value"))
    channels = 2 * keys * key_dim + values * value_dim
    inner = values * value_dim
    projections = config["hidden_size"] * (channels + 2 * inner + 2 * values)
    # convolution, A_log and dt_bias, norm of the gated output
    return projections + channels * config["linear_conv_kernel_dim"] + 2 * values + value_dim
