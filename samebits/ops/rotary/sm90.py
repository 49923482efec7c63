"""Rotary embedding on Hopper: checks, counts and gradients around the kernel of `triton.py`."""

from __future__ import annotations

import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.rotary import table, triton

__all__ = ["apply"]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, angles):
        ctx.save_for_backward(positions, angles)
        return triton.apply(x, positions, angles)

    @staticmethod
    def backward(ctx, grad):
        positions, angles = ctx.saved_tensors
        grad = grad.to(torch.bfloat16).contiguous()
        return triton.apply(grad, positions, angles, inverse=True), None, None


def apply(x: torch.Tensor, positions: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """`samebits.ops.rotary.apply` on CUDA, bit for bit, without its check of positions.

    The host reads no position, so that a call can be captured: the engine answers for their lying
    inside of the table. Refuses with SB0420, SB0421.
    """
    x, positions, angles = x.contiguous(), positions.contiguous(), angles.contiguous()
    if torch.is_grad_enabled() and x.requires_grad:
        y = _Rotary.apply(x, positions, angles)
    else:
        y = triton.apply(x, positions, angles)
    registry.count_served("rope", x.shape[0])
    return y


def _probe() -> int:
    angles = table(64, 20, 10000.0).cuda()
    positions = torch.tensor([0, 1, 63, 17, 2]).cuda()
    return mixsum(triton.apply(samples.bf16((5, 3, 26), 4).cuda(), positions, angles))


registry.register(
    registry.Implementation(
        region="rope",
        id="rope.sm90.1",
        platform="sm90",
        constants={"layout": "halves", "table": "fp32 from float64"},
        modules=(
            "samebits.ops.gpu",
            "samebits.ops.rotary",
            "samebits.ops.rotary.cpu",  # makes the table
            "samebits.ops.rotary.triton",
            "samebits.ops.rotary.sm90",
        ),
        probe=_probe,
    )
)
