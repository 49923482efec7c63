"""vLLM's worker on a GPU, with the calls of this package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.worker.gpu_worker import Worker

from samebits import runtime
from samebits.engines import rollout_wire as wire
from samebits.hooks.vllm import layers
from samebits.hooks.vllm.cuda.runner import CudaModelRunner
from samebits.hooks.vllm.worker import Hooked


class CudaWorker(Hooked, Worker):
    """vLLM's GPU worker; see `Hooked`."""

    def new_runner(self) -> CudaModelRunner:
        """A runner that can digest logit rows."""
        return CudaModelRunner(self.vllm_config, self.device)

    def replays(self, reset: bool) -> dict[str, int]:
        """`graph_replays`: steps that were replayed from a captured graph."""
        found = self.model_runner.graph_replays
        if reset:
            self.model_runner.graph_replays = 0
        return {"graph_replays": found}

    @wire.reporting()
    def load_model(self, **kwargs) -> None:
        """As `Hooked.load_model`; then every aligned product's shape is admitted by its bit test.

        It takes a while and reads results back, so it cannot wait for the first step.
        """
        super().load_model(**kwargs)
        shapes = set(products(self.model_runner.get_model()))
        if shapes:
            from samebits.ops.gemm import sm90

            for shape in sorted(shapes, key=str):
                sm90.admit(*shape)


def products(model: Any) -> Iterator[tuple[int, int, int, torch.dtype, bool]]:
    """(N, K, leaves, output, with a bias) of every aligned matrix product of this rank, as
    `gemm.sm90.admit` takes them."""
    for module in model.modules():
        if isinstance(module, LinearBase) and layers.multiplies(module):
            if module.weight.dim() != 2:
                continue  # the convolution of a recurrent layer, whose weight vLLM keeps in one
            if isinstance(module, RowParallelLinear):
                leaves = runtime.contract().plan("gemm.row").local(module.tp_size).leaves
                output = torch.bfloat16 if module.tp_size == 1 else torch.float32
                yield *module.weight.shape, leaves, output, False
            else:
                yield *module.weight.shape, 1, torch.bfloat16, module.bias is not None
        elif isinstance(module, ParallelLMHead) and layers.aligned("gemm.lm_head"):
            yield *module.weight.shape, 1, torch.float32, False
