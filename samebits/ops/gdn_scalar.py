"""exp2 in fp32 for the gated delta rule, from additions, multiplications and fma alone.

As in `scalar`: a fixed list of IEEE 754 operations, so that element, lane, batch and machine cannot
move a bit. Every constant is part of the schedule. Largest error 0.87 units in the last place of
the true value, subnormal results included (found by tests over millions of points).

exp2_32(x), n = integer nearest to x (found by adding 1.5 * 2**23), r = x - n (exact):
    2**x = 2**n (1 + r q(r)), q of degree 5 by Horner in fma, the last step an fma with 1,
    the power of two applied in two exact halves, so that subnormals are rounded once.
"""

from __future__ import annotations

import numpy as np
import torch

from samebits.ops.jit import fma, kernel
from samebits.ops.reference import fma32
from samebits.ops.scalar import bits_of, float_of

_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, ties to even
_ROUND_BITS = np.int32(0x4B400000)
_LOW = np.float32(-151.0)  # 2**x is below half of the least subnormal
_HIGH = np.float32(129.0)  # 2**x is beyond the largest finite number
_ONE = np.float32(1.0)
_Q0 = np.float32(0.6931472)
_Q1 = np.float32(0.2402265)
_Q2 = np.float32(0.05550358)
_Q3 = np.float32(0.009618077)
_Q4 = np.float32(0.0013391643)
_Q5 = np.float32(0.00015456358)


@kernel
def exp2_32(x):
    """2**x of an fp32 scalar, fp32. +0 below -150 and for -inf; inf from 128; NaN kept."""
    x = _LOW if x < _LOW else x
    x = _HIGH if x > _HIGH else x
    t = x + _ROUND
    r = x - (t - _ROUND)
    q = fma(fma(fma(fma(fma(_Q5, r, _Q4), r, _Q3), r, _Q2), r, _Q1), r, _Q0)
    p = fma(r, q, _ONE)
    power = np.int32(bits_of(t) - _ROUND_BITS)
    half = np.int32(power >> np.int32(1))
    rest = np.int32(power - half)
    low = float_of(np.int32((half + np.int32(127)) << np.int32(23)))
    high = float_of(np.int32((rest + np.int32(127)) << np.int32(23)))
    return (p * low) * high


def reference_exp2_32(x: torch.Tensor) -> torch.Tensor:
    """exp2_32 elementwise in plain torch, fp32 in and out, bit for bit the kernel's value."""

    def c(value) -> torch.Tensor:
        return torch.tensor(float(value), dtype=torch.float32)

    x = torch.where(x < c(_LOW), c(_LOW), x)
    x = torch.where(x > c(_HIGH), c(_HIGH), x)
    n = (x + c(_ROUND)) - c(_ROUND)
    r = x - n
    q = c(_Q5)
    for coefficient in (_Q4, _Q3, _Q2, _Q1, _Q0):
        q = fma32(q, r, c(coefficient))
    p = fma32(r, q, c(_ONE))
    power = torch.nan_to_num(n).int()
    half = power >> 1
    low = ((half + 127) << 23).view(torch.float32)
    high = ((power - half + 127) << 23).view(torch.float32)
    return (p * low) * high
