"""Compiles what the gates and times of Gated DeltaNet launch, in processes side by side.

One process compiles a kernel after the other for many minutes. Here parts of the same work run in
processes of their own, whose results are thrown away; what they compiled stays in Triton's cache on
disk. A part that fails only costs time: the run after it compiles for itself, and meets the error.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from samebits.bench import gpu_gdn, gpu_gdn_fla, gpu_gdn_times
from samebits.bench.gpu_gates import Tally
from samebits.bench.gpu_timing import Calls
from samebits.ops import gdn, gpu


@dataclass(frozen=True)
class Part:
    """One call, importable by another process."""

    name: str
    function: Callable[..., object]
    arguments: tuple[Any, ...]


def gates() -> Iterator[str]:
    """`gpu_gdn.gates` on a full cache; the first line says what filled it."""
    yield from compiled("gdn", parts())
    yield from gpu_gdn.gates()


def compiled(area: str, parts: Sequence[Part]) -> Iterator[str]:
    """Run parts; one line for all, and one for each that failed."""
    start = time.monotonic()
    failed = failures(parts)
    seconds = time.monotonic() - start
    yield f"{area}, compiled ahead: {len(parts) - len(failed)} parts in {seconds:.0f} s"
    yield from (f"{area}, NOT compiled ahead: {line}" for line in failed)


def parts() -> list[Part]:
    """All that is launched, long parts first."""
    each = range(1 + len(gdn.SCHEDULES) + gpu_gdn_fla.flash_qla_at_hand())
    found = [
        Part(f"prefill {heads} heads, side {side}", prefills, (heads, side))
        for side in each
        for heads in gpu_gdn_times.HEADS
    ]
    for schedule in gdn.SCHEDULES:
        for shape in gpu_gdn.SHAPES:
            found.append(Part(f"gate {schedule} {shape}", scenario, (*shape, schedule)))
        found.append(Part(f"gradients {schedule}", gradients, (schedule,)))
    found += [Part(f"decode {heads} heads", decodes, (heads,)) for heads in gpu_gdn_times.HEADS]
    return found


def failures(parts: Sequence[Part]) -> list[str]:
    """Run parts in processes; one line for each that failed."""
    workers = min(len(parts), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_prepare
    ) as pool:
        futures = [pool.submit(_attempt, part) for part in parts]
        ended = [_ended(part, future) for part, future in zip(parts, futures, strict=True)]
    return [line for line in ended if line]


def _prepare() -> None:
    # Choices among variants, timed while others use the GPU, must not reach the run after.
    os.environ["FLA_CACHE_RESULTS"] = "0"


def _attempt(part: Part) -> str:
    """Errors as text: not every one survives the way between processes."""
    try:
        part.function(*part.arguments)
    except Exception as error:
        return f"{part.name}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def _ended(part: Part, future: Future[str]) -> str:
    try:
        return future.result()
    except Exception as error:  # the process is gone
        return f"{part.name}: {type(error).__name__}"


def prefills(heads: int, side: int) -> None:
    """One side of the timed prefills."""
    gpu.prepare(0)
    for count, length in gpu_gdn_times.PREFILLS:
        launch([gpu_gdn_times.prefill_sides(heads, count, length)[side]])


def decodes(heads: int) -> None:
    """All sides of the timed decode steps."""
    gpu.prepare(0)
    for count in gpu_gdn_times.DECODES:
        launch(gpu_gdn_times.decode_sides(heads, count))


def scenario(key_heads: int, heads: int, schedule: str) -> None:
    """One scenario of the gate: others launch the same."""
    gpu.prepare(0)
    gpu_gdn.gate_scenario(Tally("ahead"), "n", key_heads, heads, schedule)


def gradients(schedule: str) -> None:
    """The gate of the gradients."""
    gpu.prepare(0)
    gpu_gdn.gate_gradients(schedule)


def launch(sides: Sequence[Calls]) -> None:
    """Every call once."""
    for calls in sides:
        for call in calls:
            call()
    torch.cuda.synchronize()
