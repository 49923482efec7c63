"""The schedule of `gemm` on Hopper as integer arithmetic in plain torch. Slow; this is the law.

The matrix unit's arithmetic is not documented. This is what it does, found by trying candidates
and confirmed by the bit gates on operands of every magnitude. One leaf, accumulator c = +0, then
for every 16 consecutive k, ascending:
1. the 16 products are exact: an integer times a power of two, whose exponent is the sum of the two
   operands' exponents (a product in [1, 4) is not normalised);
2. all products that are not zero, and c, are aligned to the largest of their exponents, with 25
   bits below it; what falls off is dropped (toward zero, sign and magnitude);
3. the 17 integers are added exactly;
4. the sum is cut to fp32, toward zero; subnormals are kept.
A leaf whose length is not a multiple of 16 is padded with zeros. Leaves are folded by the plan's
tree with IEEE fp32 additions, and the root is rounded once to bf16, ties to even. A bias is widened
to fp32 and added to the root by one IEEE addition, before that rounding: it is never what the chain
starts from. The statement covers finite operands whose sums stay finite.
"""

from __future__ import annotations

import torch

from samebits.plan import ReductionPlan

STEP = 16  # products added at once
BITS = 25  # bits kept below the largest exponent
_NOTHING = -(1 << 20)  # exponent of a zero term: never the largest


def _parts(x: torch.Tensor, width: int, mantissa: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(signed significand, exponent) as int64; value = significand * 2**(exponent - mantissa)."""
    kind = {16: torch.int16, 32: torch.int32}[width]
    bits = x.contiguous().view(kind).long()
    field = (bits >> mantissa) & 0xFF
    fraction = bits & ((1 << mantissa) - 1)
    significand = torch.where(field > 0, fraction | (1 << mantissa), fraction)
    return torch.where(bits < 0, -significand, significand), field.clamp(min=1) - 127


def _shift(value: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """value * 2**left, toward zero."""
    size = value.abs()
    size = torch.where(left >= 0, size << left.clamp(0, 40), size >> (-left).clamp(0, 62))
    return torch.where(value < 0, -size, size)


def _cut(total: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """fp32 of total * 2**exponent, toward zero."""
    size = total.abs()
    length = torch.frexp(size.double())[1].long()  # below 2**53, so exact
    lowest = (length + exponent - 24).clamp(min=-149)  # exponent of the result's last bit
    size = _shift(size, exponent - lowest)
    power = ((lowest + 1023) << 52).view(torch.float64)
    value = (size.double() * power).float()  # exact: at most 24 bits
    return torch.where(total < 0, -value, value)


def step(x: torch.Tensor, w: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """One MMA: x [M, 16] and w [N, 16] bf16, c [M, N] fp32 -> [M, N] fp32."""
    (xs, xe), (ws, we), (cs, ce) = _parts(x, 16, 7), _parts(w, 16, 7), _parts(c, 32, 23)
    product = xs[:, None] * ws[None]
    exponent = xe[:, None] + we[None]
    top = torch.where(product != 0, exponent, _NOTHING).amax(-1)
    top = torch.maximum(top, torch.where(cs != 0, ce, _NOTHING))
    top = torch.where(top == _NOTHING, 0, top)
    total = _shift(product, exponent - 14 - top[..., None] + BITS).sum(-1)
    total += _shift(cs, ce - 23 - top + BITS)
    return _cut(total, top - BITS)


def leaf(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [M, n] and w [N, n] bf16 -> [M, N] fp32."""
    x, w = (torch.nn.functional.pad(t, (0, -t.shape[1] % STEP)) for t in (x, w))
    c = torch.zeros(x.shape[0], w.shape[0], device=x.device)
    for k in range(0, x.shape[1], STEP):
        c = step(x[:, k : k + STEP], w[:, k : k + STEP], c)
    return c


def accumulate(x: torch.Tensor, w: torch.Tensor, plan: ReductionPlan) -> torch.Tensor:
    """x [M, K] and w [N, K] bf16 -> [M, N] fp32, the unrounded root."""
    return plan.fold([leaf(x[:, a:b], w[:, a:b]) for a, b in plan.cuts(x.shape[1])])


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x [M, K], w [N, K] and bias [N] bf16 -> [M, N] bf16."""
    return (leaf(x, w) + bias.float()).bfloat16()
