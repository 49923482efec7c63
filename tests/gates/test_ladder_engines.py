"""Engines of a ladder start in groups, and nothing starts while a rung is measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from samebits import recipe as recipes
from samebits.gates import ladder_engines
from samebits.gates.ladder_engines import Engines

GIB = 1 << 30


@pytest.fixture
def events(monkeypatch):
    """What became of pairs that compute nothing; `bad` does not start."""
    seen = []

    class Pair:
        def __init__(self, run, arithmetic):
            self.arithmetic = arithmetic
            seen.append(f"start {arithmetic}")

        def ready(self):
            if self.arithmetic == "bad":
                raise RuntimeError("no engine")
            seen.append(f"ready {self.arithmetic}")

        def close(self):
            seen.append(f"close {self.arithmetic}")

    monkeypatch.setattr(ladder_engines, "Pair", Pair)
    return seen


def test_a_group_is_ready_before_its_first_rung_is_measured(events):
    engines = Engines(None, ["a", "b", "c"], 2)
    for name in "abc":
        with engines.of(name) as pair:
            assert pair.arithmetic == name
            events.append(f"measure {name}")
    engines.close()
    assert events == [
        *("start a", "start b", "ready a", "ready b"),
        *("measure a", "close a", "measure b", "close b"),
        *("start c", "ready c", "measure c", "close c"),
    ]


def test_what_started_ends_when_another_does_not_start(events):
    engines = Engines(None, ["a", "bad", "c"], 3)
    with pytest.raises(RuntimeError), engines.of("a"):
        pytest.fail("measured")
    engines.close()
    assert sorted(e for e in events if e.startswith("close")) == ["close a", "close bad", "close c"]


def test_a_failed_measurement_ends_its_engines_and_then_the_others(events):
    engines = Engines(None, ["a", "b"], 2)
    with pytest.raises(ValueError), engines.of("a"):
        raise ValueError
    engines.close()
    assert events[-2:] == ["close a", "close b"]


def test_a_gpu_holds_as_many_rungs_as_fit(monkeypatch):
    case = recipes.load("smollm2-135m-h200")
    each = ladder_engines.rung_bytes(case)
    config, engine = case.config, case.engine
    pages = (
        engine["kv_blocks"] * engine["block_size"] * 30 * 2 * config["num_key_value_heads"] * 128
    )
    assert each > 12 * GIB + pages
    for free, count in ((0, 1), (each / 0.75 * 2.5, 2), (each * 100, 4)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (int(free), 0))
        assert ladder_engines.together(case) == count
    assert ladder_engines.together(SimpleNamespace(platform="cpu")) == 1
