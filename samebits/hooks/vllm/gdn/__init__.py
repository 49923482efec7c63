"""vLLM hooks for models with Gated DeltaNet layers (Qwen3.5 text models).

Evidence of a case depends on this package only when its contract binds `gdn.core`.
"""

from __future__ import annotations

from samebits import runtime


def register() -> None:
    """Name the hybrid model class to vLLM, which imports it when a model asks for it."""
    from vllm.model_executor.models import ModelRegistry

    module = "cuda.gdn" if runtime.platform() == "sm90" else "gdn.model"
    ModelRegistry.register_model(
        "Qwen3_5ForCausalLM", f"samebits.hooks.vllm.{module}:Qwen3_5ForCausalLM"
    )
    if runtime.aligned("norm.rms_zero_centred"):
        from samebits.hooks.vllm.gdn import norm

        norm.register()
