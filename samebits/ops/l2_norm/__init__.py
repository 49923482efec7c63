"""l2 normalisation over the last dimension: queries and keys of gated delta networks."""

from __future__ import annotations

import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.checks import require_dtype, require_shape
from samebits.ops.l2_norm import cpu
from samebits.ops.l2_norm.cpu import EPS
from samebits.ops.scalar import LANES

__all__ = ["l2_norm"]


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps):
        y, r = cpu.forward(x, eps)
        ctx.save_for_backward(x, r)
        return y

    @staticmethod
    def backward(ctx, grad):
        return gradient(grad, *ctx.saved_tensors), None


def gradient(grad: torch.Tensor, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Gradient of x: fp32, one rounding; r [rows] fp32 is 1 / norm."""
    r = r.reshape(*x.shape[:-1], 1)
    hat, grad = x.float() * r, grad.float()
    return ((grad - hat * (grad * hat).sum(-1, keepdim=True)) * r).to(x.dtype)


def l2_norm(x: torch.Tensor, eps: float = EPS, *, wide: bool = False) -> torch.Tensor:
    """x [..., n] bf16 (any strides) -> [..., n] bf16, contiguous.

    wide: x is fp32, and used as it is.

    Order: squares go to 16 lanes (element i to lane i % 16, ascending) by fp32 fma from +0; lanes
    are folded ((0+1)+(2+3))+...; r = 1 / sqrt(sum + eps), each one IEEE rounding; y = bf16(x * r).
    A row sees only itself.

    Differentiable (backward in fp32). Refuses other dtypes (SB0420) and rows without elements
    (SB0421). CUDA tensors: `sm90.l2_norm`, whose sums have another order.
    """
    if x.is_cuda:
        from samebits.ops.l2_norm import sm90

        return sm90.l2_norm(x, eps, wide=wide)
    require_dtype("x", x, torch.float32 if wide else torch.bfloat16)
    n = x.shape[-1] if x.dim() else 0
    require_shape("x", x, n > 0, "[..., n]")
    x = x.contiguous()
    registry.count_served("gdn.l2_norm", x.numel() // n)
    if torch.is_grad_enabled() and x.requires_grad:
        return _L2Norm.apply(x, eps)
    return cpu.forward(x, eps)[0]


def _probe() -> int:
    x = samples.bf16((5, 83), 8)
    x[0] = torch.arange(83, dtype=torch.int16).view(torch.bfloat16)  # subnormals, not to be flushed
    rows = [x, samples.fp32((5, 83), 19)]
    return mixsum(torch.cat([cpu.forward(part, EPS)[0] for part in rows]))


registry.register(
    registry.Implementation(
        region="gdn.l2_norm",
        id="gdn.l2_norm.cpu.1",
        platform="cpu",
        constants={"lanes": LANES},
        modules=(
            "samebits.ops.jit",
            "samebits.ops.scalar",
            "samebits.ops.vector",
            "samebits.ops.l2_norm",
            "samebits.ops.l2_norm.cpu",
        ),
        probe=_probe,
    )
)
