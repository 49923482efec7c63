"""Runs in a process with the patched tree: hazards of vLLM's scheduler alone, without a model.

`python -m samebits.gates.scheduled FILE` reads [[settings, [[token ids, tokens to sample], ...]],
...] and prints a report for each, with the counters that engines have, or {"stuck": why} where a
request never gets its pages. Settings: page, states (pages that those of one request take),
max_model_len, the sizes of `gates.pages`, and how many requests go `first`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace as Fields

import torch
from vllm.config import CacheConfig, ObservabilityConfig, ParallelConfig, SchedulerConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from samebits.hooks.vllm.gdn.hazards import ChunkHazards


class Stuck(Exception):
    """No request can go on, and none ever will."""


class Scheduled:
    """vLLM's scheduler over a cache of states; every token that it samples is the same one."""

    def __init__(self, given: dict) -> None:
        page, mode = given["page"], "align" if given["prefix_caching"] else "none"
        cache = CacheConfig(block_size=page, enable_prefix_caching=given["prefix_caching"])
        cache.mamba_cache_mode, cache.num_gpu_blocks = mode, given["kv_blocks"]
        steps = SchedulerConfig(
            max_num_seqs=given["max_num_seqs"],
            max_num_batched_tokens=given["max_num_batched_tokens"],
            max_model_len=given["max_model_len"],
            is_encoder_decoder=False,
            async_scheduling=False,
        )
        model = Fields(
            is_encoder_decoder=False,
            max_model_len=given["max_model_len"],
            is_diffusion=False,
            enable_return_routed_experts=False,
        )
        absent = ("lora", "kv_events", "kv_transfer", "ec_transfer", "speculative")
        config = Fields(
            **{f"{name}_config": None for name in absent},
            scheduler_config=steps,
            cache_config=cache,
            parallel_config=ParallelConfig(),
            observability_config=ObservabilityConfig(),
            model_config=model,
            num_speculative_tokens=0,
            use_v2_model_runner=False,
            max_concurrent_batches=1,
        )
        # Without a prefix cache one page holds the state of a whole sequence.
        whole = page if mode == "align" else -(-given["max_model_len"] // page) * page
        state = MambaSpec(whole, ((1,),), (torch.float32,), mamba_cache_mode=mode)
        keys = FullAttentionSpec(page, num_kv_heads=1, head_size=1, dtype=torch.float32)
        specs = [keys, *[state] * given["states"]]
        groups = [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)]
        pages = KVCacheConfig(given["kv_blocks"], kv_cache_tensors=[], kv_cache_groups=groups)
        register_all_kvcache_specs(config)
        self._hashes = get_request_block_hasher(page, sha256)
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=pages,
            block_size=whole,
            hash_block_size=page,
            structured_output_manager=Fields(should_advance=lambda _: False),
            mm_registry=Fields(supports_multimodal_inputs=lambda _: False),
        )
        self.hazards = ChunkHazards(Fields(cache_config=cache, kv_cache_config=pages))

    def generate(self, requests: list) -> None:
        """All of the requests at once, to their end."""
        for number, (prompt, tokens) in requests:
            sampling = SamplingParams(ignore_eos=True, max_tokens=tokens)
            sampling.update_from_generation_config({}, 2)
            self._scheduler.add_request(
                Request(str(number), prompt, sampling, None, block_hasher=self._hashes)
            )
        while self._scheduler.has_unfinished_requests():
            self._step()

    def report(self) -> dict:
        """Counters that engines have, and the pages that a reset of the prefix cache would drop."""
        blocks = self._scheduler.kv_cache_manager.block_pool.blocks
        cached = sum(block.block_hash is not None for block in blocks)
        return {**self.hazards.report(), "cached_pages": cached}

    def _step(self) -> None:
        output = self._scheduler.schedule()
        self.hazards.observe(output)
        if not output.total_num_scheduled_tokens:
            raise Stuck("nothing was scheduled: a request never gets its pages")
        ids = list(output.num_scheduled_tokens)
        live = [self._scheduler.requests[name] for name in ids]
        sampled = [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in live]
        places = {name: place for place, name in enumerate(ids)}
        self._scheduler.update_from_output(output, ModelRunnerOutput(ids, places, sampled))


def report(given: dict, requests: list) -> dict:
    """Counters of one engine that serves [[token ids, tokens to sample], ...]."""
    engine, numbered = Scheduled(given), list(enumerate(requests))
    try:
        engine.generate(numbered[: given["first"]])
        engine.generate(numbered[given["first"] :])
    except Stuck as problem:
        return {"stuck": str(problem)}
    return engine.report()


if __name__ == "__main__":
    init_none_hash(sha256)
    work = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([report(given, requests) for given, requests in work]))
