"""Sigmoid gate on attention's output, before the output projection."""

from __future__ import annotations

import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.checks import require_dtype, require_shape
from samebits.ops.output_gate import cpu

__all__ = ["output_gate"]


class _OutputGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.save_for_backward(x, gate)
        return cpu.forward(x, gate)

    @staticmethod
    def backward(ctx, grad):
        return gradients(grad, *ctx.saved_tensors)


def gradients(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and gate: fp32, one rounding."""
    s, grad = torch.sigmoid(gate.float()), grad.float()
    return (grad * s).to(x.dtype), (grad * x.float() * s * (1 - s)).to(gate.dtype)


def output_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x, gate [..., N] bf16 (any strides) -> [..., N] bf16, contiguous.

    Order, each step one fp32 rounding: s = sigmoid32(gate); y = bf16(x * s). An element sees only
    its own pair.

    Differentiable in both (backward in fp32, one rounding to bf16). Refuses other dtypes (SB0420)
    and shapes (SB0421). CUDA tensors: `sm90.output_gate`, the same operations.
    """
    if x.is_cuda:
        from samebits.ops.output_gate import sm90

        return sm90.output_gate(x, gate)
    require_dtype("x", x, torch.bfloat16)
    require_dtype("gate", gate, torch.bfloat16)
    require_shape("x", x, x.dim() > 0 and x.shape[-1] > 0, "[..., N]")
    require_shape("gate", gate, gate.shape == x.shape, str(list(x.shape)))
    x, gate = x.contiguous(), gate.contiguous()
    registry.count_served("attention.gate", x.numel() // x.shape[-1])
    if torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad):
        return _OutputGate.apply(x, gate)
    return cpu.forward(x, gate)


def _probe() -> int:
    return mixsum(cpu.forward(samples.bf16((5, 67), 16), samples.bf16((5, 67), 17, -9, 7)))


registry.register(
    registry.Implementation(
        region="attention.gate",
        id="attention.gate.cpu.1",
        platform="cpu",
        constants={"exp": "exp32"},
        modules=(
            "samebits.ops.jit",
            "samebits.ops.scalar",
            "samebits.ops.gate_scalar",
            "samebits.ops.output_gate",
            "samebits.ops.output_gate.cpu",
        ),
        probe=_probe,
    )
)
