"""Timing and the gate of a benchmark row, shared by `samebits/bench/X.py`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from samebits import bits
from samebits.errors import Different


def require_bits(what: str, ours: torch.Tensor, law: torch.Tensor) -> None:
    """A benchmark prints nothing while its gate is red: SB0440 unless the bits are equal."""
    found = bits.compare(ours, law)
    if not found.equal:
        raise Different(
            "SB0440",
            seen=f"{what}: {found.mismatches} of {found.elements} differ, first {found.first}",
            required="the bits of the reference",
            hint="python -m pytest tests/ops",
        )


def row(
    work: str,
    ours: Callable[[], object],
    against: Callable[[], object],
    name: str,
    target: float | None = None,
    repeats: int = 30,
) -> dict:
    """Time both in turns; microseconds, the least of `repeats` each (a shared machine only adds).

    `against` becomes {name, time}; ratio is ours / against, so below 1 is faster; `target` is the
    largest ratio allowed, None where the row is for information.
    """
    best = [float("inf"), float("inf")]
    with torch.no_grad():
        for _ in range(repeats + 1):  # the first round warms caches and compilers
            for i, call in enumerate((ours, against)):
                start = time.perf_counter()
                call()
                best[i] = min(best[i], (time.perf_counter() - start) * 1e6)
    return {
        "work": work,
        "ours": round(best[0], 1),
        "against": {"name": name, "time": round(best[1], 1)},
        "ratio": round(best[0] / best[1], 3),
        "unit": "us",
        "target": target,
    }
