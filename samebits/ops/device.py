"""exp, log and fixed-order sums in fp32 as Triton device functions: one for each formula.

The element functions are, operation for operation, those of `samebits/ops/scalar.py`,
`gate_scalar.py` and `gdn_scalar.py`, so whatever is built on them has the CPU's bits. Kernels are
launched without FP contraction (`samebits.ops.gpu.POLICY`): only `tl.fma` fuses.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp32(x):
    """exp, fp32. +0 below -103.98 and for -inf; inf above 88.72; NaN kept."""
    x = tl.where(x < -104.0, -104.0, x)
    x = tl.where(x > 89.0, 89.0, x)
    t = tl.fma(x, 1.442695, 12582912.0)
    n = t - 12582912.0
    r = tl.fma(n, 1.9046542e-09, tl.fma(n, -0.6931472, x))
    q = tl.fma(r, 0.0013814539, 0.0083687454)
    q = tl.fma(q, r, 0.041668389)
    q = tl.fma(q, r, 0.16666521)
    q = tl.fma(q, r, 0.49999994)
    p = 1.0 + tl.fma(r * r, q, r)
    power = t.to(tl.int32, bitcast=True) - 0x4B400000
    half = power >> 1
    low = ((half + 127) << 23).to(tl.float32, bitcast=True)
    high = ((power - half + 127) << 23).to(tl.float32, bitcast=True)
    return (p * low) * high


@triton.jit
def log32(x):
    """Natural log, fp32. -inf at zero, inf at inf, NaN below zero; NaN kept."""
    tiny = x < 1.1754944e-38
    bits = tl.where(tiny, x * 8388608.0, x).to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23
    f = (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0
    n = tl.where(tiny, e - 23, e).to(tl.float32)
    q = tl.fma(f, -0.07634486, 0.12761967)
    q = tl.fma(q, f, -0.13160367)
    q = tl.fma(q, f, 0.14201719)
    q = tl.fma(q, f, -0.16623336)
    q = tl.fma(q, f, 0.20001228)
    q = tl.fma(q, f, -0.25000823)
    q = tl.fma(q, f, 0.3333333)
    z = f * f
    y = tl.fma(z, -0.5, tl.fma(f * z, q, n * -1.9046542e-09))
    y = tl.fma(n, 0.6931472, f + y)
    y = tl.where(x < float("inf"), y, x)
    y = tl.where(x == 0.0, float("-inf"), y)
    return tl.where(x < 0.0, float("nan"), y)


@triton.jit
def exp2_32(x):
    """2**x, fp32. +0 below -150 and for -inf; inf from 128; NaN kept."""
    x = tl.where(x < -151.0, -151.0, x)
    x = tl.where(x > 129.0, 129.0, x)
    t = x + 12582912.0
    r = x - (t - 12582912.0)
    q = tl.fma(r, 0.00015456358, 0.0013391643)
    q = tl.fma(q, r, 0.009618077)
    q = tl.fma(q, r, 0.05550358)
    q = tl.fma(q, r, 0.2402265)
    q = tl.fma(q, r, 0.6931472)
    p = tl.fma(r, q, 1.0)
    power = t.to(tl.int32, bitcast=True) - 0x4B400000
    half = power >> 1
    low = ((half + 127) << 23).to(tl.float32, bitcast=True)
    high = ((power - half + 127) << 23).to(tl.float32, bitcast=True)
    return (p * low) * high


@triton.jit
def softplus32(x):
    """log(1 + exp(x)), fp32; x itself above 20."""
    e = exp32(x)
    u = 1.0 + e
    y = log32(u) + tl.div_rn(e - (u - 1.0), u)
    return tl.where(x > 20.0, x, tl.where(u < float("inf"), y, u))


@triton.jit
def sigmoid32(x):
    """1 / (1 + exp(-x)), fp32."""
    d = 1.0 + exp32(-x)
    return tl.div_rn(tl.full(d.shape, 1.0, tl.float32), d)


@triton.jit
def reciprocal(x):
    """1 / x, fp32, correctly rounded: the bits of an IEEE division, in fewer instructions."""
    return tl.inline_asm_elementwise(
        "rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def fold(x, ROWS: tl.constexpr, N: tl.constexpr, NEAR: tl.constexpr):
    """x [ROWS, N] -> [ROWS]: sum over N, a power of two, by a tree that no layout can move.

    First neighbours (0+1, 2+3, ...) until N / NEAR sums are left, then halves (i and i + half).
    Each step adds two numbers, so its order cannot depend on threads or warps.
    """
    size: tl.constexpr = N // NEAR
    x = tl.reshape(x, (ROWS, size, NEAR))
    if NEAR >= 2:
        x = tl.sum(tl.reshape(x, (ROWS * size, NEAR // 2, 2)), axis=2)
    if NEAR >= 4:
        x = tl.sum(tl.reshape(x, (ROWS * size, NEAR // 4, 2)), axis=2)
    if NEAR >= 8:
        x = tl.sum(tl.reshape(x, (ROWS * size, NEAR // 8, 2)), axis=2)
    x = tl.reshape(x, (ROWS, size))
    for level in tl.static_range(0, 16):
        if (size >> level) >= 2:
            x = tl.sum(tl.reshape(x, (ROWS, 2, size >> (level + 1))), axis=1)
    return tl.reshape(x, (ROWS,))
