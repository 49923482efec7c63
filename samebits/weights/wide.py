"""What `counter` and `checksums` compute with uint64, on torch integers of any device.

torch multiplies and adds int64 modulo 2**64, which is what uint64 does, bit for bit. Only a shift
to the right differs: int64 brings in copies of the sign, which a mask takes off again. Integers
have one sum whatever its order, so these are the bits of the numpy code at a GPU's speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from samebits.bits import GOLDEN, M1, M2

ELEMENTS = 1 << 24  # at a time: a few temporary tensors of 128 MiB; moves no bit
_MASK = (1 << 64) - 1


def signed(value: int | np.uint64) -> int:
    """The int64 with the bits of a uint64."""
    value = int(value) & _MASK
    return value - (1 << 64) if value >> 63 else value


_GOLDEN, _M1, _M2 = signed(GOLDEN), signed(M1), signed(M2)


def shifted(z: torch.Tensor, count: int) -> torch.Tensor:
    """int64 z moved right by 0 < `count` < 64 bits, zeros from the left."""
    return (z >> count).bitwise_and_((1 << (64 - count)) - 1)


def splitmix64(z: torch.Tensor) -> torch.Tensor:
    """`bits.splitmix64` of int64 z."""
    z = shifted(z, 30).bitwise_xor_(z).mul_(_M1)
    z = shifted(z, 27).bitwise_xor_(z).mul_(_M2)
    return shifted(z, 31).bitwise_xor_(z)


def flat_index(offsets: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Offsets of rows [R] and columns [C], int64 on `device`: row plus column is a flat index.

    offsets   of every axis, as `checksums.axis_offsets` gives them; the columns are the last axis
    """
    axes = [torch.from_numpy(axis.view(np.int64)).to(device) for axis in offsets]
    columns = axes.pop() if axes else torch.zeros(1, dtype=torch.int64, device=device)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for axis in axes:
        rows = (rows[:, None] + axis).flatten()
    return [rows, columns]


def spans(rows: int, columns: int) -> list[slice]:
    """Rows in parts of about `ELEMENTS` elements, one row at least."""
    step = max(1, ELEMENTS // max(1, columns))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def hashed(key: int | np.uint64, flat: torch.Tensor) -> torch.Tensor:
    """splitmix64(key + (flat + 1) * golden), int64: what `counter` draws from."""
    return splitmix64((flat + 1).mul_(_GOLDEN).add_(signed(key)))


def fields(hashes: torch.Tensor) -> torch.Tensor:
    """Sum of the four 16-bit fields of int64 `hashes`, int64."""
    total = hashes & 0xFFFF
    for place in (16, 32, 48):
        total += shifted(hashes, place).bitwise_and_(0xFFFF)
    return total


def patterns(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns of a contiguous tensor as non-negative int64 (of 8-byte elements, as they are),
    on its device."""
    width = x.element_size()
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    wide = x.view(view).to(torch.int64)
    return wide if width == 8 else wide.bitwise_and_((1 << 8 * width) - 1)


def mixsum(values: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Both halves (low, high) of `bits.mixsum`, int64 [2]; values are `patterns`, as flat int64."""
    seed = splitmix64((flat * _GOLDEN).add_(_GOLDEN))
    low = splitmix64(seed ^ values)
    high = splitmix64((values * _M2).add_(_GOLDEN).bitwise_xor_(seed.add_(_M1)))
    return torch.stack([low.sum(), high.sum()])


def digest(halves: torch.Tensor) -> int:
    """The 128-bit digest of `mixsum`'s halves (or of a sum of them); waits for the device."""
    low, high = (half & _MASK for half in halves.tolist())
    return (high << 64) | low
