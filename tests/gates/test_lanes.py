"""Stages that run side by side: order, CPUs, failure."""

import os
import subprocess
import sys
import threading
import time

import pytest

from samebits import recipe as recipes
from samebits.gates import lanes
from samebits.gates.lanes import Task

CPUS = frozenset(os.sched_getaffinity(0))
pair = pytest.mark.skipif(len(CPUS) < 2, reason="two lanes need two CPUs")


def _mask() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


@pair
def test_two_tasks_meet_each_on_its_own_cpus():
    meet = threading.Barrier(2, timeout=10)

    def work():
        meet.wait()
        return _mask()

    found = dict(lanes.run([Task("a", work), Task("b", work)]))
    assert not found["a"] & found["b"] and found["a"] | found["b"] <= CPUS
    assert _mask() == CPUS  # the caller keeps its own


def test_as_many_run_as_there_are_lanes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    meet = threading.Barrier(3, timeout=10)
    tasks = [Task(name, meet.wait) for name in "abc"]
    assert {name for name, _ in lanes.run(tasks, 3)} == set("abc")


def test_a_gpu_host_runs_more_stages_of_a_small_case(monkeypatch):
    def most(case, cpus):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
        return lanes.most(recipes.load(case))

    assert most("smollm2-135m-h200", 16) == lanes.MANY > lanes.LANES
    assert most("smollm2-135m-h200", 8) == lanes.LANES
    assert most("smollm2-135m", 16) == lanes.LANES
    assert most("qwen3.5-9b-h200", 16) == lanes.LANES


def test_a_task_starts_after_what_it_reads_was_consumed():
    done: dict[str, int] = {}
    tasks = [
        Task("sum", lambda: done["a"] + done["b"], after=("a", "b")),
        Task("a", lambda: 1),
        Task("b", lambda: 2),
    ]
    for name, result in lanes.run(tasks):
        done[name] = result
    assert done == {"a": 1, "b": 2, "sum": 3}


def test_never_more_than_two_run_and_one_that_wants_all_cpus_runs_alone():
    running: set[str] = set()
    seen: list[tuple[frozenset[str], frozenset[int]]] = []

    def work(name):
        running.add(name)
        time.sleep(0.05)
        seen.append((frozenset(running), _mask()))
        running.remove(name)

    names = ["a", "b", "c", "d", "wide"]
    tasks = [Task(n, lambda n=n: work(n), alone=n == "wide") for n in names]
    assert {name for name, _ in lanes.run(tasks)} == set(names)
    assert max(len(together) for together, _ in seen) <= lanes.LANES
    assert (frozenset({"wide"}), CPUS) in seen


@pair
def test_a_failure_ends_the_engines_of_the_other_tasks_and_starts_nothing_more():
    started = threading.Event()
    ran: list[str] = []

    def engine():
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        started.set()
        ran.append(f"ended {process.wait() != 0}")

    def fail():
        started.wait(10)
        raise ValueError("no")

    tasks = [Task("engine", engine), Task("fail", fail), Task("late", lambda: ran.append("late"))]
    begun = time.monotonic()
    with pytest.raises(ValueError, match="no"):
        list(lanes.run(tasks))
    assert ran == ["ended True"] and time.monotonic() - begun < 30


@pair
def test_a_consumer_that_stops_ends_what_runs():
    ended = threading.Event()

    def engine():
        subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"])
        ended.set()

    with pytest.raises(ZeroDivisionError):
        for _ in lanes.run([Task("engine", engine), Task("quick", lambda: None)]):
            raise ZeroDivisionError
    assert ended.wait(30)


def test_a_long_task_is_named_from_time_to_time(monkeypatch, capsys):
    monkeypatch.setattr(lanes, "_QUIET", 0.05)
    list(lanes.run([Task("slow", lambda: time.sleep(0.3))]))
    assert "still running: slow for 0:00" in capsys.readouterr().err


@pair
def test_one_that_wants_to_be_alone_goes_first_where_it_is_first():
    order: list[str] = []
    names = ["wide", "a", "b", "c"]
    tasks = [Task(n, lambda n=n: order.append(n), alone=n == "wide") for n in names]
    assert {name for name, _ in lanes.run(tasks)} == set(names)
    assert order[0] == "wide"
