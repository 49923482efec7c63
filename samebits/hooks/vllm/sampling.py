"""What the patched sampler and model runner call."""

from __future__ import annotations

import functools

import torch

from samebits import runtime
from samebits.hooks.vllm import layers

__all__ = ["aligned", "log_softmax"]


def aligned() -> bool:
    """True when log-probabilities are ours."""
    return layers.aligned("logprob")


@functools.cache
def _plan():
    return runtime.contract().plan("logprob")


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """fp32 logits [T, V] -> fp32 log-softmax [T, V] by the contract's leaves of the vocabulary.

    A stock output layer gives bf16 logits, which are widened first, as upstream widens them.
    """
    from samebits.ops import logprob

    wide = logits if layers.aligned("gemm.lm_head") else logits.float()
    return logprob.log_softmax(wide, _plan())
