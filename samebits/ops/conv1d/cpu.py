"""Kernel of conv1d; the schedule is stated in the package's docstring and in `reference`."""

from __future__ import annotations

import numpy as np
import torch

from samebits.ops.gate_scalar import sigmoid32
from samebits.ops.jit import as_numpy, fma, kernel, parallel_for
from samebits.ops.scalar import narrow, widen

_ZERO = np.float32(0.0)
_GRAIN = 16384  # elements per task: below this a thread costs more than it saves


@kernel
def conv1d_fwd_kernel(x, weight, window, slots, starts, fresh, keep, wide, y, start, stop):
    """Channels start to stop of all sequences: y, and the window after the step if `keep`.

    The first channels go to `wide` in fp32, the others to y, rounded.
    """
    exact = wide.shape[1]
    taps, channels = weight.shape[1], stop - start
    w = np.empty((taps, channels), np.float32)
    for c in range(channels):
        for j in range(taps):
            w[j, c] = widen(weight[start + c, j])
    acc = np.empty(channels, np.float32)
    for r in range(starts.size - 1):
        first, last = starts[r], starts[r + 1]
        for t in range(first, last):
            acc[:] = _ZERO
            for j in range(taps):
                at = t - (taps - 1) + j
                if at >= first:
                    for c in range(channels):
                        acc[c] = fma(w[j, c], widen(x[at, start + c]), acc[c])
                elif fresh[r]:
                    for c in range(channels):
                        acc[c] = fma(w[j, c], _ZERO, acc[c])
                else:
                    old = window[slots[r], at - first + taps - 1]
                    for c in range(channels):
                        acc[c] = fma(w[j, c], widen(old[start + c]), acc[c])
            for c in range(channels):
                value = acc[c] * sigmoid32(acc[c])
                if start + c < exact:
                    wide[t, start + c] = value
                else:
                    y[t, start + c - exact] = narrow(value)
        if keep and last > first:
            for i in range(taps - 1):  # ascending: a kept row moves towards the front
                at = last - (taps - 1) + i
                for c in range(start, stop):
                    if at >= first:
                        window[slots[r], i, c] = x[at, c]
                    elif fresh[r]:
                        window[slots[r], i, c] = np.uint16(0)
                    else:
                        window[slots[r], i, c] = window[slots[r], at - first + taps - 1, c]


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    starts: np.ndarray,
    state: tuple[torch.Tensor, np.ndarray, np.ndarray] | None,
    exact: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous x [T, C], weight [C, W] bf16 -> the first `exact` channels in fp32, the rest in
    bf16; zeros from row starts[-1] on.

    state is (window, slots, fresh), updated in place; None: every sequence is fresh and forgotten.
    """
    channels, taps = weight.shape
    wide = torch.empty(len(x), exact)
    y = x.new_empty(len(x), channels - exact)
    for out in (wide, y):
        out[int(starts[-1]) :] = 0
    sequences = len(starts) - 1
    if state is None:
        window = np.empty((0, taps - 1, channels), np.uint16)
        slots, fresh = np.zeros(sequences, np.int64), np.ones(sequences, np.bool_)
    else:
        window, slots, fresh = as_numpy(state[0]), state[1], state[2]
    args = (as_numpy(x), as_numpy(weight), window, slots, starts, fresh, state is not None)
    outs = as_numpy(wide), as_numpy(y)
    parallel_for(
        lambda start, stop: conv1d_fwd_kernel(*args, *outs, start, stop),
        channels,
        max(16, _GRAIN // max(1, len(x) * taps)),
    )
    return wide, y
