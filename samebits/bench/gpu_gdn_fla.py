"""What the benchmarks of Gated DeltaNet are compared with: flash-linear-attention, and FlashQLA
where it is at hand; part of `samebits.bench.gpu`.

Both must be importable on the GPU's host, from a folder that `scripts/peers.sh` fills; rows have
their versions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from samebits.bench import gpu_timing

FLASH_QLA = "FlashQLA"
# flash-linear-attention hands calls on to these where they are installed; its rows are its own.
_HANDED_ON = {"FLA_FLASH_QLA": "0", "FLA_TILELANG": "0"}
# Milliseconds of Triton's measurement of one variant: its 25 and 100 would be minutes in all.
WARM_UP, MEASURED = 5, 25


def row(work: str, ours: float, name: str, time: float, target: float | None) -> gpu_timing.Row:
    """`gpu_timing.row`, with the version of the other side where it is installed."""
    found = gpu_timing.row(work, ours, name, time, target)
    package = "flash-qla" if name == FLASH_QLA else "fla-core"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["against"]["version"] = importlib.metadata.version(package)
    return found


@functools.cache
def chunk() -> Callable[..., Any]:
    """flash-linear-attention's chunk form in Triton, forward and backward.

    It refuses its gated backward on Hopper before Triton 3.7.1, as some variants are wrong there.
    Here the refusal is lifted: a time counts only beside gradients that were held against float64
    with the variants that are timed.
    """
    os.environ.update(_HANDED_ON)
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    assert hasattr(chunk_o, "TRITON_ABOVE_3_7_1"), "the refusal is somewhere else"
    chunk_o.TRITON_ABOVE_3_7_1 = True
    return chunk_gated_delta_rule


@functools.cache
def recurrent() -> Callable[..., Any]:
    """flash-linear-attention's recurrence, all of a step in one kernel."""
    os.environ.update(_HANDED_ON)
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return fused_recurrent_gated_delta_rule


def flash_qla_at_hand() -> bool:
    """Whether FlashQLA can be imported."""
    return importlib.util.find_spec("flash_qla") is not None


def flash_qla() -> Callable[..., Any]:
    """FlashQLA's chunk form, with the operands of flash-linear-attention's."""
    from flash_qla import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def tune_briefly() -> None:
    """From here on Triton measures a variant for `MEASURED` milliseconds: dozens of runs of it.

    The choice is made by the process that takes the times, while nothing else uses the GPU.
    """
    from triton import testing

    _measure_by(functools.partial(testing.do_bench, warmup=WARM_UP, rep=MEASURED))


def compile_share(index: int, count: int) -> None:
    """From here on every tuned kernel compiles each `count`-th of its variants, and measures none.

    For processes that compile ahead side by side. What one of them chose it keeps; nothing that
    counts is chosen here.
    """
    from triton.runtime.autotuner import Autotuner

    whole = _pruning()

    def share(self: Any, kwargs: Any) -> list[Any]:
        variants = whole(self, kwargs)
        return variants[index::count] or variants[:1]

    Autotuner.prune_configs = share
    _measure_by(_once)


@functools.cache
def _pruning() -> Callable[..., list[Any]]:
    """Triton's own, which `compile_share` replaces."""
    from triton.runtime.autotuner import Autotuner

    return Autotuner.prune_configs


def _once(call: Callable[[], object], quantiles: tuple[float, ...]) -> list[float]:
    call()
    return [0.0] * len(quantiles)


def _measure_by(measure: Callable[..., Any]) -> None:
    from triton.runtime.autotuner import Autotuner

    Autotuner.do_bench = property(lambda self: measure)
