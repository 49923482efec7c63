"""silu_mul on Hopper: checks, counts and gradients around the kernel of `triton.py`."""

from __future__ import annotations

import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.silu_mul import triton

__all__ = ["silu_mul"]


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return triton.silu_mul(gate_up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors[0].float().chunk(2, dim=-1)
        s, d = gate.sigmoid(), grad.float()
        dgate = d * up * (s * (1 + gate * (1 - s)))
        return torch.cat([dgate, d * (gate * s)], dim=-1).to(torch.bfloat16)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`samebits.ops.silu_mul.silu_mul` on CUDA, bit for bit. Refuses with SB0420, SB0421."""
    gate_up = gate_up.contiguous()
    if torch.is_grad_enabled() and gate_up.requires_grad:
        y = _SiluMul.apply(gate_up)
    else:
        y = triton.silu_mul(gate_up)
    registry.count_served("act.silu_mul", gate_up.numel() // gate_up.shape[-1])
    return y


def _probe() -> int:
    return mixsum(triton.silu_mul(samples.bf16((5, 134), 3).cuda()))


registry.register(
    registry.Implementation(
        region="act.silu_mul",
        id="act.silu_mul.sm90.1",
        platform="sm90",
        constants={"exp": "exp32"},
        modules=(
            "samebits.ops.gpu",
            "samebits.ops.device",
            "samebits.ops.silu_mul",
            "samebits.ops.silu_mul.triton",
            "samebits.ops.silu_mul.sm90",
        ),
        probe=_probe,
    )
)
