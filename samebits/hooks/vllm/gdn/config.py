"""Refusals at engine start that hybrid models add to `samebits.hooks.vllm.config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits import runtime
from samebits.errors import Refused
from samebits.ops.gdn import CHUNK, SCHEDULES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HEAD_DIM = 128


def check(vllm_config: VllmConfig) -> None:
    """Raise `Refused` for what the GDN schedules do not cover.

    SB0501 layers, SB0507 ranks, SB0513 sources without the patch of recurrent layers, SB0516 chunks
    and cached states, SB0517 format of a state; SB0311 for the contract of another model.
    """
    _check_tree()
    text = vllm_config.model_config.hf_text_config
    _check_layers(text)
    runtime.contract().check_model(text)  # before its constants, which a dense one does not have
    _check_state(vllm_config.cache_config)
    _check_ranks(vllm_config.parallel_config.tensor_parallel_size, text)


def _refuse(error_id: str, seen: str, required: str) -> None:
    raise Refused(error_id, seen=seen, required=required, hint=f"samebits explain {error_id}")


def _check_tree() -> None:
    """The series of a dense case lacks this patch, and vLLM would fail at the first block's end."""
    from vllm.v1.worker import mamba_utils

    if not hasattr(mamba_utils, "HAS_TRITON"):  # imported by the patch only
        raise Refused(
            "SB0513",
            seen=f"{mamba_utils.__name__} without `ssm-copy-states-on-hosts-without-triton`",
            required="a vLLM tree with the series of a hybrid model applied",
            hint="samebits patch apply vllm --model qwen3.5-tiny",
        )


def _check_layers(text) -> None:
    wanted = {"full_attention", "linear_attention"}
    if set(text.layer_types) - wanted:
        _refuse(
            "SB0501", f"layer types {sorted(set(text.layer_types))}", " and ".join(sorted(wanted))
        )
    rope = text.rope_parameters or {}
    if rope.get("rope_type", "default") != "default" or "mrope_section" in rope:
        _refuse("SB0501", f"rope_parameters {rope}", "the default rotary embedding of text")
    for name, required in (
        ("linear_key_head_dim", HEAD_DIM),
        ("linear_value_head_dim", HEAD_DIM),
        ("attn_output_gate", True),
        ("output_gate_type", "silu"),
        ("layer_scale", False),
        ("hidden_act", "silu"),
    ):
        value = getattr(text, name, required)
        if value != required and (name, value) != ("output_gate_type", "swish"):  # a synonym
            _refuse("SB0501", f"{name}={value}", f"{name}={required}")


def _check_state(cache) -> None:
    """A cached state is one at a chunk's end, and its formats are those of the contract."""
    if cache.mamba_ssm_cache_dtype != "float32":
        _refuse(
            "SB0517", f"mamba_ssm_cache_dtype={cache.mamba_ssm_cache_dtype}", "float32, said so"
        )
    if cache.mamba_cache_dtype != "auto":
        _refuse("SB0517", f"mamba_cache_dtype={cache.mamba_cache_dtype}", "auto")
    constants = runtime.contract().constants("gdn.core")
    chunk, schedule = constants["chunk"], constants["schedule"]
    if chunk != CHUNK:
        _refuse("SB0516", f"a contract with chunks of {chunk} tokens", f"chunks of {CHUNK}")
    if schedule not in SCHEDULES:
        _refuse("SB0516", f"a contract with schedule {schedule!r}", " or ".join(SCHEDULES))
    # vLLM raises the block size to a multiple of the one asked for, so this one decides.
    if cache.enable_prefix_caching and cache.block_size % CHUNK:
        _refuse(
            "SB0516",
            f"block_size={cache.block_size} with prefix caching",
            f"a multiple of {CHUNK}, so that a cached state is one at the end of a chunk",
        )
    if cache.enable_prefix_caching and cache.mamba_cache_mode != "align":
        _refuse("SB0516", f"mamba_cache_mode={cache.mamba_cache_mode}", "align")


def _check_ranks(size: int, text) -> None:
    for count, what in (
        (text.linear_num_key_heads, "key heads of recurrent layers"),
        (text.linear_num_value_heads, "value heads of recurrent layers"),
    ):
        if count % size:
            _refuse(
                "SB0507", f"tensor_parallel_size={size} over {count} {what}", "an even division"
            )
