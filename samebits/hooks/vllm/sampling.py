"""What the patched sampler and model runner call."""

from __future__ import annotations

import functools

import torch

from samebits import runtime
from samebits.hooks.vllm.layers import aligned

__all__ = ["aligned", "log_softmax"]


@functools.cache
def _plan():
    return runtime.contract().plan("logprob")


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """fp32 logits [T, V] -> fp32 log-softmax [T, V] by the contract's leaves of the vocabulary."""
    from samebits.ops import logprob

    return logprob.log_softmax(logits, _plan())
