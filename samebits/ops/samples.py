"""Fixed tensors for known-answer probes: a counter hash of (seed, index), no random generator.

The values of a torch or numpy generator may change with a release; these cannot.
"""

from __future__ import annotations

import numpy as np
import torch

from samebits.bits import GOLDEN, splitmix64


def _hash(count: int, seed: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        return splitmix64(np.arange(count, dtype=np.uint64) + np.uint64(seed + 1) * GOLDEN)


def fp32(shape: tuple[int, ...], seed: int, low: int = -8, high: int = 8) -> torch.Tensor:
    """fp32 of either sign, full random mantissa, exponents uniform in [low, high)."""
    z = _hash(int(np.prod(shape)), seed)
    mantissa = (z & np.uint64(0x7FFFFF)).astype(np.uint32)
    exponent = ((z >> np.uint64(23)) % np.uint64(high - low)).astype(np.int64) + (127 + low)
    sign = ((z >> np.uint64(63)) << np.uint64(31)).astype(np.uint32)
    bits = sign | (exponent.astype(np.uint32) << np.uint32(23)) | mantissa
    return torch.from_numpy(bits.view(np.float32)).reshape(shape)


def bf16(shape: tuple[int, ...], seed: int, low: int = -8, high: int = 8) -> torch.Tensor:
    """As `fp32`, with the mantissa cut to bf16 (exact)."""
    return (
        fp32(shape, seed, low, high)
        .view(torch.int32)
        .bitwise_and_(-65536)
        .view(torch.float32)
        .bfloat16()
    )
