"""vLLM's CUDA platform with an attention backend, a worker, a scheduler and a gate of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.hooks.vllm import cuda

cuda.require()  # before vLLM's module, whose import fails without saying what is missing

from vllm.platforms.cuda import CudaPlatform as VllmCudaPlatform  # noqa: E402

from samebits import runtime  # noqa: E402
from samebits.hooks.vllm import config, requests  # noqa: E402
from samebits.hooks.vllm.cuda import config as cuda_config  # noqa: E402

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CudaPlatform(VllmCudaPlatform):
    """Still CUDA to all of vLLM; the stock control takes vLLM's own attention backends."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None) -> str:
        """Path of the backend class: paged when aligned, else vLLM's own choice."""
        if runtime.aligned("attention"):
            return "samebits.hooks.vllm.cuda.attention.PagedBackend"
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """vLLM's own changes, then worker and scheduler of this package, then the checks."""
        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "samebits.hooks.vllm.cuda.worker.CudaWorker"
        super().check_and_update_config(vllm_config)
        cuda_config.settle(vllm_config)
        scheduler.scheduler_cls = (
            scheduler.scheduler_cls or "samebits.hooks.vllm.scheduler.Scheduler"
        )
        config.check(vllm_config)
        cuda_config.check(vllm_config, cls.get_device_capability())

    @classmethod
    def validate_request(cls, processed_inputs, params) -> None:
        """Refuse a request outside the proved semantics, see `requests.check`."""
        requests.check(params)
