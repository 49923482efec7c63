"""Kernel of l2_norm; the schedule is stated in the package's docstring and in `reference`."""

from __future__ import annotations

import numpy as np
import torch

from samebits.ops.jit import as_numpy, kernel, parallel_for
from samebits.ops.scalar import LANES, narrow
from samebits.ops.vector import dot_tile

_dot = dot_tile(1, 1)
_ONE = np.float32(1.0)
EPS = 1e-6  # upstream's default; no model's configuration states another
_GRAIN = 16384  # elements per task: below this a thread costs more than it saves


@kernel
def l2_norm_fwd_kernel(x, eps, y, inverse, start, stop):
    """Rows start to stop of x (fp32): y, and inverse = 1 / sqrt(sum + eps).

    Sums in lanes, as `dot_tile`.
    """
    n = x.shape[1]
    steps = -(-n // LANES)
    row = np.zeros(steps * LANES, np.float32)  # the padding's zeros leave a lane as it is
    total = np.empty(1, np.float32)
    for i in range(start, stop):
        for j in range(n):
            row[j] = x[i, j]
        _dot(row, 0, 0, row, 0, 0, steps, total, 0, 0)
        r = _ONE / np.sqrt(np.float32(total[0] + eps))
        inverse[i] = r
        for j in range(n):
            y[i, j] = narrow(row[j] * r)


def forward(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous x [..., n] bf16 or fp32 -> y bf16, and r [rows] fp32."""
    n = x.shape[-1]
    rows = x.numel() // n
    y = torch.empty(x.shape, dtype=torch.bfloat16)
    r = torch.empty(rows, dtype=torch.float32)
    src, dst, inverse = x.float().numpy().reshape(rows, n), as_numpy(y).reshape(rows, n), r.numpy()
    parallel_for(
        lambda start, stop: l2_norm_fwd_kernel(src, np.float32(eps), dst, inverse, start, stop),
        rows,
        max(1, _GRAIN // n),
    )
    return y, r
