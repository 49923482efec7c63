"""Hostile operands for bit tests of matrix products on a GPU, and what counts as a difference."""

from __future__ import annotations

import torch

FINITE = ("normal", "wide", "wider", "subnormal", "tiny operand", "zeros", "ties", "cancel")
KINDS = (*FINITE, "overflow", "nan")
Pair = tuple[torch.Tensor, torch.Tensor]
# Of a bias, by kind of operands; -127 gives subnormals.
BIAS_EXPONENTS = {
    "wide": (-16, 16),
    "wider": (-100, 100),
    "subnormal": (-127, -124),
    "tiny operand": (-127, -60),
    "zeros": (-2, 2),
    "cancel": (-24, 4),
    "overflow": (110, 127),
    "nan": (-16, 16),
}


def bf16(shape: tuple[int, ...], low: int, high: int, random: torch.Generator) -> torch.Tensor:
    """Either sign, random mantissa, exponents uniform in [low, high); -127 gives subnormals.

    In 16 bits throughout: an output layer has a thousand million weights.
    """
    bits = integers(shape, 0, 2, random) << 15
    bits |= integers(shape, low + 127, high + 127, random) << 7
    bits |= integers(shape, 0, 128, random)
    return bits.view(torch.bfloat16)


def integers(shape: tuple[int, ...], low: int, high: int, random: torch.Generator) -> torch.Tensor:
    """int16, uniform in [low, high), on the GPU."""
    return torch.randint(
        low, high, shape, generator=random, device=random.device, dtype=torch.int16
    )


def operands(kind: str, m: int, n: int, k: int, random: torch.Generator) -> Pair:
    """x [m, k] and w [n, k] bf16 on the GPU."""

    def both(low: int, high: int) -> Pair:
        return bf16((m, k), low, high, random), bf16((n, k), low, high, random)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random, device="cuda")

    if kind == "normal":
        x, w = (torch.randn(r, k, generator=random, device="cuda") for r in (m, n))
        return x.bfloat16(), w.mul_(0.02).bfloat16()
    if kind == "ties":  # small integers: exact sums, many halfway between two bf16
        x, w = (integers((r, k), -16, 17, random).bfloat16() for r in (m, n))
        return x, w
    if kind == "zeros":  # of both signs, and few other terms
        x, w = both(-2, 2)
        return torch.where(uniform(m, k) < 0.9, x * 0, x), torch.where(
            uniform(n, k) < 0.5, w * 0, w
        )
    if kind == "cancel":  # the second half of a leaf takes the first one back, in another order
        x, w = both(-8, 8)
        half = k // 2
        x[:, half : 2 * half] = -x[:, :half].flip(1)
        w[:, half : 2 * half] = w[:, :half].flip(1)
        return x, w
    if kind == "nan":
        x, w = both(-8, 8)
        return torch.where(uniform(m, k) < 0.2 / k, torch.nan, x), w
    if kind == "tiny operand":
        return bf16((m, k), -127, -120, random), bf16((n, k), -10, 60, random)
    low, high = {
        "wide": (-8, 8),
        "wider": (-50, 50),
        "subnormal": (-72, -62),
        "overflow": (50, 66),
    }[kind]
    return both(low, high)


def bias_for(kind: str, n: int, random: torch.Generator) -> torch.Tensor:
    """bf16 [n] on the GPU, of the size of the sums of `operands` of this kind; one in four is a
    zero of either sign."""
    if kind == "normal":
        bias = torch.randn(n, generator=random, device="cuda").bfloat16()
    elif kind == "ties":
        bias = torch.randint(-2048, 2049, (n,), generator=random, device="cuda").bfloat16()
    else:
        bias = bf16((n,), *BIAS_EXPONENTS[kind], random)
    if kind == "nan":
        bias[:: max(2, n // 3)] = torch.nan
    sparse = torch.rand(n, generator=random, device="cuda") < 0.25
    return torch.where(sparse, bias * 0, bias)


def source(seed: int) -> torch.Generator:
    """Random numbers of the current GPU; torch's own generators are left as they are."""
    return torch.Generator(torch.device("cuda", torch.cuda.current_device())).manual_seed(seed)


def differing(ours: torch.Tensor, law: torch.Tensor) -> torch.Tensor:
    """Number of elements whose bits differ, on the device; a NaN equals any NaN.

    Both of one shape and dtype, bf16 or fp32.
    """
    kind = {2: torch.int16, 4: torch.int32}[law.element_size()]
    return ((ours.view(kind) != law.view(kind)) & ~(ours.isnan() & law.isnan())).sum()
