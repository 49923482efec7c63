"""vLLM's GPU model runner: observed, and with replayed graphs counted as what they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from samebits.hooks.vllm.runner import Observing
from samebits.ops import registry


class CudaModelRunner(Observing):
    """vLLM's GPU runner; observes, computes nothing of its own."""

    model: Any
    graph_replays = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's own; a model that is captured counts its replays and their rows."""
        super().load_model(*args, **kwargs)
        if type(self.model) is CUDAGraphWrapper:
            self.model = CountedGraphs(
                self.model.unwrap(), self.vllm_config, runtime_mode=CUDAGraphMode.FULL
            )
            self.model.replayed = self._replayed

    def _replayed(self) -> None:
        self.graph_replays += 1


class CountedGraphs(CUDAGraphWrapper):
    """Python runs only while a graph is captured; a replay adds the counts of its capture.

    They include rows that pad a step to the size of its graph: the region computed them.
    """

    replayed: Callable[[], None]  # called at every replay

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows: dict[Any, Counter[str]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Capture or replay as vLLM decides."""
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.runtime_mode:
            return super().__call__(*args, **kwargs)
        key = context.batch_descriptor
        replayed = key in self._rows
        before = Counter(registry.served())
        output = super().__call__(*args, **kwargs)
        if replayed:
            self.replayed()
            for region, rows in self._rows[key].items():
                registry.count_served(region, rows)
        else:
            self._rows[key] = Counter(registry.served()) - before
        return output
