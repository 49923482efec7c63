"""Rotary positions: the shared fp32 table travels where Megatron passes its angles."""

from __future__ import annotations

import torch

from samebits import runtime
from samebits.errors import Refused
from samebits.hooks.megatron import device
from samebits.ops import rotary

# Tables are made for a multiple of this many positions, so that new lengths seldom make new ones.
_STEP = 512


def bound() -> bool:
    """Whether tables and the rotation are ours."""
    return runtime.aligned("rope")


def _refuse(seen: str, required: str) -> Refused:
    return Refused("SB0605", seen=seen, required=required, hint="samebits explain SB0605")


def table(embedding: torch.nn.Module, length: int, offset: int) -> torch.Tensor:
    """Table of a `RotaryEmbedding` for positions offset .. offset + length - 1.

    fp32 [length, 1, 1, rotary_dim] on this process's device: cosines, then sines (upstream: the
    angles, twice). Megatron keeps it, so it is moved once for each length.
    """
    if embedding.rotary_interleaved or embedding.rope_scaling:
        raise _refuse("interleaved or scaled rotary positions", "the plain halves layout")
    if embedding.seq_len_interpolation_factor is not None:
        raise _refuse("interpolated rotary positions", "integer positions")
    stop = offset + length
    rows = rotary.table(-(-stop // _STEP) * _STEP, embedding.rotary_dim, embedding.rotary_base)
    return rows[offset:stop, None, None, :].to(device.current())


def apply(
    t: torch.Tensor,
    angles: torch.Tensor,
    config,
    cu_seqlens: torch.Tensor | None,
    mscale: float,
) -> torch.Tensor:
    """Turn queries or keys: t [s, b, h, d], or [t, h, d] with `cu_seqlens` [n + 1].

    Positions count from 0 in every sequence; `angles` is what `table` returned.
    """
    if mscale != 1.0 or config.multi_latent_attention:
        raise _refuse(f"mscale {mscale}, latent attention", "plain rotary positions")
    rows = angles[:, 0, 0, :]
    if cu_seqlens is None:
        s, b, h, d = t.shape
        positions = torch.arange(s, device=t.device).repeat_interleave(b)
        return rotary.apply(t.reshape(s * b, h, d), positions, rows).view(s, b, h, d)
    starts = cu_seqlens.to(torch.int64)
    # The size is known here: without it the host would wait for a GPU that holds the starts.
    first = starts[:-1].repeat_interleave(starts.diff(), output_size=t.shape[0])
    positions = torch.arange(t.shape[0], device=starts.device) - first
    return rotary.apply(t, positions.to(t.device), rows)
