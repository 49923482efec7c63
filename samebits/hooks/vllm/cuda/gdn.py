"""Hybrid models on a GPU: captured decode steps of recurrent layers, and vLLM's own as control."""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface
from vllm.config import VllmConfig
from vllm.model_executor.layers.fla.ops import (
    chunk_delta_h,
    chunk_o,
    chunk_scaled_dot_kkt,
    cumsum,
    solve_tril,
    wy_fast,
)
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from samebits import runtime
from samebits.hooks.vllm.gdn import layers, metadata, model
from samebits.hooks.vllm.gdn.metadata import Metadata

_TUNED = (chunk_delta_h, chunk_o, chunk_scaled_dot_kkt, cumsum, solve_tril, wy_fast)


class Builder(metadata.Builder):
    """Makes `Metadata` of a step, int32 on the GPU; decode steps can be captured."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        requests = vllm_config.scheduler_config.max_num_seqs
        self._slots, self._contexts = torch.zeros(2, requests, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **drafts,
    ) -> Metadata:
        """As on a CPU; tables of a decode step lie where they lay when such a step was captured.

        Nothing is read back. A captured step is padded by requests without a row, and by rows
        behind the last request: neither reads or writes a state.
        """
        step = super().build(common_prefix_len, common_attn_metadata, fast_build, **drafts)
        if step.most == 1:
            step.slots = self._slots[: len(step.slots)].copy_(step.slots)
            step.context_lens = self._contexts[: len(step.slots)].copy_(step.context_lens)
        return step


class Backend(metadata.Backend):
    """Backend of recurrent layers on a GPU."""

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """The class that makes the metadata of a step."""
        return Builder


class AlignedDeltaNet(layers.AlignedDeltaNet):
    """As on a CPU; steps of one token for each request can be captured."""

    def get_attn_backend(self) -> type[Backend]:
        """The backend whose metadata `core` reads."""
        return Backend


class StockDeltaNet(layers.DeltaNet):
    """vLLM's layer as it is: its Triton kernels, a chunk form and a recurrence, and its states."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        _take_first_tiles()

    get_state_shape = QwenGatedDeltaNetAttention.get_state_shape
    get_state_dtype = QwenGatedDeltaNetAttention.get_state_dtype
    get_attn_backend = QwenGatedDeltaNetAttention.get_attn_backend
    forward = QwenGatedDeltaNetAttention.forward


@functools.cache
def _take_first_tiles() -> None:
    """Of the tiles among which vLLM's chunk kernels choose by time, leave the first: a control need
    not be fast, and all 88 would be compiled before its first token."""
    for module in _TUNED:
        for kernel in vars(module).values():
            while isinstance(kernel, KernelInterface):
                if isinstance(kernel, Autotuner):
                    kernel.configs = kernel.configs[:1]
                kernel = getattr(kernel, "fn", None)


class Qwen3_5ForCausalLM(model.Qwen3_5ForCausalLM):
    """As on a CPU, but that the control's states are vLLM's own."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig):
        """Shapes of the tensors of one state, for vLLM's cache."""
        if runtime.aligned("gdn.core"):
            return super().get_mamba_state_shape_from_config(vllm_config)
        return Qwen3NextForCausalLM.get_mamba_state_shape_from_config(vllm_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig):
        """Their dtypes, in the same order."""
        if runtime.aligned("gdn.core"):
            return super().get_mamba_state_dtype_from_config(vllm_config)
        return Qwen3NextForCausalLM.get_mamba_state_dtype_from_config(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls):
        """How each of them moves from page to page."""
        if runtime.aligned("gdn.core"):
            return super().get_mamba_state_copy_func()
        return Qwen3NextForCausalLM.get_mamba_state_copy_func()
