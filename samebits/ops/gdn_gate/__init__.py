"""Log decay and write strength of the gated delta rule."""

from __future__ import annotations

import torch

from samebits.bits import mixsum
from samebits.ops import registry, samples
from samebits.ops.checks import require_dtype, require_shape
from samebits.ops.gdn_gate import cpu

__all__ = ["gate"]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, A_log, dt_bias):
        g, beta = cpu.forward(a, b, A_log, dt_bias)
        ctx.save_for_backward(a, A_log, dt_bias, g, beta)
        return g, beta

    @staticmethod
    def backward(ctx, dg, dbeta):
        return gradients(dg, dbeta, *ctx.saved_tensors)


def gradients(
    dg: torch.Tensor,
    dbeta: torch.Tensor,
    a: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of a, b, A_log and dt_bias: fp32, one rounding to each operand's dtype."""
    slope = torch.sigmoid(a.float() + dt_bias.float())
    dt = -dg * A_log.exp() * slope
    db = dbeta * beta * (1 - beta)
    return dt.to(a.dtype), db.to(a.dtype), (dg * g).sum(0), dt.sum(0).to(dt_bias.dtype)


def gate(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b [T, HV] bf16 (any strides), A_log [HV] fp32, dt_bias [HV] bf16 -> g, beta [T, HV] fp32.

    Order, each step one fp32 rounding: t = a + dt_bias; g = -exp32(A_log) * softplus32(t);
    beta = sigmoid32(b). An element sees only its own token and head.

    Differentiable in all four (backward in fp32). Refuses other dtypes (SB0420) and shapes
    (SB0421). CUDA tensors: `sm90.gate`, the same operations.
    """
    if a.is_cuda:
        from samebits.ops.gdn_gate import sm90

        return sm90.gate(a, b, A_log, dt_bias)
    for name, x in (("a", a), ("b", b), ("dt_bias", dt_bias)):
        require_dtype(name, x, torch.bfloat16)
    require_dtype("A_log", A_log, torch.float32)
    require_shape("a", a, a.dim() == 2 and a.shape[1] > 0, "[T, HV]")
    require_shape("b", b, b.shape == a.shape, str(list(a.shape)))
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        require_shape(name, x, x.shape == a.shape[1:], f"[{a.shape[1]}]")
    registry.count_served("gdn.gate", len(a))
    operands = tuple(x.contiguous() for x in (a, b, A_log, dt_bias))
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        return _Gate.apply(*operands)
    return cpu.forward(*operands)


def _probe() -> int:
    a, b = samples.bf16((40, 6), 9, -9, 6), samples.bf16((40, 6), 10, -9, 6)
    g, beta = cpu.forward(a, b, samples.fp32((6,), 11, -2, 2), samples.bf16((6,), 12, -2, 2))
    return mixsum(torch.stack([g, beta]))


registry.register(
    registry.Implementation(
        region="gdn.gate",
        id="gdn.gate.cpu.1",
        platform="cpu",
        constants={"A_log": "fp32", "beta": "fp32", "exp": "exp32"},
        modules=(
            "samebits.ops.jit",
            "samebits.ops.scalar",
            "samebits.ops.gate_scalar",
            "samebits.ops.gdn_gate",
            "samebits.ops.gdn_gate.cpu",
        ),
        probe=_probe,
    )
)
