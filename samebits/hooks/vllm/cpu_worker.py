"""vLLM's worker and model runner on a CPU, with the calls of this package."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUModelRunner, CPUWorker  # before any other worker module

from samebits.hooks.vllm.runner import Observing
from samebits.hooks.vllm.worker import Hooked


class CpuModelRunner(Observing, CPUModelRunner):
    """vLLM's CPU runner; observes, computes nothing of its own."""


class CpuWorker(Hooked, CPUWorker):
    """vLLM's CPU worker; see `Hooked`."""

    def new_runner(self) -> CpuModelRunner:
        """A runner that can digest logit rows."""
        return CpuModelRunner(self.vllm_config, self.device)
