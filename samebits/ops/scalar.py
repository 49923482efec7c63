"""exp, log, bf16 conversion and lane sums in fp32, from additions, multiplications and fma alone.

A math library may compute one element with other instructions than a vector of them, and another
build of it may round differently. These functions are a fixed list of IEEE 754 operations, so
element, lane, batch and machine cannot move a bit. Every constant below is part of the schedule.

Largest error, in units in the last place of the true value (found by tests over millions of
points): exp32 1.02 (subnormal results included), log32 0.86.

exp32(x), n = integer nearest to x / ln 2 (found by adding 1.5 * 2**23), r = x - n ln 2 in two fma:
    exp(x) = 2**n (1 + (r + r**2 q(r))), q of degree 4 by Horner in fma,
    the power of two applied in two exact halves, so that subnormals are rounded once.
log32(x), x = 2**e (1 + f), sqrt(1/2) <= 1 + f < sqrt(2):
    log(x) = e ln2_hi + (f + (-f**2/2 + (e ln2_lo + f**3 q(f)))), q of degree 7 by Horner in fma.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from samebits.ops.jit import fma, kernel
from samebits.ops.reference import fma32

LANES = 16  # element i of a long sum goes to lane i % LANES, ascending; then `fold_lanes`

_LN2_HI = np.float32(0.6931472)
_LN2_LO = np.float32(-1.9046542e-09)
_LOG2_E = np.float32(1.442695)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, ties to even
_ROUND_BITS = np.int32(0x4B400000)
_EXP_LOW = np.float32(-104.0)  # exp is below half of the least subnormal
_EXP_HIGH = np.float32(89.0)  # exp is beyond the largest finite number
_E0 = np.float32(0.49999994)
_E1 = np.float32(0.16666521)
_E2 = np.float32(0.041668389)
_E3 = np.float32(0.0083687454)
_E4 = np.float32(0.0013814539)
_L0 = np.float32(0.3333333)
_L1 = np.float32(-0.25000823)
_L2 = np.float32(0.20001228)
_L3 = np.float32(-0.16623336)
_L4 = np.float32(0.14201719)
_L5 = np.float32(-0.13160367)
_L6 = np.float32(0.12761967)
_L7 = np.float32(-0.07634486)
_SQRT_HALF_BITS = np.int32(0x3F3504F3)
_LEAST_NORMAL = np.float32(1.1754944e-38)
_TWO_23 = np.float32(8388608.0)
_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
_ZERO = np.float32(0.0)
_INF = np.float32(np.inf)
_NAN = np.float32(np.nan)


@intrinsic
def bits_of(typingctx, x):
    """The 32 bits of an fp32 scalar, as int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def float_of(typingctx, x):
    """The fp32 scalar with the bits of an int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@kernel
def exp32(x):
    """exp of an fp32 scalar, fp32. +0 below -103.98 and for -inf; inf above 88.72; NaN kept."""
    x = _EXP_LOW if x < _EXP_LOW else x
    x = _EXP_HIGH if x > _EXP_HIGH else x
    t = fma(x, _LOG2_E, _ROUND)
    n = t - _ROUND
    r = fma(n, -_LN2_LO, fma(n, -_LN2_HI, x))
    q = fma(fma(fma(fma(_E4, r, _E3), r, _E2), r, _E1), r, _E0)
    p = _ONE + fma(r * r, q, r)
    power = np.int32(bits_of(t) - _ROUND_BITS)
    half = np.int32(power >> np.int32(1))
    rest = np.int32(power - half)
    low = float_of(np.int32((half + np.int32(127)) << np.int32(23)))
    high = float_of(np.int32((rest + np.int32(127)) << np.int32(23)))
    return (p * low) * high


@kernel
def log32(x):
    """Natural log of an fp32 scalar, fp32. -inf at zero, inf at inf, NaN below zero; NaN kept."""
    tiny = x < _LEAST_NORMAL
    bits = bits_of(x * _TWO_23 if tiny else x)
    e = np.int32((bits - _SQRT_HALF_BITS) >> np.int32(23))
    f = float_of(np.int32(bits - np.int32(e << np.int32(23)))) - _ONE
    n = np.float32(np.int32(e - np.int32(23)) if tiny else e)
    q = fma(fma(fma(_L7, f, _L6), f, _L5), f, _L4)
    q = fma(fma(fma(fma(q, f, _L3), f, _L2), f, _L1), f, _L0)
    z = f * f
    y = fma(-_HALF, z, fma(f * z, q, n * _LN2_LO))
    y = fma(n, _LN2_HI, f + y)
    y = y if x < _INF else x  # inf and NaN
    y = y if x != _ZERO else -_INF
    return _NAN if x < _ZERO else y


@kernel
def widen(h):
    """fp32 value of a bf16 scalar given as uint16; exact."""
    return float_of(np.int32(np.int32(h) << np.int32(16)))


@kernel
def narrow(x):
    """bf16 bits (uint16) of an fp32 scalar: to nearest, ties to even; a NaN stays a quiet NaN."""
    bits = np.uint32(bits_of(x))
    top = np.uint32(bits >> np.uint32(16))
    even = np.uint32(top & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + even)
    nan = np.uint32(top | np.uint32(0x40))
    return np.uint16(nan if x != x else np.uint32(rounded >> np.uint32(16)))


@kernel
def fold_lanes(lanes):
    """Sum of LANES fp32 partial sums: ((0+1)+(2+3))+..., the lower index on the left."""
    step = 1
    while step < LANES:
        for i in range(0, LANES, 2 * step):
            lanes[i] = lanes[i] + lanes[i + step]
        step *= 2
    return lanes[0]


def reference_narrow(x: torch.Tensor) -> torch.Tensor:
    """`narrow` elementwise in plain torch: fp32 -> bf16, bit for bit the kernel's value."""
    bits = x.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    half = torch.where(torch.isnan(x), (bits >> 16) | 0x40, rounded)
    return half.to(torch.int32).to(torch.uint16).view(torch.bfloat16)


def reference_exp32(x: torch.Tensor) -> torch.Tensor:
    """exp32 elementwise in plain torch, fp32 in and out, bit for bit the kernel's value."""

    def c(value) -> torch.Tensor:
        return torch.tensor(float(value), dtype=torch.float32)

    x = torch.where(x < c(_EXP_LOW), c(_EXP_LOW), x)
    x = torch.where(x > c(_EXP_HIGH), c(_EXP_HIGH), x)
    t = fma32(x, c(_LOG2_E), c(_ROUND))
    n = t - c(_ROUND)
    r = fma32(n, c(-_LN2_LO), fma32(n, c(-_LN2_HI), x))
    q = c(_E4)
    for coefficient in (_E3, _E2, _E1, _E0):
        q = fma32(q, r, c(coefficient))
    p = 1 + fma32(r * r, q, r)
    power = torch.nan_to_num(n).int()
    half = power >> 1
    low = ((half + 127) << 23).view(torch.float32)
    high = ((power - half + 127) << 23).view(torch.float32)
    return (p * low) * high


def reference_log32(x: torch.Tensor) -> torch.Tensor:
    """log32 elementwise in plain torch, fp32 in and out, bit for bit the kernel's value."""

    def c(value) -> torch.Tensor:
        return torch.tensor(float(value), dtype=torch.float32)

    tiny = x < c(_LEAST_NORMAL)
    bits = torch.where(tiny, x * c(_TWO_23), x).view(torch.int32)
    e = (bits - int(_SQRT_HALF_BITS)) >> 23
    f = (bits - (e << 23)).view(torch.float32) - 1
    n = torch.where(tiny, e - 23, e).float()
    q = c(_L7)
    for coefficient in (_L6, _L5, _L4, _L3, _L2, _L1, _L0):
        q = fma32(q, f, c(coefficient))
    z = f * f
    y = fma32(c(-_HALF), z, fma32(f * z, q, n * c(_LN2_LO)))
    y = fma32(n, c(_LN2_HI), f + y)
    y = torch.where(x < torch.inf, y, x)
    y = torch.where(x == 0, c(-_INF), y)
    return torch.where(x < 0, c(_NAN), y)
