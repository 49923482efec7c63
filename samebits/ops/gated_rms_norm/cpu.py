"""Kernel of gated_rms_norm; the schedule is stated in the package's docstring and `reference`."""

from __future__ import annotations

import numpy as np
import torch

from samebits.ops.gate_scalar import sigmoid32
from samebits.ops.jit import as_numpy, kernel, parallel_for
from samebits.ops.scalar import LANES, narrow, widen
from samebits.ops.vector import dot_tile

_dot = dot_tile(1, 1)
_ONE = np.float32(1.0)
_GRAIN = 8192  # elements per task: below this a thread costs more than it saves


@kernel
def gated_rms_norm_fwd_kernel(x, z, weight, eps, y, inverse, start, stop):
    """Rows start to stop of x (fp32): y, and inverse = 1 / sqrt(mean + eps).

    Sums in lanes, as `dot_tile`.
    """
    n = x.shape[1]
    steps = -(-n // LANES)
    w, s = np.empty(n, np.float32), np.empty(n, np.float32)
    for j in range(n):
        w[j] = widen(weight[j])
    row = np.zeros(steps * LANES, np.float32)  # the padding's zeros leave a lane as it is
    total = np.empty(1, np.float32)
    for i in range(start, stop):
        for j in range(n):
            row[j] = x[i, j]
            gate = widen(z[i, j])
            s[j] = gate * sigmoid32(gate)
        _dot(row, 0, 0, row, 0, 0, steps, total, 0, 0)
        mean = total[0] / np.float32(n)
        r = _ONE / np.sqrt(np.float32(mean + eps))
        inverse[i] = r
        for j in range(n):
            y[i, j] = narrow(((row[j] * r) * w[j]) * s[j])


def forward(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous x [..., n] bf16 or fp32, z, weight [n] bf16 -> y as z, and r [rows] fp32."""
    n = weight.numel()
    rows = x.numel() // n
    y = torch.empty_like(z)
    r = torch.empty(rows, dtype=torch.float32)
    args = (
        *(as_numpy(t).reshape(rows, n) for t in (x.float(), z)),
        as_numpy(weight),
        np.float32(eps),
    )
    out = (as_numpy(y).reshape(rows, n), r.numpy())
    parallel_for(
        lambda start, stop: gated_rms_norm_fwd_kernel(*args, *out, start, stop),
        rows,
        max(1, _GRAIN // n),
    )
    return y, r
