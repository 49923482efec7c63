"""RMSNorm over the last dimension, whatever it is (hidden size, or head_dim for q/k norm)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.checks import require_dtype, require_shape
from samebits.ops.rms_norm import cpu
from samebits.ops.scalar import LANES

__all__ = ["rms_norm"]

REGION = {False: "norm.rms", True: "norm.rms_zero_centred"}  # by `zero_centred`


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, zero_centred):
        y, r = cpu.forward(x, weight, eps, zero_centred)
        ctx.save_for_backward(x, weight, r)
        ctx.zero_centred = zero_centred
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, r = ctx.saved_tensors
        found = gradients(grad, x, weight, r, ctx.zero_centred, ctx.needs_input_grad)
        return *found, None, None


def gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    r: torch.Tensor,
    zero_centred: bool,
    needed: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x and weight, each if `needed`: fp32, one rounding; r [rows] fp32 is 1 / rms."""
    n = weight.numel()
    hat = x.reshape(-1, n).float() * r[:, None]
    grad = grad.reshape(-1, n).float()
    dx = dw = None
    if needed[0]:
        dhat = grad * (1 + weight.float() if zero_centred else weight.float())
        dx = (dhat - hat * (dhat * hat).mean(-1, keepdim=True)) * r[:, None]
        dx = dx.to(x.dtype).reshape(x.shape)
    if needed[1]:
        dw = (grad * hat).sum(0).to(weight.dtype)
    return dx, dw


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False
) -> torch.Tensor:
    """x [..., n] bf16 (any strides), weight [n] bf16 -> [..., n] bf16, contiguous.

    Order: squares go to 16 lanes (element i to lane i % 16, ascending) by fp32 fma from +0; lanes
    are folded ((0+1)+(2+3))+...; mean = sum / n; r = 1 / sqrt(mean + eps), each one IEEE rounding;
    y = bf16((x * r) * weight), one rounding each in fp32, one to bf16. A row sees only itself.
    `zero_centred`: the last factor is fp32 1 + weight, rounded once, instead of weight.

    Differentiable in x and weight (backward in fp32). Refuses other dtypes (SB0420) and
    shapes (SB0421). CUDA tensors: `sm90.rms_norm`, whose sums have another order.
    """
    if x.is_cuda:
        from samebits.ops.rms_norm import sm90

        return sm90.rms_norm(x, weight, eps, zero_centred)
    require_dtype("x", x, torch.bfloat16)
    require_dtype("weight", weight, torch.bfloat16)
    n = weight.numel()
    require_shape("x", x, weight.dim() == 1 and n > 0 and x.shape[-1:] == (n,), f"[..., {n}]")
    x, weight = x.contiguous(), weight.contiguous()
    registry.count_served(REGION[zero_centred], x.numel() // n)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RmsNorm.apply(x, weight, eps, zero_centred)
    return cpu.forward(x, weight, eps, zero_centred)[0]


def _probe(zero_centred: bool) -> int:
    x = samples.bf16((5, 83), 1)
    x[0] = torch.arange(83, dtype=torch.int16).view(torch.bfloat16)  # subnormals, not to be flushed
    y, _ = cpu.forward(x, samples.bf16((83,), 2, -2, 2), 1e-6, zero_centred)
    return mixsum(y)


for _zero_centred, _region in REGION.items():
    registry.register(
        registry.Implementation(
            region=_region,
            id=f"{_region}.cpu.1",
            platform="cpu",
            constants={"lanes": LANES},
            modules=(
                "samebits.ops.jit",
                "samebits.ops.scalar",
                "samebits.ops.vector",
                "samebits.ops.rms_norm",
                "samebits.ops.rms_norm.cpu",
            ),
            probe=functools.partial(_probe, _zero_centred),
        )
    )
