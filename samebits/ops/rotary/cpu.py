"""Table and kernel of the rotary embedding; the schedule is stated in the package's docstring."""

from __future__ import annotations

import array
import functools
import math

import torch

from samebits.ops.jit import as_numpy, fma, kernel, parallel_for
from samebits.ops.scalar import narrow, widen

_GRAIN = 16384  # elements per task: below this a thread costs more than it saves


@functools.cache
def make_table(max_position: int, rotary_dim: int, base: float) -> torch.Tensor:
    """fp32 [max_position, rotary_dim], each entry by scalar float64 arithmetic."""
    frequencies = [base ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)]
    entries = array.array("d")
    for position in range(max_position):
        angles = [position * f for f in frequencies]
        entries.extend(map(math.cos, angles))
        entries.extend(map(math.sin, angles))
    wide = torch.frombuffer(entries, dtype=torch.float64)
    return wide.float().reshape(max_position, rotary_dim)


@kernel
def rotary_fwd_kernel(x, positions, table, inverse, y, start, stop):
    """Rows start to stop: halves turned by table[positions[i]], or back; the rest copied."""
    heads, width, half = x.shape[1], x.shape[2], table.shape[1] // 2
    for i in range(start, stop):
        cos, sin = table[positions[i], :half], table[positions[i], half:]
        for h in range(heads):
            src, dst = x[i, h], y[i, h]
            for j in range(half):
                c = cos[j]
                s = -sin[j] if inverse else sin[j]
                x1, x2 = widen(src[j]), widen(src[half + j])
                dst[j] = narrow(fma(x1, c, -(x2 * s)))
                dst[half + j] = narrow(fma(x2, c, x1 * s))
            for j in range(2 * half, width):
                dst[j] = src[j]


def forward(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, inverse: bool
) -> torch.Tensor:
    """Contiguous x [T, H, D] bf16, positions [T] int64 in range, fp32 table -> [T, H, D] bf16."""
    y = torch.empty_like(x)
    args = (as_numpy(x), as_numpy(positions), as_numpy(table), inverse, as_numpy(y))
    parallel_for(
        lambda start, stop: rotary_fwd_kernel(*args, start, stop),
        x.shape[0],
        max(1, _GRAIN // max(1, x.shape[1] * x.shape[2])),
    )
    return y
