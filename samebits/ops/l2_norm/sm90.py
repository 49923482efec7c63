"""l2 normalisation on Hopper: checks, counts, gradients; the schedule is `sm90` in the README."""

from __future__ import annotations

import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.l2_norm import triton, triton_backward
from samebits.ops.l2_norm.cpu import EPS
from samebits.ops.l2_norm.reference_sm90 import NEAR

__all__ = ["l2_norm"]


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps, wide):
        ctx.save_for_backward(x)
        ctx.eps = eps
        return triton.l2_norm(x, eps, wide=wide)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return triton_backward.gradient(grad, x, ctx.eps), None, None


def l2_norm(x: torch.Tensor, eps: float = EPS, *, wide: bool = False) -> torch.Tensor:
    """`samebits.ops.l2_norm.l2_norm` on CUDA; n a power of two up to `triton.LONGEST`.

    Order: squares are added to their neighbours until 4 are one, then by halves (`reference_sm90`).
    Refuses with SB0420, SB0421.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        y = _L2Norm.apply(x, eps, wide)
    else:
        y = triton.l2_norm(x, eps, wide=wide)
    registry.count_served("gdn.l2_norm", x.numel() // x.shape[-1])
    return y


def _probe() -> int:
    x = samples.bf16((5, 128), 8)
    x[0] = torch.arange(128, dtype=torch.int16).view(torch.bfloat16)  # subnormals, not flushed
    rows = triton.l2_norm(x.cuda(), EPS)
    wide = triton.l2_norm(samples.fp32((5, 128), 19).cuda(), EPS, wide=True)
    return mixsum(torch.cat([rows, wide]))


registry.register(
    registry.Implementation(
        region="gdn.l2_norm",
        id="gdn.l2_norm.sm90.1",
        platform="sm90",
        constants={"near": NEAR},
        modules=(
            "samebits.ops.gpu",
            "samebits.ops.device",
            "samebits.ops.heads",
            "samebits.ops.l2_norm",
            "samebits.ops.l2_norm.cpu",  # the default of eps
            "samebits.ops.l2_norm.reference_sm90",
            "samebits.ops.l2_norm.triton",
            "samebits.ops.l2_norm.sm90",
        ),
        probe=_probe,
    )
)
