"""Checksums of logical tensors that add up over shards, at memory speed.

The checksum is `samebits.bits.mixsum` of a tensor's elements under their flat index in the
*logical* (unsharded, C-order) tensor. A rank sums its own shard, and `bits.add_digests` of all
ranks' values is the checksum of the whole, whatever the layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from samebits import bits
from samebits.ops import jit
from samebits.weights import wide

Index = Sequence[slice | Sequence[int] | np.ndarray]

_ROWS_PER_TASK = 64


def axis_offsets(shape: Sequence[int], index: Index | None = None) -> list[np.ndarray]:
    """Per axis, the flat-index offset (uint64) of every selected position of a logical tensor.

    `index` is read as in `logical[np.ix_(...)]`: one slice or one list of positions per axis; axes
    left out are whole. The flat index of an element is the sum of its axes' offsets.
    """
    selection = [*(index or ()), *[slice(None)] * (len(shape) - len(index or ()))]
    if len(selection) != len(shape):
        raise ValueError(f"{len(selection)} indices for a tensor of {len(shape)} axes")
    offsets, stride = [], 1
    for length, chosen in zip(reversed(shape), reversed(selection), strict=True):
        positions = np.arange(length, dtype=np.uint64)[
            chosen if isinstance(chosen, slice) else np.asarray(chosen, dtype=np.int64)
        ]
        offsets.append(positions * np.uint64(stride))
        stride *= length
    return offsets[::-1]


def tensor_checksum(
    x: torch.Tensor, *, shape: Sequence[int] | None = None, index: Index | None = None
) -> int:
    """128-bit checksum of `x` = logical[index], where the logical tensor has `shape`.

    Without `shape`, `x` is the whole tensor. Any dtype; equals `bits.mixsum(x, flat logical
    index)`. Computed where `x` is, with one value on all devices. Raises ValueError when `x` does
    not have the size that `index` selects.
    """
    offsets = axis_offsets(tuple(x.shape) if shape is None else tuple(shape), index)
    if tuple(x.shape) != tuple(o.size for o in offsets):
        raise ValueError(f"a shard of shape {tuple(x.shape)} does not match its index")
    if x.numel() == 0:
        return 0
    if x.device.type != "cpu":
        return _on_device(x.detach(), offsets)
    if not offsets:
        offsets = [np.zeros(1, np.uint64)]
    columns = offsets[-1]
    rows = np.zeros(1, np.uint64)
    for axis in offsets[:-1]:
        rows = (rows[:, None] + axis[None, :]).ravel()
    patterns = bits.int_view(x).reshape(rows.size, columns.size)
    sums = np.zeros((2, rows.size), np.uint64)
    jit.parallel_for(
        lambda start, stop: _row_sums(patterns, rows, columns, sums, start, stop),
        rows.size,
        _ROWS_PER_TASK,
    )
    low, high = (int(half.sum(dtype=np.uint64)) for half in sums)
    return (high << 64) | low


def _on_device(x: torch.Tensor, offsets: list[np.ndarray]) -> int:
    """`tensor_checksum` of a tensor that numpy cannot read, in torch's integers."""
    rows, columns = wide.flat_index(offsets, x.device)
    values = x.reshape(len(rows), len(columns))
    total = torch.zeros(2, dtype=torch.int64, device=x.device)
    for span in wide.spans(*values.shape):
        part = wide.patterns(values[span].contiguous())
        total += wide.mixsum(part, rows[span, None] + columns)
    return wide.digest(total)


def model_digest(checksums: Iterable[tuple[str, int]]) -> str:
    """sha256 (hex) over the sorted (tensor name, checksum) pairs of a whole model."""
    digest = hashlib.sha256()
    for name, value in sorted(checksums):
        digest.update(f"{name} {bits.hex_digest(value)}\n".encode())
    return digest.hexdigest()


_mix = jit.kernel(bits.splitmix64)
_G, _M1, _M2 = bits.GOLDEN, bits.M1, bits.M2


@jit.kernel
def _row_sums(patterns, rows, columns, sums, start, stop):
    """`bits.mixsum` of rows [start, stop), one pair of sums per row; all arithmetic mod 2**64."""
    for r in range(start, stop):
        low = np.uint64(0)
        high = np.uint64(0)
        for c in range(columns.size):
            seed = _mix((rows[r] + columns[c]) * _G + _G)
            value = np.uint64(patterns[r, c])
            low += _mix(seed ^ value)
            high += _mix((seed + _M1) ^ (value * _M2 + _G))
        sums[0, r] = low
        sums[1, r] = high
