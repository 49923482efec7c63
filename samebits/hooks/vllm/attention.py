"""Attention backends over vLLM's paged KV cache: the aligned one, and torch's for the control.

Cache of one layer: [2, blocks, block_size, kv_heads, head_size], keys first. In a hybrid model vLLM
interleaves keys and values in memory: the strides differ, the shape does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from samebits.errors import Refused


@dataclass
class Metadata:
    """query_start_loc [R + 1], seq_lens [R] (with this step's tokens), block_table [R, blocks].

    most, longest   no request has more query tokens, none has more keys; known to the host
    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    most: int
    longest: int


class Builder(AttentionMetadataBuilder[Metadata]):
    """Makes `Metadata` of a step from vLLM's common metadata."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        """`Metadata` that shares vLLM's tensors; nothing is copied or computed."""
        return Metadata(
            common_attn_metadata.num_actual_tokens,
            common_attn_metadata.query_start_loc,
            common_attn_metadata.seq_lens,
            common_attn_metadata.block_table_tensor,
            common_attn_metadata.slot_mapping,
            common_attn_metadata.max_query_len,
            common_attn_metadata.max_seq_len,
        )


class _Impl(AttentionImpl):
    """Write the step's keys and values to their slots, then attend over the pages."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap=None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra,
    ) -> None:
        options = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing": kv_sharing_target_layer_name,
            **extra,
        }
        used = [name for name, value in options.items() if value]
        if used or attn_type != AttentionType.DECODER or kv_cache_dtype != "auto":
            raise Refused(
                "SB0511",
                seen=f"{attn_type} attention with {used}, KV cache {kv_cache_dtype}",
                required="plain causal decoder attention",
                hint="samebits explain SB0511",
            )
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = float(scale)

    def forward(
        self,
        layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale=None,
        output_block_scale=None,
    ) -> torch.Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D] -> output [T, Hq, D] (or [T, Hq * D])."""
        if attn_metadata is None:  # a warm-up call without requests
            return output
        tokens = attn_metadata.num_actual_tokens
        keys, values = kv_cache.unbind(0)
        slots = attn_metadata.slot_mapping[:tokens]
        self.write(layer, key[:tokens], value[:tokens], keys, values, slots)
        rows = query[:tokens].view(tokens, self.num_heads, self.head_size)
        result = self.attend(rows, keys, values, attn_metadata)
        output[:tokens] = result.view(output[:tokens].shape)
        return output

    def write(self, layer, key, value, keys, values, slots: torch.Tensor) -> None:
        """Move the keys and values of each token to its slot, a row of a page."""
        place = slots // keys.shape[1], slots % keys.shape[1]
        keys[place] = key
        values[place] = value

    def attend(self, query, keys, values, metadata: Metadata) -> torch.Tensor:
        raise NotImplementedError


class PagedImpl(_Impl):
    """`samebits.ops.attention`: fixed partitions of absolute positions, whatever the step holds."""

    def attend(self, query, keys, values, metadata: Metadata) -> torch.Tensor:
        """query [T, Hq, D], pages [blocks, block_size, Hkv, D] bf16 -> [T, Hq, D] bf16."""
        from samebits.ops import attention

        return attention.paged(
            query,
            keys,
            values,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            self.scale,
            most=metadata.most,
            longest=metadata.longest,
        )


class SdpaImpl(_Impl):
    """torch's scaled_dot_product_attention per request over its gathered pages."""

    def attend(self, query, keys, values, metadata: Metadata) -> torch.Tensor:
        """As `PagedImpl.attend`, in the order of reduction that torch chooses."""
        out = torch.empty_like(query)
        starts = metadata.query_start_loc.tolist()
        block_size = keys.shape[1]
        for row, length in enumerate(metadata.seq_lens.tolist()):
            start, stop = starts[row], starts[row + 1]
            if start == stop:
                continue
            pages = metadata.block_table[row, : -(-length // block_size)].long()
            k, v = (
                cache[pages].flatten(0, 1)[:length].transpose(0, 1)[None]
                for cache in (keys, values)
            )
            q = query[start:stop].transpose(0, 1)[None]
            seen = torch.arange(length - (stop - start), length)[:, None]
            mask = torch.arange(length)[None] <= seen
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True
            )
            out[start:stop] = attended[0].transpose(0, 1)
        return out


class _Backend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM knows backends by the members of its own enumeration

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @staticmethod
    def use_cascade_attention(*args, **kwargs) -> bool:
        return False


class PagedBackend(_Backend):
    """Backend of `PagedImpl`, used when aligned."""

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        """The class that vLLM instantiates for each layer."""
        return PagedImpl


class SdpaBackend(_Backend):
    """Backend of `SdpaImpl`, used by the stock control."""

    @staticmethod
    def get_impl_cls() -> type[SdpaImpl]:
        """The class that vLLM instantiates for each layer."""
        return SdpaImpl
