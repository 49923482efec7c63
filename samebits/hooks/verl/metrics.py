"""Metrics on log-probabilities themselves, beside verl's metrics on their exponentials."""

from __future__ import annotations

from samebits import mismatch


def logprob_bit_metrics(rollout_log_probs, actor_log_probs, mask) -> dict[str, float | int]:
    """Count bit mismatches between rollout and trainer log-probabilities.

    rollout_log_probs, actor_log_probs: fp32 tensors [batch, response]; mask: bool, same shape.
    Returns the keys `training/rollout_logp_*`; `mismatched_tokens` is 0 only when every unmasked
    pair has one bit pattern.
    """
    found = mismatch.measure(rollout_log_probs[mask], actor_log_probs[mask])
    return {
        "training/rollout_logp_tokens": found.tokens,
        "training/rollout_logp_mismatched_tokens": found.mismatches,
        "training/rollout_logp_diff_max": found.max_abs,
        "training/rollout_logp_diff_mean": found.mean_abs,
        "training/rollout_logp_k3_kl": found.k3_kl,
        "training/rollout_logp_is_ratio_max": found.is_ratio_max,
        "training/rollout_logp_is_ratio_median": found.is_ratio_median,
    }
