"""Runs in a process with the patched tree: what `hooks.vllm.cuda.config` refuses.

`python cuda_settings.py SETTINGS` prints JSON {name: error id, or null where it is accepted}. The
configs are stand-ins with the fields that are read: vLLM builds real ones only beside a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace as Fields

from vllm.config import CUDAGraphMode

from samebits.errors import Refused
from samebits.hooks.vllm.cuda import config


def outcome(
    cudagraph_mode: str = "NONE",
    async_scheduling: bool = False,
    use_ubatching: bool = False,
    block_size: int = 16,
    head_size: int = 64,
    capability: list[int] | None = (9, 0),  # type: ignore[assignment]
    architecture: str = "LlamaForCausalLM",
    arithmetic: str = "aligned",
    trace: str = "",
) -> str | None:
    """The error id, or None."""
    os.environ["SAMEBITS_ARITHMETIC"], os.environ["SAMEBITS_TRACE"] = arithmetic, trace
    model = Fields(
        architectures=[architecture],
        get_head_size=lambda: head_size,
        get_num_attention_heads=lambda _: 9,
        get_num_kv_heads=lambda _: 3,
    )
    vllm_config = Fields(
        model_config=model,
        scheduler_config=Fields(async_scheduling=async_scheduling),
        compilation_config=Fields(cudagraph_mode=CUDAGraphMode[cudagraph_mode]),
        parallel_config=Fields(use_ubatching=use_ubatching),
        cache_config=Fields(block_size=block_size),
    )
    chip = Fields(major=capability[0], minor=capability[1]) if capability else None
    try:
        config.check(vllm_config, chip)
    except Refused as error:
        return error.error_id
    return None


if __name__ == "__main__":
    print(json.dumps({name: outcome(**given) for name, given in json.loads(sys.argv[1]).items()}))
