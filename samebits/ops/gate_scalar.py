"""log1p, softplus and sigmoid in fp32, from the functions of `samebits.ops.scalar`.

As there: a fixed list of IEEE 754 operations, so that element, lane, batch and machine cannot move
a bit. Every constant is part of the schedule.

Largest error, in units in the last place of the true value (found by tests over millions of
points): log1p32 1.3, softplus32 2.1, sigmoid32 2.5 (normal results).

log1p32(x), u = 1 + x:  log32(u) + (x - (u - 1)) / u; the second term holds what u lost.
softplus32(x) = log1p32(exp32(x)), and x itself above 20.
sigmoid32(x) = 1 / (1 + exp32(-x)).
"""

from __future__ import annotations

import numpy as np
import torch

from samebits.ops.jit import kernel
from samebits.ops.scalar import exp32, log32, reference_exp32, reference_log32

_LINEAR = np.float32(20.0)  # above it, softplus(x) rounds to x
_ONE = np.float32(1.0)
_INF = np.float32(np.inf)


@kernel
def log1p32(x):
    """log(1 + x) of an fp32 scalar x >= 0, fp32. inf at inf; NaN kept."""
    u = _ONE + x
    y = log32(u) + (x - (u - _ONE)) / u
    return y if u < _INF else u


@kernel
def softplus32(x):
    """log(1 + exp(x)) of an fp32 scalar, fp32; x itself above 20. +0 at -inf; NaN kept."""
    return x if x > _LINEAR else log1p32(exp32(x))


@kernel
def sigmoid32(x):
    """1 / (1 + exp(-x)) of an fp32 scalar, fp32. +0 below about -88.7; NaN kept."""
    return _ONE / (_ONE + exp32(-x))


def reference_log1p32(x: torch.Tensor) -> torch.Tensor:
    """log1p32 elementwise in plain torch, fp32 in and out, bit for bit the kernel's value."""
    u = 1 + x
    y = reference_log32(u) + (x - (u - 1)) / u
    return torch.where(u < torch.inf, y, u)


def reference_softplus32(x: torch.Tensor) -> torch.Tensor:
    """softplus32 elementwise in plain torch, fp32 in and out, bit for bit the kernel's value."""
    return torch.where(x > float(_LINEAR), x, reference_log1p32(reference_exp32(x)))


def reference_sigmoid32(x: torch.Tensor) -> torch.Tensor:
    """sigmoid32 elementwise in plain torch, fp32 in and out, bit for bit the kernel's value."""
    return 1 / (1 + reference_exp32(-x))
