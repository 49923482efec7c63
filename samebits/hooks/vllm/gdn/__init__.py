"""vLLM hooks for models with Gated DeltaNet layers (Qwen3.5 text models).

Evidence of a case depends on this package only when its contract binds `gdn.core`.
"""

from __future__ import annotations


def register() -> None:
    """Name the hybrid model classes to vLLM, which imports them when a model asks for one."""
    from vllm.model_executor.models import ModelRegistry

    ModelRegistry.register_model(
        "Qwen3_5ForCausalLM", "samebits.hooks.vllm.gdn.model:Qwen3_5ForCausalLM"
    )
