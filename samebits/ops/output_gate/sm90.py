"""Output gate on Hopper: checks, counts and gradients around the kernel of `triton.py`."""

from __future__ import annotations

import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.output_gate import gradients, triton

__all__ = ["output_gate"]


class _OutputGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.save_for_backward(x, gate)
        return triton.output_gate(x, gate)

    @staticmethod
    def backward(ctx, grad):
        return gradients(grad, *ctx.saved_tensors)


def output_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`samebits.ops.output_gate.output_gate` on CUDA, bit for bit. Refuses with SB0420, SB0421."""
    x, gate = x.contiguous(), gate.contiguous()
    if torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad):
        y = _OutputGate.apply(x, gate)
    else:
        y = triton.output_gate(x, gate)
    registry.count_served("attention.gate", x.numel() // x.shape[-1])
    return y


def _probe() -> int:
    x, gate = samples.bf16((5, 67), 16).cuda(), samples.bf16((5, 67), 17, -9, 7).cuda()
    return mixsum(triton.output_gate(x, gate))


registry.register(
    registry.Implementation(
        region="attention.gate",
        id="attention.gate.sm90.1",
        platform="sm90",
        constants={"exp": "exp32"},
        modules=(
            "samebits.ops.gpu",
            "samebits.ops.device",
            "samebits.ops.output_gate",
            "samebits.ops.output_gate.triton",
            "samebits.ops.output_gate.sm90",
        ),
        probe=_probe,
    )
)
