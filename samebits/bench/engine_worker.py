"""What a vLLM worker tells a benchmark about its memory, ours and vLLM's own alike."""

from __future__ import annotations

import math
from typing import Any


class Measured:
    """`worker_extension_cls` of every engine of a benchmark; adds a call and changes none."""

    model_runner: Any  # of the worker that this is mixed into
    vllm_config: Any

    def samebits_measured(self) -> dict[str, Any]:
        """Memory of this process, as torch and vLLM's cache configuration have it.

        allocated, reserved   most bytes of tensors, and of the allocator that holds them
        pages                 of every group of layers that share them
        groups                for each: kind, layers, tokens of a page, bytes of a `page` of one
                              layer, of the `state` in it (0 for keys and values), and of all pages
                              of one `sequence` of max_model_len tokens
        """
        import torch

        config = self.model_runner.kv_cache_config
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "pages": config.num_blocks,
            "groups": [_group(group, self.vllm_config) for group in config.kv_cache_groups],
        }


def _group(group: Any, vllm_config: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    tensors = zip(getattr(spec, "shapes", ()), getattr(spec, "dtypes", ()), strict=True)
    return {
        "kind": type(spec).__name__,
        "layers": len(group.layer_names),
        "tokens": spec.block_size,
        "page": spec.page_size_bytes,
        "state": sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors),
        "sequence": spec.max_memory_usage_bytes(vllm_config),
    }
