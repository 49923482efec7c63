"""Refusals at engine start that only a GPU needs; `hooks.vllm.config` has the common ones."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from samebits import runtime
from samebits.errors import Refused
from samebits.hooks.vllm.config import HYBRID
from samebits.ops import gpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check(vllm_config: VllmConfig, capability) -> None:
    """Raise `Refused` for the first setting outside what is proved on a GPU (SB0451, SB0414,
    SB0501, SB0504, SB0506). The order of tokens in a step, and so what is observed, needs the
    synchronous scheduler in both modes; all else binds the aligned mode only.
    """
    model = vllm_config.model_config
    if model is None:
        return
    if vllm_config.scheduler_config.async_scheduling:
        _refuse("SB0504", "async_scheduling", "async_scheduling=False")
    if not runtime.aligned():
        return
    gpu.require_capability((capability.major, capability.minor) if capability else None)
    _check_model(vllm_config, model)
    _check_graphs(vllm_config.compilation_config)
    if vllm_config.parallel_config.use_ubatching:
        _refuse("SB0504", "microbatches", "enable_dbo=False")


def _refuse(error_id: str, seen: str, required: str) -> None:
    raise Refused(error_id, seen=seen, required=required, hint=f"samebits explain {error_id}")


def _check_model(vllm_config: VllmConfig, model) -> None:
    from samebits.ops.attention.triton import require_geometry

    if set(model.architectures) & set(HYBRID):
        _refuse("SB0501", f"{model.architectures} on a GPU", "a model without recurrent layers")
    size = model.get_head_size()
    require_geometry(
        model.get_num_attention_heads(vllm_config.parallel_config),
        model.get_num_kv_heads(vllm_config.parallel_config),
        size,
        vllm_config.cache_config.block_size,
        size**-0.5,
    )


def _check_graphs(compilation) -> None:
    """Eager steps, or captured steps of one token for each request: nothing that compiles."""
    from vllm.config import CUDAGraphMode

    if compilation.cudagraph_mode not in (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY):
        _refuse(
            "SB0506",
            f"cudagraph_mode={compilation.cudagraph_mode.name}",
            "cudagraph_mode NONE or FULL_DECODE_ONLY",
        )
    if compilation.cudagraph_mode != CUDAGraphMode.NONE and os.environ.get("SAMEBITS_TRACE"):
        _refuse("SB0506", "CUDA graphs under a trace, which sees no replay", "cudagraph_mode NONE")
