"""SwiGLU's activation: silu of the gate half times the up half."""

from __future__ import annotations

import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.checks import require_dtype, require_shape
from samebits.ops.silu_mul import cpu

__all__ = ["silu_mul"]


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return cpu.forward(gate_up)

    @staticmethod
    def backward(ctx, grad):
        return cpu.backward(ctx.saved_tensors[0], grad.to(torch.bfloat16).contiguous())


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2F] bf16 (gate first, any strides) -> [..., F] bf16, contiguous.

    Order, each step one fp32 rounding: e = exp32(-g); s = 1 / (1 + e); y = bf16((g * s) * u).
    An element sees only its own pair.

    Differentiable (backward in fp32, one rounding to bf16). Refuses other dtypes (SB0420) and an
    odd last dimension (SB0421). CUDA tensors: `sm90.silu_mul`, the same bits.
    """
    if gate_up.is_cuda:
        from samebits.ops.silu_mul import sm90

        return sm90.silu_mul(gate_up)
    require_dtype("gate_up", gate_up, torch.bfloat16)
    width = gate_up.shape[-1] if gate_up.dim() else 0
    require_shape("gate_up", gate_up, width > 0 and width % 2 == 0, "[..., 2F]")
    gate_up = gate_up.contiguous()
    registry.count_served("act.silu_mul", gate_up.numel() // width)
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _SiluMul.apply(gate_up)
    return cpu.forward(gate_up)


def _probe() -> int:
    return mixsum(cpu.forward(samples.bf16((5, 134), 3)))


registry.register(
    registry.Implementation(
        region="act.silu_mul",
        id="act.silu_mul.cpu.1",
        platform="cpu",
        constants={"exp": "exp32"},
        modules=(
            "samebits.ops.jit",
            "samebits.ops.scalar",
            "samebits.ops.silu_mul",
            "samebits.ops.silu_mul.cpu",
        ),
        probe=_probe,
    )
)
