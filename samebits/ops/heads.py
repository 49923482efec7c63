"""Rows of heads where they lie inside wider rows, such as the z of one fused projection."""

from __future__ import annotations

import torch


def by_heads(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """x [..., n] -> (its rows, H, stride of a token, stride of a head).

    Row i, counted over all dimensions but the last, starts at element
    i // H * token + i % H * head of the rows returned, and its n elements are neighbours. Nothing
    is copied where the last two dimensions are heads of n and one stride leads from token to token.
    """
    if x.dim() < 2 or x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() < 3:
        return x, 1, x.stride(0) if x.dim() == 2 else 0, 0
    x = x.reshape(-1, *x.shape[-2:])
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x, x.shape[1], x.stride(0), x.stride(1)
