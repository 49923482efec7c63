"""Pickled messages between a coordinator and its ranks, with tensors as plain bytes.

torch's own pickler for pipes passes file descriptors, and Megatron replaces torch's loader of
pickled tensors by one that only exists where Megatron is importable; neither suits a coordinator.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        value = value.detach().cpu().contiguous()
        data = value.flatten().view(torch.uint8).numpy().tobytes()
        return _tensor, (data, value.dtype, tuple(value.shape))


def dumps(message: Any) -> bytes:
    """Bytes of any picklable message; tensors become detached CPU copies."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(message)
    return buffer.getvalue()


loads = pickle.loads
