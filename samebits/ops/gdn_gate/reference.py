"""Gate of the gated delta rule, one rounding at a time in plain torch."""

from __future__ import annotations

import torch

from samebits.ops.gate_scalar import reference_sigmoid32, reference_softplus32
from samebits.ops.scalar import reference_exp32


def gate(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b [T, HV] bf16, A_log [HV] fp32, dt_bias [HV] bf16 -> g, beta [T, HV] fp32."""
    t = a.float() + dt_bias.float()
    return -reference_exp32(A_log) * reference_softplus32(t), reference_sigmoid32(b.float())
