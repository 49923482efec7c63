"""Hazards of chunked recurrences: where slices, prompts and preemptions fall in a chunk."""

from __future__ import annotations

from collections.abc import Sequence

from samebits.hooks.vllm.hazards import Hazards
from samebits.ops.gdn import CHUNK


class ChunkHazards(Hazards):
    """Adds to the counters of every model, all about multiples of `CHUNK` in absolute position:

    chunk_crossed_in_decode     a decoded token was the last of a chunk
    prefill_ends_on_chunk       a prompt ended with a chunk; _before_ and _after_: one token off
    slice_inside_chunk          a slice of a prompt started inside a chunk
    two_cross_in_one_step       two sequences or more ended a chunk in one step
    state_slot_reused           a page of state went from one request to another
    preempted_inside_chunk      a request lost its state inside a chunk
    resumed_from_state          a preempted request went on from a cached state

    What a preempted request computes again is neither a decode nor the end of a prompt.
    """

    def __init__(self, runner) -> None:
        super().__init__(runner.cache_config.block_size)
        self._runner = runner
        self._end: dict[str, int] = {}  # request -> tokens after its last step
        self._reached: dict[str, int] = {}  # request -> most tokens it ever had
        self._owner: dict[int, str] = {}  # page -> request that had it last

    def observe(self, output) -> None:
        """One engine step, as `Hazards.observe`, with the pages of state that it hands out."""
        self._block_size = self._runner.cache_config.block_size  # vLLM raises it after start
        for request_id in output.preempted_req_ids or ():
            inside = self._end.get(request_id, 0) % CHUNK != 0
            self._count["preempted_inside_chunk"] += inside
        super().observe(output)
        if output.total_num_scheduled_tokens:
            cached = output.scheduled_cached_reqs
            aligned = self._runner.cache_config.mamba_cache_mode == "align"
            for request_id, pages, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            ):
                resumed = request_id in cached.resumed_req_ids
                self._count["resumed_from_state"] += resumed and computed > 0 and aligned
                self._take(request_id, pages or (), computed if resumed else 0)
        for request_id in output.finished_req_ids:
            self._end.pop(request_id, None)
            self._reached.pop(request_id, None)

    def _arrive(self, new) -> None:
        super()._arrive(new)
        self._take(new.req_id, new.block_ids, new.num_computed_tokens)

    def _take(self, request_id: str, pages: Sequence[Sequence[int]], shared: int) -> None:
        """Pages per cache group, of which those for the first `shared` tokens hold a prefix hit."""
        for group in self._state_groups() if pages else ():
            for page in pages[group][shared // self._block_size :]:
                if page == 0:  # vLLM's null page
                    continue
                owner = self._owner.setdefault(page, request_id)
                self._count["state_slot_reused"] += owner != request_id
                self._owner[page] = request_id

    def _state_groups(self) -> list[int]:
        from vllm.v1.kv_cache_interface import MambaSpec

        groups = self._runner.kv_cache_config.kv_cache_groups
        return [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, MambaSpec)]

    def _classify(self, scheduled: dict[str, int]) -> None:
        super()._classify(scheduled)
        crossing = 0
        for request_id, tokens in scheduled.items():
            request = self._live[request_id]
            start, end = request.computed, request.computed + tokens
            self._end[request_id] = end
            first = end > self._reached.get(request_id, 0)
            self._reached[request_id] = max(end, self._reached.get(request_id, 0))
            crosses = end // CHUNK > start // CHUNK
            crossing += crosses
            if start >= request.prompt:
                self._count["chunk_crossed_in_decode"] += crosses and first and tokens == 1
                continue
            self._count["slice_inside_chunk"] += start % CHUNK != 0
            if first and end == request.prompt:
                self._count["prefill_ends_on_chunk"] += end % CHUNK == 0
                self._count["prefill_ends_before_chunk"] += end % CHUNK == CHUNK - 1
                self._count["prefill_ends_after_chunk"] += end % CHUNK == 1
        self._count["two_cross_in_one_step"] += crossing > 1
