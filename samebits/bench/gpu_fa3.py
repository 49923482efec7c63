"""FlashAttention 3 as vLLM ships and calls it: what stock engines on Hopper attend with.

At hand only where vLLM's compiled extension is; without it there are no rows of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

import torch

from samebits import patching
from samebits.errors import Refused

NAME = "vLLM's FlashAttention 3"
_TREE = "smollm2-135m"  # whichever series: no patch touches it
_SPLITS = 32  # vLLM's limit of splits inside CUDA graphs


def at_hand() -> bool:
    """Whether vLLM's extension loads and runs on this GPU; puts vLLM's tree on the path."""
    try:
        os.environ.setdefault("VLLM_PLUGINS", "")  # stock's platform
        tree = str(patching.tree_path("vllm", _TREE))
        if tree not in sys.path:
            sys.path.insert(0, tree)
        from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported
    except (ImportError, Refused):
        return False
    return bool(is_fa_version_supported(3))


def _seen(window: int) -> tuple[int, int]:
    return (window, 0) if window >= 0 else (-1, -1)


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    window: int = -1,
) -> Callable[[], torch.Tensor]:
    """Causal attention of packed sequences: q [T, H, D], k and v [T, G, D] bf16, starts [B + 1].

    window   keys before a token's own that it sees; -1: all
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return partial(
        flash_attn_varlen_func, q, k, v, longest, starts, longest, cu_seqlens_k=starts,
        causal=True, window_size=list(_seen(window)), fa_version=3,
    )  # fmt: skip


def paged(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    longest: int,
    splits: int = _SPLITS,
    window: int = -1,
) -> Callable[[], torch.Tensor]:
    """The same over pages [blocks, size, G, D], its schedule computed ahead as a step of vLLM does.

    most, longest   query tokens and keys of the largest request
    splits          parts that keys may be cut into; 0 lets the kernel choose
    window          as in `packed`
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    seen = _seen(window)
    schedule = get_scheduler_metadata(
        lengths.numel(), most, longest, q.shape[1], key_cache.shape[2], q.shape[2], lengths,
        torch.bfloat16, cu_seqlens_q=starts, page_size=key_cache.shape[1], causal=True,
        window_size=seen, num_splits=splits,
    )  # fmt: skip
    return partial(
        flash_attn_varlen_func, q, key_cache, value_cache, most, starts, longest,
        seqused_k=lengths, causal=True, window_size=list(seen), block_table=table,
        scheduler_metadata=schedule, num_splits=splits, fa_version=3,
    )  # fmt: skip
