"""The policy-gradient loss that the trainer runs: verl's own, on per-token log-probabilities."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def _actor_config():
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1)


def loss(logprobs, batch: dict[str, Any]):
    """verl's clipped policy loss, token mean over the whole batch.

    logprobs [n] fp32 with grad: response tokens of one micro-batch. batch holds `old_logprobs` [n],
    `advantages` [n] and `batch_tokens`, the number of response tokens of the whole step, so that
    micro-batches add up to the mean of the step. Returns (scalar loss, metrics).
    """
    import torch
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    old = torch.as_tensor(batch["old_logprobs"])[None]
    advantages = torch.as_tensor(batch["advantages"])[None]
    mask = torch.ones_like(advantages)
    value, metrics = compute_policy_loss_vanilla(
        old, logprobs[None], advantages, mask, loss_agg_mode="token-mean", config=_actor_config()
    )
    return value * (logprobs.numel() / batch["batch_tokens"]), metrics
