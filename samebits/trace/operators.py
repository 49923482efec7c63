"""Which torch operators an engine ran while a sequence was recorded, and which region called them.

Kernels of `samebits` (numba, Triton) are no torch operators: they show as calls of their regions.
What this adds is everything else, so that arithmetic that no contract covers is seen.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MOVES = "moves"  # views, copies, gathers, indices: no rounding
POINTWISE = "pointwise"  # each output element from its own elements: one order only
REDUCES = "reduces"  # sums, products of matrices, whatever else makes floats

# Engine -> the class whose methods hold its forward passes.
_PASSES = {
    "rollout": ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    "trainer": ("samebits.engines.trainer", "Trainer"),
}
# Method -> phase. Behind the logits the rollout chooses tokens, in the trainer's `score` nothing.
_PHASES = {
    "rollout": {"execute_model": "forward", "sample_tokens": "sampling"},
    "trainer": {"score": "forward"},
}
# Not tagged as moving or pointwise by torch. Selection by index, and making tensors.
_MOVING = frozenset(
    [
        "copy_",
        "_to_copy",
        "clone",
        "cat",
        "stack",
        "index",
        "index_select",
        "index_put_",
        "index_copy_",
        "gather",
        "scatter_",
        "embedding",
        "repeat_interleave",
        "masked_select",
        "nonzero",
        "sort",
        "topk",
        "max",
        "min",
        "argmax",
        "argmin",
        "any",
        "all",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "new_ones",
        "new_zeros",
        "full",
        "full_like",
        "arange",
        "lift_fresh",
        "_local_scalar_dense",
        "fill_",
        "zero_",
        "masked_fill",
        "masked_fill_",
        "where",
        "set_",
        "resize_",
        "constant_pad_nd",
        "flip",
        "roll",
        "triu",
        "tril",
        "_unsafe_view",
    ]
)


@dataclass(frozen=True, order=True)
class Operator:
    """`count` calls of a torch operator.

    region   of `samebits.ops` that called it, or None outside of all regions
    phase    `forward` up to the logits, or `sampling`
    kind     `moves`, `pointwise` or `reduces`
    """

    phase: str
    region: str | None
    kind: str
    name: str
    count: int


@dataclass(frozen=True, order=True)
class Scored:
    """`count` calls of a function of `ops.logprob` in a phase, each with `rows` rows of logits."""

    phase: str
    function: str
    rows: int
    count: int


def kind(function: Any, inputs: Any, output: Any) -> str:
    """What `function` may do to bits, from its name and tags and the dtypes it was given."""
    made = [x for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
    if not any(x.is_floating_point() for x in made):
        return MOVES
    name = function._schema.name.split("::")[1]
    if function.is_view or name in _MOVING:
        given = [x for x in torch.utils._pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
        floats = {x.dtype for x in (*given, *made) if x.is_floating_point()}
        return POINTWISE if name in ("copy_", "_to_copy") and len(floats) > 1 else MOVES
    return POINTWISE if torch.Tag.pointwise in function.tags else REDUCES


class Tally(TorchDispatchMode):
    """Counts the operators of one process while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str | None, str, str]] = Counter()
        self.scored: Counter[tuple[str, str, int]] = Counter()
        self.phase = "forward"
        self.region: str | None = None
        self._scores = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        place = (self.phase, self.region, kind(func, (args, kwargs), output), str(func))
        self.counts[place] += 1
        return output

    @contextlib.contextmanager
    def inside(self, region: str) -> Iterator[None]:
        """Operators of this block belong to `region`; regions called by a region are part of it."""
        before = self.region
        self.region = before or region
        try:
            yield
        finally:
            self.region = before

    def scoped(self, function: Callable, region: str) -> Callable:
        """`function`, whose operators belong to `region`."""

        @functools.wraps(function)
        def call(*args, **kwargs):
            with self.inside(region):
                return function(*args, **kwargs)

        return call

    def scoring(self, function: Callable, called: str) -> Callable:
        """`function` of logits [rows, V], whose outermost calls are counted by their rows."""

        @functools.wraps(function)
        def call(logits, *args, **kwargs):
            if self._scores:
                return function(logits, *args, **kwargs)
            self.scored[self.phase, called, logits.numel() // max(1, logits.shape[-1])] += 1
            self._scores = True
            try:
                return function(logits, *args, **kwargs)
            finally:
                self._scores = False

        return call


def install(engine: str, watched: Callable[[], bool], folder: Path) -> Tally:
    """Tally the passes of `engine` (`rollout` or `trainer`) in this process while `watched()`.

    At the end of every pass the counts so far are written to `operators.<process>.json` and
    `scored.<process>.json` of `folder`. A recording starts afresh when its folder is new.
    """
    tally = Tally()
    module, name = _PASSES[engine]
    owner = getattr(importlib.import_module(module), name)
    for method, phase in _PHASES[engine].items():
        original = getattr(owner, method)
        if not hasattr(original, "tallied"):
            setattr(owner, method, _tallied(original, phase, tally, watched, folder))
    return tally


def _tallied(
    original: Callable, phase: str, tally: Tally, watched: Callable[[], bool], folder: Path
) -> Callable:
    @functools.wraps(original)
    def call(*args, **kwargs):
        if not watched():
            return original(*args, **kwargs)
        path = folder / f"operators.{os.getpid()}.json"
        if not path.exists():
            tally.counts.clear()
            tally.scored.clear()
        tally.phase = phase
        with tally:
            output = original(*args, **kwargs)
        with contextlib.suppress(FileNotFoundError):  # the driver has what it wants
            for name, counts in (("operators", tally.counts), ("scored", tally.scored)):
                found = [[*place, count] for place, count in counts.items()]
                path.with_name(f"{name}.{os.getpid()}.json").write_text(json.dumps(found))
        return output

    call.tallied = True  # type: ignore[attr-defined]
    return call


def load(folder: Path) -> tuple[Operator, ...]:
    """Operators of a recording, those of the rank that has most calls, in a fixed order."""
    ranks = [
        tuple(sorted((Operator(*row) for row in json.loads(path.read_text())), key=_order))
        for path in sorted(folder.glob("operators.*.json"))
    ]
    return max(ranks, key=lambda rank: sum(one.count for one in rank), default=())


def load_scored(folder: Path) -> tuple[Scored, ...]:
    """What a recording counted of `ops.logprob`, on the rank with most calls of it, sorted."""
    ranks = [
        tuple(sorted(Scored(*row) for row in json.loads(path.read_text())))
        for path in sorted(folder.glob("scored.*.json"))
    ]
    return max(ranks, key=lambda rank: sum(one.count for one in rank), default=())


def _order(one: Operator) -> tuple:
    return one.phase, one.region or "", one.kind, one.name
