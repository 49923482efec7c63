"""RMSNorm over the last dimension with a silu gate behind it: the output of GDN's value heads."""

from __future__ import annotations

import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.checks import require_dtype, require_shape
from samebits.ops.gated_rms_norm import cpu
from samebits.ops.scalar import LANES

__all__ = ["gated_rms_norm"]


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z, weight, eps):
        y, r = cpu.forward(x, z, weight, eps)
        ctx.save_for_backward(x, z, weight, r)
        return y

    @staticmethod
    def backward(ctx, grad):
        return *gradients(grad, *ctx.saved_tensors), None


def gradients(
    grad: torch.Tensor, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, z and weight: fp32, one rounding; r [rows] fp32 is 1 / rms."""
    r = r.reshape(*x.shape[:-1], 1)
    hat, gate, grad, w = x.float() * r, z.float(), grad.float(), weight.float()
    s = torch.sigmoid(gate)
    dnorm = grad * (gate * s)
    dhat = dnorm * w
    dx = (dhat - hat * (dhat * hat).mean(-1, keepdim=True)) * r
    dz = grad * (hat * w) * (s * (1 + gate * (1 - s)))
    dw = (dnorm * hat).reshape(-1, w.numel()).sum(0)
    return dx.to(x.dtype), dz.to(z.dtype), dw.to(weight.dtype)


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, *, wide: bool = False
) -> torch.Tensor:
    """x, z [..., n] bf16 (any strides), weight [n] bf16 -> [..., n] bf16, contiguous.

    wide: x is fp32, and used as it is.

    Order: r = 1 / sqrt(mean + eps) as in `rms_norm` (16 lanes, fold ((0+1)+(2+3))+...); then
    y = bf16(((x * r) * weight) * (z * sigmoid32(z))), one fp32 rounding each, one to bf16. A row
    sees only itself.

    Differentiable in x, z and weight (backward in fp32). Refuses other dtypes (SB0420) and shapes
    (SB0421). CUDA tensors: `sm90.gated_rms_norm`, whose sums have another order.
    """
    if x.is_cuda:
        from samebits.ops.gated_rms_norm import sm90

        return sm90.gated_rms_norm(x, z, weight, eps, wide=wide)
    require_dtype("x", x, torch.float32 if wide else torch.bfloat16)
    for name, operand in (("z", z), ("weight", weight)):
        require_dtype(name, operand, torch.bfloat16)
    n = weight.numel()
    require_shape("x", x, weight.dim() == 1 and n > 0 and x.shape[-1:] == (n,), f"[..., {n}]")
    require_shape("z", z, z.shape == x.shape, str(list(x.shape)))
    x, z, weight = x.contiguous(), z.contiguous(), weight.contiguous()
    registry.count_served("norm.gated", x.numel() // n)
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in (x, z, weight)):
        return _GatedRmsNorm.apply(x, z, weight, eps)
    return cpu.forward(x, z, weight, eps)[0]


def _probe() -> int:
    x, z = samples.bf16((5, 83), 13), samples.bf16((5, 83), 14, -8, 6)
    x[0] = torch.arange(83, dtype=torch.int16).view(torch.bfloat16)  # subnormals, not to be flushed
    weight = samples.bf16((83,), 15, -2, 2)
    rows = [x, samples.fp32((5, 83), 18, -9, 9)]
    return mixsum(torch.cat([cpu.forward(row, z, weight, 1e-6)[0] for row in rows]))


registry.register(
    registry.Implementation(
        region="norm.gated",
        id="norm.gated.cpu.1",
        platform="cpu",
        constants={"activation": "silu", "exp": "exp32", "lanes": LANES},
        modules=(
            "samebits.ops.jit",
            "samebits.ops.scalar",
            "samebits.ops.vector",
            "samebits.ops.gate_scalar",
            "samebits.ops.gated_rms_norm",
            "samebits.ops.gated_rms_norm.cpu",
        ),
        probe=_probe,
    )
)
