"""Kernels compiled ahead of a benchmark, where there is no GPU: processes, errors, the parts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("triton")

from samebits.bench import gpu_gdn, gpu_gdn_ahead, gpu_gdn_times
from samebits.bench.gpu_gdn_ahead import Part
from samebits.errors import Different


def note(path: str) -> None:
    Path(path).write_text(os.environ["FLA_CACHE_RESULTS"])


def red() -> None:
    raise Different("SB0440", seen="other bits", required="the same", hint="none")


def gone() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_parts_run_elsewhere_without_recording_choices(tmp_path, monkeypatch):
    monkeypatch.delenv("FLA_CACHE_RESULTS", raising=False)
    found = tmp_path / "note"
    assert gpu_gdn_ahead.failures([Part("note", note, (str(found),))]) == []
    assert found.read_text() == "0"
    assert "FLA_CACHE_RESULTS" not in os.environ


def test_a_part_that_fails_is_named_and_stops_nothing():
    failed = gpu_gdn_ahead.failures([Part("red", red, ())])
    assert len(failed) == 1 and failed[0].startswith("red: Different: ")
    assert gpu_gdn_ahead.failures([Part("gone", gone, ())]) == ["gone: BrokenProcessPool"]


def test_every_gate_and_every_side_has_a_part():
    parts = gpu_gdn_ahead.parts()
    run = {(part.function.__name__, part.arguments) for part in parts}
    assert len(run) == len(parts)
    schedules = ("chunk_row", "cpr")
    assert run == {
        *(("prefills", (heads, side)) for heads in gpu_gdn_times.HEADS for side in (0, 1, 2)),
        *(("decodes", (heads,)) for heads in gpu_gdn_times.HEADS),
        *(("scenario", (*shape, s)) for shape in gpu_gdn.SHAPES for s in schedules),
        *(("gradients", (s,)) for s in schedules),
    }
