"""Kernel of gdn_gate; the schedule is stated in the package's docstring and in `reference`."""

from __future__ import annotations

import numpy as np
import torch

from samebits.ops.gate_scalar import sigmoid32, softplus32
from samebits.ops.jit import as_numpy, kernel, parallel_for
from samebits.ops.scalar import exp32, widen

_GRAIN = 4096  # elements per task: below this a thread costs more than it saves


@kernel
def gdn_gate_fwd_kernel(a, b, a_log, dt_bias, g, beta, start, stop):
    """Tokens start to stop: log decay g and write strength beta, each element alone."""
    heads = a_log.size
    rate, bias = np.empty(heads, np.float32), np.empty(heads, np.float32)
    for h in range(heads):
        rate[h], bias[h] = -exp32(a_log[h]), widen(dt_bias[h])
    for i in range(start, stop):
        for h in range(heads):
            g[i, h] = rate[h] * softplus32(widen(a[i, h]) + bias[h])
            beta[i, h] = sigmoid32(widen(b[i, h]))


def forward(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous a, b [T, HV] bf16, A_log [HV] fp32, dt_bias [HV] bf16 -> g, beta [T, HV] fp32."""
    g, beta = torch.empty(a.shape), torch.empty(a.shape)
    args = tuple(as_numpy(x) for x in (a, b, A_log, dt_bias, g, beta))
    parallel_for(
        lambda start, stop: gdn_gate_fwd_kernel(*args, start, stop),
        len(a),
        max(1, _GRAIN // max(1, a.shape[1])),
    )
    return g, beta
