"""Kernels of silu_mul; the schedule is stated in the package's docstring and in `reference`."""

from __future__ import annotations

import numpy as np
import torch

from samebits.ops.jit import as_numpy, kernel, parallel_for
from samebits.ops.scalar import exp32, narrow, widen

_ONE = np.float32(1.0)
_GRAIN = 16384  # elements per task: below this a thread costs more than it saves


@kernel
def silu_mul_fwd_kernel(gate_up, y, start, stop):
    """Rows start to stop: y = gate * sigmoid(gate) * up in fp32, rounded once."""
    width = y.shape[1]
    e = np.empty(width, np.float32)  # exponentials in a loop of their own vectorise better
    for i in range(start, stop):
        gate, up, out = gate_up[i, :width], gate_up[i, width:], y[i]
        for j in range(width):
            e[j] = exp32(-widen(gate[j]))
        for j in range(width):
            g = widen(gate[j])
            out[j] = narrow((g * (_ONE / (_ONE + e[j]))) * widen(up[j]))


@kernel
def silu_mul_bwd_kernel(gate_up, grad, dgate_up, start, stop):
    """Rows start to stop: gradient of both halves in fp32, each rounded once."""
    width = grad.shape[1]
    for i in range(start, stop):
        gate, up, dy = gate_up[i, :width], gate_up[i, width:], grad[i]
        dgate, dup = dgate_up[i, :width], dgate_up[i, width:]
        for j in range(width):
            g, d = widen(gate[j]), widen(dy[j])
            s = _ONE / (_ONE + exp32(-g))
            dup[j] = narrow(d * (g * s))
            dgate[j] = narrow(d * widen(up[j]) * (s * (_ONE + g * (_ONE - s))))


def forward(gate_up: torch.Tensor) -> torch.Tensor:
    """Contiguous [..., 2F] bf16 -> [..., F] bf16."""
    width = gate_up.shape[-1] // 2
    y = torch.empty((*gate_up.shape[:-1], width), dtype=torch.bfloat16)
    rows = y.numel() // width
    src, dst = as_numpy(gate_up).reshape(rows, 2 * width), as_numpy(y).reshape(rows, width)
    parallel_for(
        lambda start, stop: silu_mul_fwd_kernel(src, dst, start, stop),
        rows,
        max(1, _GRAIN // width),
    )
    return y


def backward(gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Contiguous [..., 2F] and [..., F] bf16 -> gradient of gate_up, bf16."""
    width = grad.shape[-1]
    out = torch.empty_like(gate_up)
    rows = grad.numel() // width
    src, dy = as_numpy(gate_up).reshape(rows, 2 * width), as_numpy(grad).reshape(rows, width)
    dst = as_numpy(out).reshape(rows, 2 * width)
    parallel_for(
        lambda start, stop: silu_mul_bwd_kernel(src, dy, dst, start, stop),
        rows,
        max(1, _GRAIN // width),
    )
    return out
