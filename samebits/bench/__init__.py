"""Benchmarks: one module per operator with `rows()`; a red bit gate prints nothing."""

from __future__ import annotations

import datetime
import importlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samebits import files
from samebits.errors import NotObserved, Refused, word
from samebits.patching.workspace import Workspace

NAMES = ("gemm", "attention", "rms_norm", "rotary", "silu_mul", "logprob", "rollout")
# Needs a GPU and the name of a case; its rows are recorded beside those of `samebits.bench.gpu`.
ON_GPU = "engines"
_OF_CASES = ("rollout", ON_GPU)


def _file(names: Sequence[str] = ()) -> Path:
    """Where rows of these benchmarks are recorded."""
    from samebits.recipe import cases_folder

    return cases_folder() / ("bench-h200.json" if ON_GPU in names else "bench.json")


def run(
    names: list[str],
    case: str | None = None,
    arms: Sequence[str] = (),
    fast: bool = False,
) -> list[dict[str, Any]]:
    """Rows of the named benchmarks (all by default), with hardware, date and whether met.

    `case` times the whole engines of that case: only `rollout` (on a CPU) and `engines` (on a GPU)
    have one, and `engines` needs one. `arms` and `fast` are a choice among the configurations of
    `engines` (`engine_choice.Choice`).
    """
    known = (*NAMES, ON_GPU)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise Refused(
            "SB0909",
            seen=f"benchmark {', '.join(unknown)}",
            required=f"one of {', '.join(known)}",
            hint="samebits bench run --help",
        )
    if case is not None and (len(names) != 1 or names[0] not in _OF_CASES):
        raise Refused(
            "SB0909",
            seen=f"--case {case} with {', '.join(names) or 'all benchmarks'}",
            required="one of the benchmarks rollout and engines, which time the engines of a case",
            hint=f"samebits bench run rollout --case {word(case)}",
        )
    if case is None and ON_GPU in names:
        raise Refused(
            "SB0909",
            seen=f"{ON_GPU} without --case",
            required="the case whose engines are timed",
            hint="samebits case list",
        )
    chosen: tuple[Any, ...] = () if case is None else (case,)
    if arms or fast:
        if ON_GPU not in names:
            raise Refused(
                "SB0909",
                seen=f"--arm or --fast with {', '.join(names) or 'all benchmarks'}",
                required=f"{ON_GPU}, which has configurations to choose among",
                hint="samebits bench run --help",
            )
        from samebits.bench.engine_choice import Choice

        chosen = (case, Choice(tuple(arms), fast))
    from samebits import env

    rows = []
    for name in names or NAMES:
        module = importlib.import_module(f"samebits.bench.{name}")
        for row in module.rows(*chosen):
            target = row["target"]
            rows.append(
                {
                    **row,
                    "met": None if target is None else row["ratio"] <= target,
                    "hardware": env.chip(),
                    "date": datetime.date.today().isoformat(),
                }
            )
    return rows


def refuse_read_only() -> None:
    """Refuse, before anything is timed, where rows could not be recorded."""
    with Workspace.find().writing(), tempfile.TemporaryFile(dir=_file().parent):
        pass


def record(rows: list[dict[str, Any]], names: Sequence[str] = ()) -> None:
    """Replace recorded rows of the same (work, hardware), keep the others."""
    path = _file(names)

    def key(row: dict[str, Any]) -> tuple[str, str]:
        return row["work"], row["hardware"]

    again = {key(row) for row in rows}
    old = json.loads(path.read_text()) if path.exists() else []
    kept = [row for row in old if key(row) not in again]
    files.write_atomic(path, (json.dumps(kept + rows, indent=1) + "\n").encode())


def recorded() -> list[dict[str, Any]]:
    """The rows of every `cases/bench*.json`; NotObserved SB0910 where nothing was recorded.

    `bench.json` is of engines and operators on CPUs; `samebits.bench.gpu` writes a file of its own.
    """
    paths = sorted(_file().parent.glob("bench*.json"))
    if not paths:
        raise NotObserved(
            "SB0910",
            seen="no cases/bench*.json",
            required="recorded rows",
            hint="samebits bench run --record",
        )
    return [row for path in paths for row in json.loads(path.read_text())]


def beside(row: dict[str, Any]) -> str:
    """What a row compares with, and its time or why there is none."""
    against = row["against"]
    if "not_measured" in against:
        return f"{against['name']}: not measured, {against['not_measured']}"
    return f"{against['name']}: {against['time']:,}"


def ratio(row: dict[str, Any]) -> str:
    """A row's ratio for a table; - where the other side was not measured."""
    return "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
