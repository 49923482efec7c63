"""Rotary position embedding, halves layout: dimension i turns with dimension i + rotary_dim / 2."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from samebits.bits import mixsum
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.checks import require_dtype, require_shape
from samebits.ops.rotary import cpu

__all__ = ["apply", "table"]

_PLAIN_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def table(
    max_position: int, rotary_dim: int, base: float, scaling: Mapping | None = None
) -> torch.Tensor:
    """fp32 [max_position, rotary_dim]: cosines in the first half of a row, sines in the second.

    Entry (p, i) is cos or sin of p * base ** (-2 i / rotary_dim), computed alone in Python's
    float64 and rounded once to fp32, so no entry sees its neighbours. The tensor is cached by
    its arguments and shared: do not write to it. It lies on the CPU: move it once for a GPU.

    `scaling` is None or says `default`; any other rule is refused (SB0424). An odd `rotary_dim`
    is refused (SB0421).
    """
    rule = dict(scaling or {})
    kind = rule.get("rope_type", rule.get("type", "default"))
    known = kind == "default" and set(rule) <= _PLAIN_KEYS
    if not known or rule.get("rope_theta", base) != base:
        raise Refused(
            "SB0424",
            seen=f"rope scaling {rule}",
            required=f"none, or rope_type default with rope_theta {base} and no further keys",
            hint="samebits explain SB0424",
        )
    if max_position < 1 or rotary_dim < 2 or rotary_dim % 2:
        raise Refused(
            "SB0421",
            seen=f"rotary table of {max_position} positions and {rotary_dim} dimensions",
            required="at least one position and an even, positive dimension",
            hint="samebits explain SB0421",
        )
    return cpu.make_table(int(max_position), int(rotary_dim), float(base))


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, positions, angles):
        ctx.save_for_backward(positions, angles)
        return cpu.forward(x, positions, angles, inverse=False)

    @staticmethod
    def backward(ctx, grad):
        positions, angles = ctx.saved_tensors
        grad = grad.to(torch.bfloat16).contiguous()
        return cpu.forward(grad, positions, angles, inverse=True), None, None


def apply(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] bf16 (any strides), positions [T] int64, table from `table` -> [T, H, D] bf16.

    Order, with c and s of the token's position, each step one fp32 rounding:
    y1 = bf16(fma(x1, c, -(x2 * s))); y2 = bf16(fma(x2, c, x1 * s)). Dimensions beyond the
    table's are copied. A token sees only itself.

    Differentiable in x (the backward turns by the negative angle). Refuses other dtypes
    (SB0420), shapes (SB0421), and positions outside the table (SB0425). CUDA tensors:
    `sm90.apply`, the same bits.
    """
    if x.is_cuda:
        from samebits.ops.rotary import sm90

        return sm90.apply(x, positions, table)
    require_dtype("x", x, torch.bfloat16)
    require_dtype("positions", positions, torch.int64)
    require_dtype("table", table, torch.float32)
    require_shape("x", x, x.dim() == 3 and x.shape[-1] >= table.shape[-1], "[T, H, D >= rotary]")
    require_shape("positions", positions, positions.shape == x.shape[:1], f"[{x.shape[0]}]")
    if positions.numel():
        low, high = (int(v) for v in torch.aminmax(positions))
        if low < 0 or high >= table.shape[0]:
            raise Refused(
                "SB0425",
                seen=f"positions from {low} to {high}",
                required=f"0 <= position < {table.shape[0]}",
                hint="samebits explain SB0425",
            )
    x, positions, table = x.contiguous(), positions.contiguous(), table.contiguous()
    registry.count_served("rope", x.shape[0])
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotary.apply(x, positions, table)
    return cpu.forward(x, positions, table, inverse=False)


def _probe() -> int:
    angles = table(64, 20, 10000.0)
    positions = torch.tensor([0, 1, 63, 17, 2])
    return mixsum(cpu.forward(samples.bf16((5, 3, 26), 4), positions, angles, inverse=False))


registry.register(
    registry.Implementation(
        region="rope",
        id="rope.cpu.1",
        platform="cpu",
        constants={"layout": "halves", "table": "fp32 from float64"},
        modules=(
            "samebits.ops.jit",
            "samebits.ops.scalar",
            "samebits.ops.rotary",
            "samebits.ops.rotary.cpu",
        ),
        probe=_probe,
    )
)
