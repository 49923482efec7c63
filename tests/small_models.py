"""Settings that tests of small models on real engines share."""

RL = {
    "steps": 2,
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "max_tokens": 8,
    "learning_rate": "1e-2",  # moves every weight by more than a rounding
    "algorithm": "grpo",
    "seed": 1,
}
_SIZES = {"num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 1024}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def _sizes(hidden: int) -> dict[str, int]:
    return {**_SIZES, "hidden_size": hidden, "intermediate_size": 2 * hidden}


def hybrid(hidden: int) -> dict[str, int]:
    """Configuration of two layers, one of them recurrent."""
    return _sizes(hidden) | {"full_attention_interval": 2}


def dense(hidden: int) -> dict[str, int]:
    """As `hybrid`, of attention layers alone."""
    return _sizes(hidden) | _HEADS
