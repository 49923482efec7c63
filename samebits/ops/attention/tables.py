"""Refusals of attention's tables, and who reads them: the host, once for each batch."""

from __future__ import annotations

import numpy as np
import torch

from samebits.errors import Refused


def out_of_range(seen: str, required: str) -> Refused:
    """SB0415."""
    return Refused("SB0415", seen=seen, required=required, hint="samebits explain SB0415")


def check_starts(starts: np.ndarray, lengths: np.ndarray, tokens: int) -> None:
    """`starts` [R + 1] ascends from 0 within `tokens`, `lengths` [R] covers queries (SB0415)."""
    if starts.ndim != 1 or lengths.ndim != 1 or len(starts) != len(lengths) + 1:
        raise out_of_range(
            f"starts {list(starts.shape)}, lengths {list(lengths.shape)}", "[R + 1] and [R]"
        )
    counts = np.diff(starts)
    if starts[0] != 0 or (counts < 0).any() or starts[-1] > tokens or (counts > lengths).any():
        raise out_of_range(
            f"starts {starts.tolist()[:9]}, lengths {lengths.tolist()[:8]}, {tokens} tokens",
            "starts ascending from 0 within the tokens, lengths that cover the queries",
        )


def check_packed(q: torch.Tensor, k: torch.Tensor, starts: np.ndarray) -> None:
    """`starts` [B + 1] cuts all of q [T, ...] and k [T, ...] into sequences (SB0415)."""
    if starts.ndim != 1 or len(starts) < 1 or k.shape[0] != q.shape[0]:
        raise out_of_range(
            f"cu_seqlens {list(starts.shape)}, q {list(q.shape)}, k {list(k.shape)}",
            "cu_seqlens [B + 1] and as many keys as queries",
        )
    check_starts(starts, np.diff(starts), tokens=q.shape[0])
    if starts[-1] != q.shape[0]:
        raise out_of_range(f"cu_seqlens ends at {starts[-1]}", f"{q.shape[0]} tokens")
