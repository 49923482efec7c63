"""Refusals that operators share, and the place of a rank that they speak of."""

from __future__ import annotations

import torch
import torch.distributed as dist

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


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(number of ranks, this rank) of `group`; (1, 0) without one."""
    return (dist.get_world_size(group), dist.get_rank(group)) if group else (1, 0)


def require_shard(
    error_id: str, unit: str, at: tuple[int, int], *, start: int, held: int, width: int
) -> None:
    """Rank r of `at` (see `place`) holds units r * width to (r + 1) * width, else `error_id`.

    `start` is the first unit held here, `held` their number; a process alone may hold more than
    `width` (padding). `unit` says what is counted, as in "rows".
    """
    ranks, rank = at
    if start != rank * width or (ranks > 1 and held != width):
        raise Refused(
            error_id,
            seen=f"rank {rank} of {ranks} holds {unit} {start} to {start + held}",
            required=f"{unit} {rank * width} to {(rank + 1) * width}",
            hint=f"samebits explain {error_id}",
        )


def require_ids(error_id: str, name: str, ids: torch.Tensor, size: int) -> None:
    """Every entry of `ids`, int64 of any shape, lies in 0 <= id < size, else `error_id`."""
    if not ids.numel():
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= size:
        raise Refused(
            error_id,
            seen=f"{name} ids from {low} to {high}",
            required=f"0 <= id < {size}",
            hint=f"samebits explain {error_id}",
        )
