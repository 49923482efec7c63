"""vLLM's CPU platform without a compiled extension, and the gate in front of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform as VllmCpuPlatform

from samebits.hooks.vllm import config, requests

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CpuPlatform(VllmCpuPlatform):
    """Adds an attention backend, a worker and refusals; all else is vLLM's."""

    # torch.compile'd helpers stay eager: no C++ compiler is needed and nothing is fused.
    simple_compile_backend: str = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing to import: `cpu_ops` defines what the Python code calls."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None) -> str:
        """Path of the backend class: paged when aligned, else the stock one."""
        from samebits import runtime

        name = "PagedBackend" if runtime.aligned("attention") else "SdpaBackend"
        return f"samebits.hooks.vllm.attention.{name}"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """vLLM's own changes, then worker and scheduler of this package, then `config.check`."""
        method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
        super().check_and_update_config(vllm_config)
        if method:  # vLLM overwrites it; a forked process need not import everything again
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker":
            parallel.worker_cls = "samebits.hooks.vllm.cpu_worker.CpuWorker"
        scheduler = vllm_config.scheduler_config
        scheduler.scheduler_cls = (
            scheduler.scheduler_cls or "samebits.hooks.vllm.scheduler.Scheduler"
        )
        # vLLM forces worker processes on a CPU to bind OpenMP threads; one rank needs no binding.
        if parallel.world_size == 1:
            parallel.distributed_executor_backend = "uni"
        config.check(vllm_config)

    @classmethod
    def validate_request(cls, processed_inputs, params) -> None:
        """Refuse a request outside the proved semantics, see `requests.check`."""
        requests.check(params)
