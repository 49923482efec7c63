"""Causal depthwise convolution over the rows of a sequence, then silu; window for decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import torch

from samebits.bits import mixsum
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.checks import require_dtype, require_shape
from samebits.ops.conv1d import cpu
from samebits.ops.packed import integers, require_slots, require_starts

__all__ = ["advance", "varlen"]


Pair = tuple[torch.Tensor, torch.Tensor]


@overload
def advance(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
) -> torch.Tensor: ...


@overload
def advance(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    exact: int,
) -> Pair: ...


def advance(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    exact: int | None = None,
) -> torch.Tensor | Pair:
    """One step of R sequences -> y [T, C] bf16; their windows are updated in place.

    x                [T, C] bf16 raw inputs (any strides), weight [C, W] bf16, tap W - 1 the newest
    window           [slots, W - 1, C] bf16, the last raw inputs, oldest first; dim 0 may be strided
    slots            [R] integers, all distinct: index into window
    query_start_loc  [R + 1] integers, cumulative, from 0; rows past the last one give zeros
    context_lens     [R] integers: tokens of each sequence before this step; 0 starts from zeros
                     whatever the slot holds
    exact            y's first channels are not rounded: -> (y [T, exact] fp32, y [T, C - exact])

    Order: acc = fma(weight[c, j], row of tap j, acc) in fp32, oldest row first, from +0; rows
    before the sequence are +0; s = 1 / (1 + exp32(-acc)); y = bf16(acc * s), one rounding each. An
    output sees W rows of its own sequence and channel. A sequence without rows is left as it is.

    Forward only. Refuses dtypes (SB0420), shapes (SB0421), windows (SB0426), tables (SB0483). CUDA
    tensors: `sm90.advance`, the same operations.
    """
    if x.is_cuda:
        from samebits.ops.conv1d import sm90

        tables = slots, query_start_loc, context_lens
        return sm90.advance(x, weight, window, *tables, exact=exact)
    _check_operands(x, weight, exact)
    require_dtype("window", window, torch.bfloat16)
    check_window(window, weight)
    at, starts, context = (integers(t) for t in (slots, query_start_loc, context_lens))
    require_starts(starts, len(x), whole=False)
    require_slots(at, context, len(starts) - 1, len(window))
    registry.count_served("gdn.conv", int(starts[-1]))
    state = (window, at, context == 0)
    pair = cpu.forward(
        x.detach().contiguous(), weight.detach().contiguous(), starts, state, exact or 0
    )
    return pair[1] if exact is None else pair


@overload
def varlen(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor: ...


@overload
def varlen(
    x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor, *, exact: int
) -> Pair: ...


def varlen(
    x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor, *, exact: int | None = None
) -> torch.Tensor | Pair:
    """Whole packed sequences -> y [T, C] bf16, the bits of `advance`.

    Operands, `exact` and order as in `advance`; cu_seqlens [R + 1] integers, cumulative, from 0 to
    T. Differentiable in x and weight (backward in fp32, one rounding to bf16). CUDA tensors:
    `sm90.varlen`.
    """
    if x.is_cuda:
        from samebits.ops.conv1d import sm90

        return sm90.varlen(x, weight, cu_seqlens, exact=exact)
    _check_operands(x, weight, exact)
    starts = integers(cu_seqlens)
    require_starts(starts, len(x), whole=True)
    registry.count_served("gdn.conv", len(x))
    x, weight = x.contiguous(), weight.contiguous()
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        pair = _Varlen.apply(x, weight, starts, exact or 0)
    else:
        pair = cpu.forward(x, weight, starts, None, exact or 0)
    return pair[1] if exact is None else pair


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, starts, exact):
        ctx.save_for_backward(x, weight)
        ctx.starts = starts
        return cpu.forward(x, weight, starts, None, exact)

    @staticmethod
    def backward(ctx, *grads):
        x, weight = ctx.saved_tensors
        index = torch.from_numpy(
            np.arange(len(x)) - np.repeat(ctx.starts[:-1], np.diff(ctx.starts))
        )
        return *gradients(x, weight, index, grads), None, None


def gradients(
    x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor, grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and weight: fp32, one rounding to bf16.

    index [T] integers is a row's place in its sequence; grads are those of both parts of y.
    """
    x, weight = x.float(), weight.float()
    grad = torch.cat([part.float() for part in grads], 1)
    lags = range(weight.shape[1] - 1, -1, -1)
    shifted = []
    for lag in lags:  # row t holds row t - lag of the same sequence, or zero
        rows = torch.zeros_like(x)
        rows[lag:] = x[: max(0, len(x) - lag)]
        shifted.append(rows.masked_fill_((index < lag)[:, None], 0))
    acc = torch.zeros_like(x)
    for j, rows in enumerate(shifted):
        acc += rows * weight[:, j]
    s = torch.sigmoid(acc)
    dacc = grad * s * (1 + acc * (1 - s))
    dx, dw = torch.zeros_like(x), torch.empty_like(weight)
    for j, (lag, rows) in enumerate(zip(lags, shifted, strict=True)):
        dw[:, j] = (dacc * rows).sum(0)
        inside = dacc.masked_fill((index < lag)[:, None], 0)
        dx[: max(0, len(x) - lag)] += inside[lag:] * weight[:, j]
    return dx.bfloat16(), dw.bfloat16()


def _check_operands(x: torch.Tensor, weight: torch.Tensor, exact: int | None) -> None:
    require_dtype("x", x, torch.bfloat16)
    require_dtype("weight", weight, torch.bfloat16)
    require_shape("weight", weight, weight.dim() == 2 and weight.numel() > 0, "[C, W]")
    channels = weight.shape[0]
    require_shape("x", x, x.dim() == 2 and x.shape[1] == channels, f"[T, {channels}]")
    fits = exact is None or 0 <= exact <= channels
    require_shape("x", x, fits, f"[T, {exact} or more], of which {exact} are left in fp32")


def check_window(window: torch.Tensor, weight: torch.Tensor) -> None:
    """`window` is [slots, W - 1, C], contiguous inside a slot, for weight [C, W]; else SB0426."""
    channels, taps = weight.shape
    shape = (taps - 1, channels)
    slots = window.shape[0] if window.dim() else 0
    if (
        window.shape != (slots, *shape)
        or (slots > 0 and not window[0].is_contiguous())
        or (slots > 1 and window.stride(0) < window[0].numel())
    ):
        raise Refused(
            "SB0426",
            seen=f"window {list(window.shape)} with strides {list(window.stride())}",
            required=f"[slots, {taps - 1}, {channels}], contiguous inside a slot",
            hint="samebits explain SB0426",
        )


def _probe() -> int:
    x, weight = samples.bf16((9, 20), 5), samples.bf16((20, 4), 6, -3, 2)
    window = torch.full((3, 3, 20), torch.nan).bfloat16()
    window[2] = samples.bf16((3, 20), 7)
    slots, starts, fresh = np.array([0, 2]), np.array([0, 7, 9]), np.array([True, False])
    wide, y = cpu.forward(x, weight, starts, (window, slots, fresh), 8)
    return mixsum(torch.cat([part.float().flatten() for part in (wide, y, window[0], window[2])]))


registry.register(
    registry.Implementation(
        region="gdn.conv",
        id="gdn.conv.cpu.1",
        platform="cpu",
        constants={"activation": "silu", "exp": "exp32", "window": "bf16"},
        modules=(
            "samebits.ops.jit",
            "samebits.ops.scalar",
            "samebits.ops.gate_scalar",
            "samebits.ops.packed",
            "samebits.ops.conv1d",
            "samebits.ops.conv1d.cpu",
        ),
        probe=_probe,
    )
)
