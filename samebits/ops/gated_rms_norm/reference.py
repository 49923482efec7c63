"""RMSNorm with a silu gate behind it, one rounding at a time in plain torch."""

from __future__ import annotations

import torch

from samebits.ops.gate_scalar import reference_sigmoid32
from samebits.ops.reference import fma32
from samebits.ops.scalar import LANES, reference_narrow
from samebits.plan import ReductionPlan


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """x, z [..., n] bf16, weight [n] bf16 -> [..., n] bf16; see the package for the order."""
    wide, gate = x.float(), z.float()
    n = wide.shape[-1]
    lanes = [torch.zeros(wide.shape[:-1]) for _ in range(LANES)]
    for j in range(n):
        lanes[j % LANES] = fma32(wide[..., j], wide[..., j], lanes[j % LANES])
    mean = ReductionPlan.fold(lanes) / torch.tensor(float(n))
    shifted = mean + torch.tensor(eps, dtype=torch.float32)
    r = torch.tensor(1.0) / shifted.double().sqrt().float()  # 53 bits suffice for fp32's sqrt
    hidden = (wide * r[..., None]) * weight.float()
    return reference_narrow(hidden * (gate * reference_sigmoid32(gate)))
