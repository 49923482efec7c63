"""RMSNorm on Hopper: checks, counts and gradients; the schedule is `sm90` in the README."""

from __future__ import annotations

import functools

import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.rms_norm import REGION, gradients, triton
from samebits.ops.rms_norm.reference_sm90 import NEAR

__all__ = ["rms_norm"]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, zero_centred):
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.zero_centred = eps, zero_centred
        return triton.rms_norm(x, weight, eps, zero_centred)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        wide = x.reshape(-1, weight.numel()).float()
        r = (wide.square().mean(-1) + ctx.eps).rsqrt()
        found = gradients(grad, x, weight, r, ctx.zero_centred, ctx.needs_input_grad)
        return *found, None, None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False
) -> torch.Tensor:
    """`samebits.ops.rms_norm.rms_norm` on CUDA; n at most `triton.LONGEST` (SB0452).

    Order: squares are added to their neighbours until 8 are one, then by halves (`reference_sm90`).
    Refuses with SB0420, SB0421, SB0452.
    """
    x, weight = x.contiguous(), weight.contiguous()
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y = _RmsNorm.apply(x, weight, eps, zero_centred)
    else:
        y = triton.rms_norm(x, weight, eps, zero_centred)
    registry.count_served(REGION[zero_centred], x.numel() // weight.numel())
    return y


def _probe(zero_centred: bool) -> int:
    x = samples.bf16((5, 83), 1)
    x[0] = torch.arange(83, dtype=torch.int16).view(torch.bfloat16)  # subnormals, not to be flushed
    weight = samples.bf16((83,), 2, -2, 2)
    return mixsum(triton.rms_norm(x.cuda(), weight.cuda(), 1e-6, zero_centred))


for _zero_centred, _region in REGION.items():
    registry.register(
        registry.Implementation(
            region=_region,
            id=f"{_region}.sm90.1",
            platform="sm90",
            constants={"near": NEAR},
            modules=(
                "samebits.ops.gpu",
                "samebits.ops.device",
                "samebits.ops.rms_norm",
                "samebits.ops.rms_norm.reference_sm90",
                "samebits.ops.rms_norm.triton",
                "samebits.ops.rms_norm.sm90",
            ),
            probe=functools.partial(_probe, _zero_centred),
        )
    )
