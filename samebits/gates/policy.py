"""The policy-gradient loss that the trainer runs: verl's own, on per-token log-probabilities."""

from __future__ import annotations

import functools


@functools.cache
def _actor_config():
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1)


def loss(logprobs, old_logprobs, advantages, mask):
    """verl's clipped policy loss (`vanilla`), mean over the masked tokens.

    All arguments fp32 [sequences, targets], right-padded with mask 0. Returns (loss, metrics).
    """
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    return compute_policy_loss_vanilla(
        old_logprobs,
        logprobs,
        advantages,
        mask,
        loss_agg_mode="token-mean",
        config=_actor_config(),
    )
