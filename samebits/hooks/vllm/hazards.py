"""Counts what the scheduler really did, from the outputs it hands to the workers.

A proof over batches is worth what its batches contained; a hazard that never fired was not covered.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass
class _Request:
    prompt: int
    computed: int = 0


def of(vllm_config, runner) -> Hazards:
    """The counters for the model of `runner`: recurrent layers have hazards of their own."""
    if vllm_config.model_config.is_hybrid:
        from samebits.hooks.vllm.gdn.hazards import ChunkHazards

        return ChunkHazards(runner)
    return Hazards(vllm_config.cache_config.block_size)


class Hazards:
    """Feed every `SchedulerOutput` to `observe`; `report` gives plain counters."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._live: dict[str, _Request] = {}
        self.reset()

    def reset(self) -> None:
        """Zero the counters; requests in flight stay known."""
        self._count: Counter[str] = Counter()
        self._batch: Counter[int] = Counter()

    def observe(self, output) -> None:
        """One engine step: which rows are prefill pieces, decodes, resumed, cached, preempted."""
        for request_id in output.finished_req_ids:
            self._live.pop(request_id, None)
        self._count["preempted"] += len(output.preempted_req_ids or ())
        if not output.total_num_scheduled_tokens:
            return
        for new in output.scheduled_new_reqs:
            self._arrive(new)
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._live[request_id].computed = computed
            if request_id in cached.resumed_req_ids:
                self._count["resumed"] += 1
                self._count["resumed_hit_tokens"] += computed
        self._classify(output.num_scheduled_tokens)

    def _arrive(self, new) -> None:
        prompt = len(new.prompt_token_ids)
        self._live[new.req_id] = _Request(prompt, new.num_computed_tokens)
        self._count["requests"] += 1
        self._count["one_token_prompts"] += prompt == 1
        self._count["exact_block_prompts"] += prompt % self._block_size == 0
        self._count["prefix_hit_requests"] += new.num_computed_tokens > 0
        self._count["prefix_hit_tokens"] += new.num_computed_tokens

    def _classify(self, scheduled: dict[str, int]) -> None:
        prefill = decode = 0
        for request_id, tokens in scheduled.items():
            request = self._live[request_id]
            if request.computed < request.prompt:
                prefill += 1
                split = request.computed + tokens < request.prompt
                self._count["split_mid_prompt"] += split
                unaligned = split and (request.computed + tokens) % self._block_size != 0
                self._count["split_mid_block"] += unaligned
            else:
                decode += 1
        self._count["steps"] += 1
        self._count["tokens"] += sum(scheduled.values())
        self._count["prefill_pieces"] += prefill
        self._count["decode_rows"] += decode
        self._count["mixed_steps"] += prefill > 0 and decode > 0
        self._batch[len(scheduled)] += 1

    def report(self) -> dict:
        """Counter name -> count, and `batch_sizes`: requests in a step -> steps."""
        sizes = {str(size): count for size, count in sorted(self._batch.items())}
        return {**{name: int(count) for name, count in self._count.items()}, "batch_sizes": sizes}
