"""Worker with the calls that gates and weight sync make: `LLM.collective_rpc("samebits_...")`.

Every call returns {"ok": value} or {"refused": error fields}, because vLLM passes an exception
between its processes as text only.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.worker.worker_base import WorkerBase

from samebits import runtime
from samebits.engines import rollout_wire as wire
from samebits.errors import SamebitsError


def _reply(method):
    """Return a `SamebitsError` as data; anything else stays an exception."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        try:
            return {"ok": method(self, *args, **kwargs)}
        except SamebitsError as error:
            return {"refused": wire.encode(error)}

    return call


class Extension:
    """Calls that need the worker's model; usable as `worker_extension_cls` with another worker."""

    model_runner: Any  # of the worker that this is mixed into
    rank: int

    @_reply
    def samebits_load_weights(self, manifest: str, step: int | None = None) -> int:
        """Verify a transfer and copy it into the live parameters; returns the number of tensors."""
        from samebits.hooks.vllm import weights
        from samebits.weights.transport import Manifest, receive

        model = self.model_runner.get_model()
        tensors = receive(
            Manifest.from_json(manifest),
            contract_digest=_contract_digest(),
            names=weights.names(model),
            step=step,
            device=next(model.parameters()).device,
        )
        return weights.load(model, tensors)

    @_reply
    def samebits_weight_checksums(self) -> dict[str, str]:
        """This rank's part of every logical tensor, from the live parameters."""
        from samebits.hooks.vllm import weights

        return weights.checksums(self.model_runner.get_model(), self.rank)

    @_reply
    def samebits_served(self, reset: bool = False) -> dict[str, int]:
        """Rows that each region computed in this process."""
        from samebits.ops import registry

        counts = registry.served()
        if reset:
            registry.reset_served()
        return counts

    @_reply
    def samebits_contract_digest(self) -> str:
        """Digest of the contract of this process; empty in a stock control without one."""
        return _contract_digest()

    @_reply
    def samebits_row_digests(self, on: bool) -> dict[str, dict[str, str]]:
        """Switch recording on or off; returns and clears what was recorded."""
        digests = self.model_runner.row_digests
        digests.on = on
        return digests.take()


def _contract_digest() -> str:
    """Digest of the contract bytes; the stock control without a contract has none."""
    import os

    return runtime.contract().digest if os.environ.get("SAMEBITS_CONTRACT") else ""


class Hooked(Extension, WorkerBase):
    """In front of one of vLLM's workers: counts scheduler hazards, checks the contract at start."""

    @_reply
    def samebits_binding(self) -> dict:
        """Outcome of the known-answer probes at start; empty in the stock control."""
        return self.binding

    @_reply
    def samebits_hazards(self, reset: bool = False) -> dict:
        """Counters of `hazards.Hazards.report`; `reset` zeroes them afterwards."""
        report = self.hazards.report() | self.replays(reset)
        if reset:
            self.hazards.reset()
        return report

    def replays(self, reset: bool) -> dict[str, int]:
        """Counter of replayed steps, where a worker can replay any; `reset` zeroes it."""
        return {}

    def new_runner(self) -> Any:
        """The model runner that takes the place of vLLM's own."""
        raise NotImplementedError

    @wire.reporting()
    def init_device(self) -> None:
        """vLLM's own start, then our model runner, hazard counters and the contract's probes."""
        from samebits.hooks.vllm import hazards

        super().init_device()
        self.model_runner = self.new_runner()
        self.hazards = hazards.of(self.vllm_config, self.model_runner)
        self.binding = _bind()

    @wire.reporting()
    def load_model(self, **kwargs) -> None:
        """vLLM's own; a refusal reaches the driver as one."""
        super().load_model(**kwargs)

    def determine_available_memory(self) -> int:
        """The KV cache size that was asked for; without one, vLLM's own measurement."""
        return self.cache_config.kv_cache_memory_bytes or super().determine_available_memory()

    @wire.reporting()
    def compile_or_warm_up_model(self) -> Any:
        """vLLM's own; a refusal reaches the driver as one."""
        return super().compile_or_warm_up_model()

    @wire.reporting()
    def execute_model(self, scheduler_output):
        """Count the hazards of the step, then run it; a refusal reaches the driver as one."""
        self.hazards.observe(scheduler_output)
        return super().execute_model(scheduler_output)

    @wire.reporting()
    def sample_tokens(self, grammar_output):
        """vLLM's own; a refusal reaches the driver as one."""
        return super().sample_tokens(grammar_output)


def _bind() -> dict:
    """Run the contract's checks on this process's operators; stock binds none."""
    if not runtime.regions():
        return {}
    binding = runtime.contract().bind("rollout")
    return {
        "status": binding.status,
        "platform": binding.platform,
        "description": dict(binding.description),
        "answers": dict(binding.answers),
    }
