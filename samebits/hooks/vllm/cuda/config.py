"""Settings and refusals at engine start that only a GPU needs; common ones: `hooks.vllm.config`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from samebits import runtime
from samebits.errors import Refused
from samebits.hooks.vllm.config import HYBRID
from samebits.ops import gpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# Tokens of the pages that the attention kernels take; vLLM cuts longer ones into the largest.
PAGES = (16, 32, 64)


def settle(vllm_config: VllmConfig) -> None:
    """The control's recurrent layers prefill by vLLM's own kernels, not by FlashInfer's, which
    nothing here pins or installs."""
    if isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config["gdn_prefill_backend"] = "triton"


def check(vllm_config: VllmConfig, capability) -> None:
    """Raise `Refused` for the first setting outside what is proved on a GPU (SB0451, SB0414,
    SB0504, SB0506). The order of tokens in a step, and so what is observed, needs the
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

    size, page = model.get_head_size(), vllm_config.cache_config.block_size
    if set(model.architectures) & set(HYBRID):  # whose pages are as large as a state
        page = next((part for part in reversed(PAGES) if page % part == 0), page)
    require_geometry(
        model.get_num_attention_heads(vllm_config.parallel_config),
        model.get_num_kv_heads(vllm_config.parallel_config),
        size,
        page,
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
