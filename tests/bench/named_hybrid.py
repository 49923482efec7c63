"""Prints what vLLM says of its text-only hybrid model in a process without a plugin, as JSON.

Run by `test_stock_hybrid`: `__mp_main__` is how a spawned engine core imports its parent's module.
"""

import json
import runpy
import sys

runpy.run_module("samebits.bench.engine_arm", run_name="__mp_main__")

from vllm.model_executor.models import ModelRegistry  # noqa: E402

from samebits.bench import stock_hybrid  # noqa: E402

known = ModelRegistry.models["Qwen3_5ForCausalLM"]
info = known.inspect_model_cls()
model = stock_hybrid.Qwen3_5ForCausalLM
print(
    json.dumps(
        {
            "same": known.load_model_cls() is model,
            "hybrid": info.is_hybrid and info.has_inner_state and info.is_text_generation_model,
            "forward": model.forward.__module__,
            "states": len(model.get_mamba_state_copy_func()),
            "pictures": "torchvision" in sys.modules,
        }
    )
)
