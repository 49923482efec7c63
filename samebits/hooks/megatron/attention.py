"""Core attention module with Megatron's constructor and call, on the shared varlen attention."""

from __future__ import annotations

import torch
from megatron.core.transformer.enums import AttnMaskType

from samebits.errors import Refused
from samebits.ops import attention


class CoreAttention(torch.nn.Module):
    """Causal self-attention of padded or packed sequences; no parameters, no mask tensor.

    In a padded batch padding stands to the right of a sequence, where causality hides it.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_,
    ):
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        plain = (
            attention_type == "self"
            and attn_mask_type == AttnMaskType.causal
            and dropout == 0.0
            and config.window_size is None
            and not config.apply_query_key_layer_scaling
            and config.softmax_type == "vanilla"
        )
        if not plain or config.context_parallel_size > 1:
            raise Refused(
                "SB0605",
                seen=f"{attention_type} attention, {attn_mask_type}, dropout {dropout}, "
                f"window {config.window_size}, softmax {config.softmax_type}, "
                f"context parallel {config.context_parallel_size}",
                required="causal self-attention without dropout, window or context parallelism",
                hint="samebits explain SB0605",
            )
        # The rollout engine's expression, so that both round the same number.
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params=None,
    ) -> torch.Tensor:
        """query [s, b, H, D], key and value [s, b, G, D] -> [s, b, H * D]; packed: [t, H, D],
        [t, G, D] -> [t, H * D], cut at `packed_seq_params.cu_seqlens_q`."""
        if attention_bias is not None:
            raise Refused(
                "SB0605",
                seen="an attention bias",
                required="none",
                hint="samebits explain SB0605",
            )
        if packed_seq_params is not None:
            cu_seqlens = packed_seq_params.cu_seqlens_q
            return attention.varlen(query, key, value, cu_seqlens, self.scale).flatten(1)
        s, b = query.shape[:2]
        q, k, v = (x.transpose(0, 1).reshape(b * s, *x.shape[2:]) for x in (query, key, value))
        # On the host, which cuts the batch by them: it need not wait for a GPU.
        out = attention.varlen(q, k, v, torch.arange(b + 1) * s, self.scale)
        return out.view(b, s, -1).transpose(0, 1)
