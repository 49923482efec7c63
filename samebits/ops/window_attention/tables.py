"""Refusals of `window_attention` that both platforms share."""

from __future__ import annotations

import torch

from samebits.errors import Refused

WIDEST = 1 << 30  # keys: no sequence is longer, and positions plus this fit in 32 bits


def checked(window: int) -> int:
    """`window`, cut to what is longer than every sequence; SB0417 unless an integer from 1."""
    if type(window) is not int or window < 1:
        raise Refused(
            "SB0417",
            seen=f"window {window!r}",
            required="an integer number of keys, 1 or more: the token itself is one of them",
            hint="samebits explain SB0417",
        )
    return min(window, WIDEST)


def check_out(out: torch.Tensor | None, q: torch.Tensor) -> None:
    """`out`, where given, is contiguous and otherwise as q (SB0413)."""
    if out is not None and (
        (out.shape, out.dtype, out.device) != (q.shape, q.dtype, q.device)
        or not out.is_contiguous()
    ):
        raise Refused(
            "SB0413",
            seen=f"out {list(out.shape)} {out.dtype} with strides {list(out.stride())}",
            required=f"contiguous {list(q.shape)} {q.dtype} on {q.device}",
            hint="samebits explain SB0413",
        )
