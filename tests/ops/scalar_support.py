"""Scalar functions over arrays, and their error against float64."""

from __future__ import annotations

import numpy as np


def run(body, x, dtype=np.float32) -> np.ndarray:
    """`body(x, y)` of an array, which it fills; numbers that are no array are fp32."""
    x = x if isinstance(x, np.ndarray) else np.asarray(x, np.float32)
    out = np.empty(x.size, dtype)
    body(x, out)
    return out


def ulps(value: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Error in fp32 units in the last place of the true value."""
    _, exponent = np.frexp(truth)
    unit = np.exp2(np.maximum(exponent - 24.0, -149.0))
    return np.abs(value.astype(np.float64) - truth) / unit
