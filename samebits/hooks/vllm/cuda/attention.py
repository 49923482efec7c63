"""The aligned attention backend over vLLM's paged KV cache on a GPU.

Nothing here waits for the GPU: what a launch must know beforehand (the longest query and the
longest sequence of a step) comes from the host's copy of the metadata.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata, MultipleOf

from samebits.hooks.vllm import attention
from samebits.hooks.vllm.attention import Metadata
from samebits.hooks.vllm.cuda.config import PAGES


class Builder(attention.Builder):
    """Makes `Metadata` of a step; decode steps can be captured."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # A captured launch serves every later step, and a kernel first met inside a capture could
        # not be loaded: with graphs, all decode steps launch for the longest sequence there can be.
        graphs = bool(vllm_config.compilation_config.cudagraph_mode)
        self._longest = vllm_config.model_config.max_model_len if graphs else None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        """`Metadata` that shares vLLM's tensors; nothing is copied or computed.

        A captured step is padded: rows without a request have no keys, and slot -1.
        """
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.most == 1 and self._longest is not None:
            metadata.longest = self._longest
        return metadata


class PagedImpl(attention.PagedImpl):
    """`samebits.ops.attention`: fixed partitions of absolute positions, whatever the step holds."""

    def write(self, layer, key, value, keys, values, slots: torch.Tensor) -> None:
        """As on a CPU, by vLLM's own copy kernel, which leaves out tokens with slot -1."""
        from vllm._custom_ops import reshape_and_cache_flash

        reshape_and_cache_flash(
            key, value, keys, values, slots, "auto", layer._k_scale, layer._v_scale
        )


class PagedBackend(attention.PagedBackend):
    """Backend of `PagedImpl`."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Pages that the kernels take."""
        return list(PAGES)

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """The class that makes the metadata of a step."""
        return Builder

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        """The class that vLLM instantiates for each layer."""
        return PagedImpl
