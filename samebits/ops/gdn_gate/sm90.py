"""Log decay and write strength on Hopper: checks, counts and gradients around `triton.py`."""

from __future__ import annotations

import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.gdn_gate import gradients, triton

__all__ = ["gate"]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, A_log, dt_bias):
        g, beta = triton.gate(a, b, A_log, dt_bias)
        ctx.save_for_backward(a, A_log, dt_bias, g, beta)
        return g, beta

    @staticmethod
    def backward(ctx, dg, dbeta):
        return gradients(dg, dbeta, *ctx.saved_tensors)


def gate(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`samebits.ops.gdn_gate.gate` on CUDA, bit for bit. Refuses with SB0420, SB0421."""
    operands = tuple(x.contiguous() for x in (a, b, A_log, dt_bias))
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        found = _Gate.apply(*operands)
    else:
        found = triton.gate(*operands)
    registry.count_served("gdn.gate", len(a))
    return found


def _probe() -> int:
    a, b = (samples.bf16((40, 6), seed, -9, 6).cuda() for seed in (9, 10))
    A_log, dt_bias = samples.fp32((6,), 11, -2, 2).cuda(), samples.bf16((6,), 12, -2, 2).cuda()
    return mixsum(torch.stack(triton.gate(a, b, A_log, dt_bias)))


registry.register(
    registry.Implementation(
        region="gdn.gate",
        id="gdn.gate.sm90.1",
        platform="sm90",
        constants={"A_log": "fp32", "beta": "fp32", "exp": "exp32"},
        modules=(
            "samebits.ops.gpu",
            "samebits.ops.device",
            "samebits.ops.gdn_gate",
            "samebits.ops.gdn_gate.triton",
            "samebits.ops.gdn_gate.sm90",
        ),
        probe=_probe,
    )
)
