"""Tables of packed sequences and of the state slots that they own: reading and refusing."""

from __future__ import annotations

import numpy as np
import torch

from samebits.errors import Refused


def integers(x: torch.Tensor) -> np.ndarray:
    """A table (any integer dtype) as int64."""
    return x.detach().numpy().astype(np.int64)


def require_starts(starts: np.ndarray, tokens: int, *, whole: bool) -> None:
    """`starts` cuts rows 0..tokens into sequences (all rows, if `whole`), else SB0483."""
    if (
        starts.ndim != 1
        or len(starts) < 1
        or starts[0] != 0
        or (np.diff(starts) < 0).any()
        or starts[-1] > tokens
        or (whole and starts[-1] != tokens)
    ):
        raise Refused(
            "SB0483",
            seen=f"starts {starts.tolist()[:9]} of {tokens} rows",
            required=f"cumulative from 0 {'to' if whole else 'to at most'} {tokens}",
            hint="samebits explain SB0483",
        )


def on_device(x: torch.Tensor, **tables: torch.Tensor) -> list[torch.Tensor]:
    """Integer tables that lie where x does, as int32; SB0420. Their values are not read."""
    for name, table in tables.items():
        if table.device != x.device or table.dtype not in (torch.int32, torch.int64):
            raise Refused(
                "SB0420",
                seen=f"{name} is {table.dtype} on {table.device}",
                required=f"int32 or int64 on {x.device}",
                hint="samebits explain SB0420",
            )
    return [table.to(torch.int32) for table in tables.values()]


def host_checked(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Starts [R + 1] of all rows of x, as int32 on its device.

    A table on the CPU is checked first (SB0483). One on the GPU is not read: the host would wait,
    and whoever made it there answers for its values.
    """
    if not table.is_cuda:
        require_starts(integers(table), len(x), whole=True)
    return table.to(x.device, torch.int32)


def require_slots(slots: np.ndarray, context_lens: np.ndarray, sequences: int, count: int) -> None:
    """One distinct slot below `count` and one length for each of the sequences, else SB0483."""
    if (
        slots.shape != (sequences,)
        or context_lens.shape != (sequences,)
        or (context_lens < 0).any()
        or (slots < 0).any()
        or (slots >= count).any()
        or len(np.unique(slots)) != len(slots)
    ):
        raise Refused(
            "SB0483",
            seen=f"slots {slots.tolist()[:9]}, context lengths {context_lens.tolist()[:9]}",
            required=f"{sequences} distinct slots below {count}, as many lengths from 0",
            hint="samebits explain SB0483",
        )
