"""Kernel of output_gate; the schedule is stated in the package's docstring and in `reference`."""

from __future__ import annotations

import torch

from samebits.ops.gate_scalar import sigmoid32
from samebits.ops.jit import as_numpy, kernel, parallel_for
from samebits.ops.scalar import narrow, widen

_GRAIN = 16384  # elements per task: below this a thread costs more than it saves


@kernel
def output_gate_fwd_kernel(x, gate, y, start, stop):
    """Elements start to stop of flat arrays."""
    for i in range(start, stop):
        y[i] = narrow(widen(x[i]) * sigmoid32(widen(gate[i])))


def forward(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Contiguous x, gate of one shape, bf16 -> y as x."""
    y = torch.empty_like(x)
    args = tuple(as_numpy(t).reshape(-1) for t in (x, gate, y))
    parallel_for(lambda start, stop: output_gate_fwd_kernel(*args, start, stop), x.numel(), _GRAIN)
    return y
