"""Times on a GPU: both sides inside CUDA graphs, replayed in turns, medians; rows of a table."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from samebits import env

Row = dict[str, Any]
Calls = Sequence[Callable[[], object]]


def captured(calls: Calls) -> torch.cuda.CUDAGraph:
    """One graph of all calls, each run once before, outside of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and creates library handles
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replayed(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What a second replay of a CUDA graph of one call leaves; the first result is wiped out."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    graph.replay()
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return y.clone()


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def medians(sides: Sequence[Calls]) -> list[float]:
    """Microseconds of one call, for each list of calls; replays in turns."""
    graphs = [captured(calls) for calls in sides]
    repeats = 7 if _replay(graphs[0]) > 2e4 else 21
    for graph in graphs:
        _replay(graph)
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for graph, found in zip(graphs, times, strict=True):
            found.append(_replay(graph))
    return [statistics.median(t) / len(c) for t, c in zip(times, sides, strict=True)]


def row(work: str, ours: float, name: str, time: float, target: float | None) -> Row:
    """A row in the form of `samebits.bench.run`; times in microseconds."""
    ratio = round(ours / time, 3)
    return {
        "work": work,
        "ours": round(ours, 1),
        "against": {"name": name, "time": round(time, 1)},
        "ratio": ratio,
        "unit": "us",
        "target": target,
        "met": None if target is None else ratio <= target,
        "hardware": env.chip(),
        "date": datetime.date.today().isoformat(),
    }
