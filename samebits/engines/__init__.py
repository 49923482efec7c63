"""The two engines as the gates drive them: vLLM for rollout, Megatron-core for training."""
