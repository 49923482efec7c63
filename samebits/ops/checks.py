"""Refusals that every operator shares."""

from __future__ import annotations

import torch

from samebits.errors import Refused


def require_dtype(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    """`x` is a CPU tensor of `dtype`, else SB0420."""
    if x.dtype != dtype or x.device.type != "cpu":
        raise Refused(
            "SB0420",
            seen=f"{name} is {x.dtype} on {x.device}",
            required=f"{dtype} on cpu",
            hint="samebits explain SB0420",
        )


def require_shape(name: str, x: torch.Tensor, holds: bool, required: str) -> None:
    """`holds` is true, else SB0421 naming the shape of `x`."""
    if not holds:
        raise Refused(
            "SB0421",
            seen=f"{name} has shape {list(x.shape)}",
            required=required,
            hint="samebits explain SB0421",
        )
