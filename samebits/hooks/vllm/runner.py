"""Mixin of model runners: digests of whole logit rows while vLLM computes them."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from samebits import bits


class RowDigests:
    """Digests of whole fp32 logit rows, keyed by request and the index of the token they predict.

    Off by default. While on, every row that leads to a sampled or a prompt logprob is recorded.
    """

    def __init__(self) -> None:
        self.on = False
        self._rows: dict[str, dict[int, str]] = {}

    def add(self, predicted: list[tuple[str, int]], logits: torch.Tensor) -> None:
        """logits [n, V]; row i predicts the token `predicted[i]` = (request, index)."""
        from samebits.ops import logprob

        digests = logprob.row_digest(logits.float())
        for (request_id, index), digest in zip(predicted, digests, strict=True):
            self._rows.setdefault(request_id, {})[index] = bits.hex_digest(digest)

    def take(self) -> dict[str, dict[str, str]]:
        """Everything recorded so far, and forget it."""
        rows, self._rows = self._rows, {}
        return {key: {str(i): digest for i, digest in value.items()} for key, value in rows.items()}


class Observing(GPUModelRunner):
    """In front of a runner of vLLM (all derive from this one); computes nothing of its own."""

    def __init__(self, vllm_config, device) -> None:
        super().__init__(vllm_config, device)
        self.row_digests = RowDigests()
        self._scheduled: dict[str, int] = {}

    def execute_model(self, scheduler_output, *args, **kwargs):
        """Note how many tokens each request gets in this step, then run it."""
        self._scheduled = scheduler_output.num_scheduled_tokens
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _sample(self, logits, spec_decode_metadata):
        if self.row_digests.on and logits is not None:
            ids = self.input_batch.req_ids
            kept = [row for row in range(len(ids)) if not self.discard_request_mask.np[row]]
            if kept:
                predicted = [(ids[row], self._done(ids[row])) for row in kept]
                self.row_digests.add(predicted, logits[kept])
        return super()._sample(logits, spec_decode_metadata)

    def _done(self, request_id: str) -> int:
        """Tokens of a request that are computed once this step is: index of the next one."""
        return self.requests[request_id].num_computed_tokens + self._scheduled[request_id]

    def _get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens):
        if not self.row_digests.on:
            return super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)
        pieces = self._prompt_pieces(num_scheduled_tokens)
        with _observed_logits(self.get_model(), pieces, self.row_digests):
            return super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)

    def _prompt_pieces(self, scheduled: dict[str, int]) -> list[tuple[str, int, int]]:
        """(request, first predicted token, rows) in the order in which vLLM asks for logits."""
        pieces = []
        for request_id in self.num_prompt_logprobs:
            if request_id not in scheduled:
                continue
            request = self.requests[request_id]
            first = request.num_computed_tokens + 1
            rows = min(scheduled[request_id], len(request.prompt_token_ids) - first)
            if rows > 0:
                pieces.append((request_id, first, rows))
        return pieces


class _observed_logits:
    """Forward hook on the logits layer for one call of vLLM's prompt-logprob loop."""

    def __init__(self, model, pieces, digests: RowDigests) -> None:
        self._layer, self._pieces, self._digests = model.logits_processor, iter(pieces), digests

    def __enter__(self) -> None:
        self._handle = self._layer.register_forward_hook(self._see)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _see(self, _layer, _inputs, logits: torch.Tensor) -> None:
        request_id, first, rows = next(self._pieces)
        if logits.shape[0] != rows:
            raise RuntimeError(f"{request_id}: {logits.shape[0]} logit rows, expected {rows}")
        self._digests.add([(request_id, first + i) for i in range(rows)], logits)
