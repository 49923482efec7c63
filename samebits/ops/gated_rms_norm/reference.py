"""RMSNorm with a silu gate behind it, one rounding at a time in plain torch."""

from __future__ import annotations

import torch

from samebits.ops.gate_scalar import reference_sigmoid32
from samebits.ops.rms_norm.reference import inverse_rms
from samebits.ops.scalar import reference_narrow


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """x [..., n] bf16 or fp32, z, weight [n] bf16 -> [..., n] bf16; the package has the order."""
    wide, gate = x.float(), z.float()
    r = inverse_rms(wide, eps)
    hidden = (wide * r[..., None]) * weight.float()
    return reference_narrow(hidden * (gate * reference_sigmoid32(gate)))
