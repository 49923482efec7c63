"""Gated RMSNorm on Hopper: checks, counts, gradients; the schedule is `sm90` in the README."""

from __future__ import annotations

import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.gated_rms_norm import triton, triton_backward
from samebits.ops.gated_rms_norm.reference_sm90 import NEAR

__all__ = ["gated_rms_norm"]


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z, weight, eps, wide):
        ctx.save_for_backward(x, z, weight)
        ctx.eps = eps
        return triton.gated_rms_norm(x, z, weight, eps, wide=wide)

    @staticmethod
    def backward(ctx, grad):
        x, z, weight = ctx.saved_tensors
        return *triton_backward.gradients(grad, x, z, weight, ctx.eps), None, None


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, *, wide: bool = False
) -> torch.Tensor:
    """`samebits.ops.gated_rms_norm.gated_rms_norm` on CUDA; n a power of two up to 1024.

    Order: squares are added to their neighbours until 4 are one, then by halves (`reference_sm90`).
    Refuses with SB0420, SB0421.
    """
    x, weight = x.contiguous(), weight.contiguous()
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in (x, z, weight)):
        y = _GatedRmsNorm.apply(x, z, weight, eps, wide)
    else:
        y = triton.gated_rms_norm(x, z, weight, eps, wide=wide)
    registry.count_served("norm.gated", x.numel() // weight.numel())
    return y


def _probe() -> int:
    x, z = samples.bf16((5, 128), 13), samples.bf16((5, 128), 14, -8, 6).cuda()
    x[0] = torch.arange(128, dtype=torch.int16).view(torch.bfloat16)  # subnormals, not flushed
    weight = samples.bf16((128,), 15, -2, 2).cuda()
    rows = triton.gated_rms_norm(x.cuda(), z, weight, 1e-6)
    wide = samples.fp32((5, 128), 18, -9, 9).cuda()
    return mixsum(torch.cat([rows, triton.gated_rms_norm(wide, z, weight, 1e-6, wide=True)]))


registry.register(
    registry.Implementation(
        region="norm.gated",
        id="norm.gated.sm90.1",
        platform="sm90",
        constants={"activation": "silu", "exp": "exp32", "near": NEAR},
        modules=(
            "samebits.ops.gpu",
            "samebits.ops.device",
            "samebits.ops.heads",
            "samebits.ops.silu_mul.triton",
            "samebits.ops.gated_rms_norm",
            "samebits.ops.gated_rms_norm.reference_sm90",
            "samebits.ops.gated_rms_norm.triton",
            "samebits.ops.gated_rms_norm.sm90",
        ),
        probe=_probe,
    )
)
