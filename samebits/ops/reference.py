"""Primitives that the slow references share: one IEEE 754 rounding at a time, in plain torch."""

from __future__ import annotations

import torch


def fma32(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """fl32(a * b + c) with one rounding, fp32 in and out, elementwise with broadcasting.

    The product of two fp32 numbers is exact in float64. The sum is rounded to odd in float64 (an
    inexact sum takes the neighbour whose last bit is set), which makes the second rounding to
    fp32 equal to a single rounding of the exact value, subnormals included.
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = (total.contiguous().view(torch.int64) & 1) == 0
    toward = torch.where(error > 0, torch.inf, -torch.inf).double()
    inexact = torch.isfinite(total) & (error != 0)
    total = torch.where(inexact & even, torch.nextafter(total, toward), total)
    return total.float()
