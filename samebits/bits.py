"""Bit equality: integer views, first difference, ulp distance, order-free digests.

Two tensors are *equal* here when their bit patterns are: +0 differs from -0, and a NaN makes a
comparison fail whatever its payload.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_INT_OF_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# The constants of SplitMix64; digests and random weights share them.
M1 = np.uint64(0xBF58476D1CE4E5B9)
M2 = np.uint64(0x94D049BB133111EB)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def int_view(x) -> np.ndarray:
    """Unsigned integer view of a torch tensor or numpy array, same shape, C order."""
    if not isinstance(x, np.ndarray):  # a torch tensor; torch is not imported for numpy callers
        import torch

        x = x.detach().cpu().contiguous()
        width = x.element_size()
        x = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]).numpy()
    x = np.ascontiguousarray(x)
    return x.view(_INT_OF_WIDTH[x.dtype.itemsize])


def _nan_mask(x) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return np.isnan(x) if x.dtype.kind == "f" else np.zeros(x.shape, bool)
    return x.detach().cpu().isnan().numpy() if x.is_floating_point() else np.zeros(x.shape, bool)


@dataclass(frozen=True)
class Difference:
    """First differing element of two tensors: index and both bit patterns (hex)."""

    index: tuple[int, ...]
    left: str
    right: str


@dataclass(frozen=True)
class Comparison:
    """Counts of one comparison. `max_ulp` is -1 where a NaN or an integer dtype was involved."""

    elements: int
    mismatches: int
    max_ulp: int
    first: Difference | None

    @property
    def equal(self) -> bool:
        """Whether anything was compared, and all of it has one bit pattern on both sides."""
        return self.elements > 0 and self.mismatches == 0


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Map float bit patterns to integers that count ulps (Python-int safe for 4-byte floats)."""
    width = bits.dtype.itemsize * 8
    sign = np.uint64(1) << np.uint64(width - 1)
    wide = bits.astype(np.uint64)
    magnitude = (wide & (sign - np.uint64(1))).astype(np.int64)
    return np.where(wide & sign, -magnitude, magnitude)


def compare(left, right) -> Comparison:
    """Compare two tensors of one shape and dtype by bit pattern. NaN never passes."""
    if tuple(left.shape) != tuple(right.shape) or left.dtype != right.dtype:
        raise ValueError(
            f"cannot compare {left.shape} {left.dtype} with {right.shape} {right.dtype}"
        )
    a, b = int_view(left), int_view(right)
    nan = _nan_mask(left) | _nan_mask(right)
    bad = (a != b) | nan
    count = int(bad.sum())
    if count == 0:
        return Comparison(a.size, 0, 0, None)
    flat = int(np.flatnonzero(bad.ravel())[0])
    index = tuple(int(i) for i in np.unravel_index(flat, a.shape))
    digits = a.dtype.itemsize * 2
    first = Difference(
        index, f"{int(a.ravel()[flat]):0{digits}x}", f"{int(b.ravel()[flat]):0{digits}x}"
    )
    ulp = -1 if nan.any() or a.dtype.itemsize > 4 else int(np.abs(_ordered(a) - _ordered(b)).max())
    return Comparison(a.size, count, ulp, first)


def equal(left, right) -> bool:
    """True when shapes, dtypes and every bit agree and no element is a NaN."""
    same = tuple(left.shape) == tuple(right.shape) and left.dtype == right.dtype
    return same and compare(left, right).mismatches == 0


def splitmix64(z: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: a bijection of uint64 that spreads every input bit."""
    z = (z ^ (z >> np.uint64(30))) * M1
    z = (z ^ (z >> np.uint64(27))) * M2
    return z ^ (z >> np.uint64(31))


def mixsum(x, index: np.ndarray | None = None) -> int:
    """Order-free 128-bit digest: sum over elements of mix(index, bits), mod 2**64, twice.

    `index` holds each element's *logical* flat index (default: its own C-order index), so that
    digests of disjoint shards add up (`add_digests`) to the digest of the whole, in any order.
    """
    bits = int_view(x).ravel().astype(np.uint64)
    where = (
        np.arange(bits.size, dtype=np.uint64) if index is None else index.ravel().astype(np.uint64)
    )
    with np.errstate(over="ignore"):
        seed = splitmix64(where * GOLDEN + GOLDEN)
        low = int(splitmix64(seed ^ bits).sum(dtype=np.uint64))
        high = int(splitmix64((seed + M1) ^ (bits * M2 + GOLDEN)).sum(dtype=np.uint64))
    return (high << 64) | low


def add_digests(*digests: int) -> int:
    """Combine `mixsum` digests of disjoint shards: both halves add mod 2**64."""
    mask = (1 << 64) - 1
    low = sum(d & mask for d in digests) & mask
    high = sum(d >> 64 for d in digests) & mask
    return (high << 64) | low


def hex_digest(digest: int) -> str:
    """A `mixsum` digest as 32 hexadecimal digits."""
    return f"{digest:032x}"
