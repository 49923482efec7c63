"""Step metadata of recurrent layers: where each request's state lies and how long it is so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor


@dataclass
class Metadata:
    """slots [R]: page of each request's state; query_start_loc [R + 1]; context_lens [R]: tokens
    before this step, so that the position of a row is absolute, whatever the scheduler cut. No
    request has more than `most` rows, as the host knows."""

    slots: torch.Tensor
    query_start_loc: torch.Tensor
    context_lens: torch.Tensor
    most: int


class Builder(AttentionMetadataBuilder[Metadata]):
    """Makes `Metadata` of a step, with positions counted from the start of a sequence."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **drafts,
    ) -> Metadata:
        """`drafts` belongs to speculative decoding, which is refused at start."""
        common = common_attn_metadata
        pages = mamba_get_block_table_tensor(
            common.block_table_tensor,
            common.seq_lens,
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )
        counts = common.query_start_loc[1:] - common.query_start_loc[:-1]
        return Metadata(
            pages[:, 0].contiguous(),
            common.query_start_loc,
            common.seq_lens - counts,
            common.max_query_len,
        )


class Backend(AttentionBackend):
    """Backend of recurrent layers, by the name under which vLLM looks for one."""

    @staticmethod
    def get_name() -> str:
        """Member of vLLM's own enumeration."""
        return "GDN_ATTN"  # vLLM knows backends by the members of its own enumeration

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """The class that makes the metadata of a step."""
        return Builder

    @classmethod
    def is_ssm(cls) -> bool:
        """True: its cache holds states, not keys and values."""
        return True
