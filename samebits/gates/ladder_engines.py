"""Engines of a ladder's rungs: some rungs start theirs side by side, and are measured in turn.

Most of a rung is the start of its engines. Nothing starts while another rung is measured: the next
ones do when the last that is ready has been taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from samebits.casework import memory
from samebits.engines.rollout import RolloutEngine, RolloutSettings
from samebits.engines.trainer import OptimizerSettings
from samebits.engines.trainer_process import TrainerProcess
from samebits.gates import stages
from samebits.gates.run import Run
from samebits.recipe import Recipe

# Rungs side by side at most: with two processes each, as many as half of a small host's cores.
_MOST = 4
_FREE = 0.75  # share of the free memory of a GPU that they may take
# Bytes of a rung beside weights, what trains them and pages: contexts, graphs, passes.
_OTHER = 12 << 30


class Pair:
    """Rollout and trainer of one rung. They start at once; `ready` waits for both."""

    def __init__(self, run: Run, arithmetic: str):
        settings = RolloutSettings.of(
            run.recipe, run.model, arithmetic=arithmetic, prefix_caching=False
        )
        self._pool = ThreadPoolExecutor(1)
        # Nothing moves at a learning rate of 0: every repeat of a step computes the same.
        self._trainer: Future[TrainerProcess] = self._pool.submit(
            stages.trainer, run, arithmetic=arithmetic, optimizer=OptimizerSettings(lr=0.0)
        )
        try:
            self.rollout = RolloutEngine(settings, wait=False)
        except BaseException:
            self._end_trainer()
            raise

    @property
    def trainer(self) -> TrainerProcess:
        """The running trainer."""
        return self._trainer.result()

    def ready(self) -> None:
        """Wait until both have started; the error of one that has not."""
        self.rollout.ready()
        self._trainer.result()

    def close(self) -> None:
        """End both, no matter what became of either."""
        try:
            self.rollout.close()
        finally:
            self._end_trainer()

    def _end_trainer(self) -> None:
        if self._trainer.exception() is None:
            self._trainer.result().close()
        self._pool.shutdown()


class Engines:
    """The engines of rungs that are to be measured, in the order in which `of` asks for them."""

    def __init__(self, run: Run, arithmetics: Sequence[str], together: int):
        self._run, self._together = run, together
        self._left = list(arithmetics)
        self._started = dict[str, Pair]()

    @contextlib.contextmanager
    def of(self, arithmetic: str) -> Iterator[Pair]:
        """Both engines of a rung, running; they end behind it. The others are idle."""
        if arithmetic not in self._started:
            self._start()
        pair = self._started.pop(arithmetic)
        try:
            yield pair
        finally:
            pair.close()

    def _start(self) -> None:
        group, self._left = self._left[: self._together], self._left[self._together :]
        for arithmetic in group:
            self._started[arithmetic] = Pair(self._run, arithmetic)
        for pair in self._started.values():
            pair.ready()

    def close(self) -> None:
        """End those that nobody asked for."""
        with contextlib.ExitStack() as stack:
            for pair in self._started.values():
                stack.callback(pair.close)
        self._started.clear()


def together(recipe: Recipe) -> int:
    """Rungs whose engines fit side by side: one on a CPU, where a start takes all cores."""
    if recipe.platform == "cpu":
        return 1
    import torch

    free, _ = torch.cuda.mem_get_info()
    return max(1, min(_MOST, int(free * _FREE) // rung_bytes(recipe)))


def rung_bytes(recipe: Recipe) -> int:
    """What both engines of a rung take of a GPU."""
    config, engine = recipe.config, recipe.engine
    layers, _, _ = memory.page_groups(config)
    pages = engine["kv_blocks"] * engine["block_size"] * memory.kv_bytes(config, layers=layers)
    return memory.rl_bytes(config, "adam") + pages + _OTHER
