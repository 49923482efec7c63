"""A run is resumable, alone in its checkout, and leaves no process behind when interrupted."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from samebits import recipe as recipes
from samebits.contract import Contract
from samebits.errors import Refused
from samebits.gates import lanes, prove, stages
from samebits.gates import run as runs
from samebits.gates.prove import locked_run
from samebits.gates.run import Run, Stage
from samebits.gates.sizes import Size
from samebits.gates.streams import Stream, compare
from samebits.patching.workspace import Workspace


@pytest.fixture
def run(tmp_path) -> Run:
    made = Run.__new__(Run)
    made.folder = tmp_path
    return made


def _work(calls: list[str]) -> Stage:
    calls.append("ran")
    stream = Stream()
    stream.add(0, 1, [4, 5], np.array([1, 2], np.uint32))
    return Stage({"decode": stream}, {"fired": 3})


def test_a_finished_stage_is_loaded_and_not_run_again(run):
    calls: list[str] = []
    first = run.stage("one", lambda: _work(calls))
    again = run.stage("one", lambda: _work(calls))
    assert calls == ["ran"]
    assert again.facts["fired"] == 3 and "_streams" not in again.facts
    assert compare(first.streams["decode"], again.streams["decode"]).tokens == 2


def test_a_stage_without_its_record_runs_again(run):
    calls: list[str] = []
    run.stage("one", lambda: _work(calls))
    (run.folder / "one.json").rename(run.folder / "one.part")  # interrupted before the last step
    run.stage("one", lambda: _work(calls))
    assert calls == ["ran", "ran"]


def test_a_failed_stage_leaves_no_record_and_is_named(run, capsys):
    def fail() -> Stage:
        raise Refused("SB0512", seen="gone", required="an engine", hint="samebits doctor")

    with pytest.raises(Refused):
        run.stage("one", fail)
    assert list(run.folder.iterdir()) == []
    said = capsys.readouterr().err
    assert "one: ended by SB0512" in said and "finished stages are kept" in said


def test_a_stage_that_is_stopped_is_not_called_a_failure(run, capsys):
    """Its engine is interrupted because another stage failed."""
    begun = threading.Event()

    def fail() -> Stage:
        begun.wait(10)
        raise Refused("SB0609", seen="late", required="an answer", hint="samebits doctor")

    def wait() -> Stage:
        process = subprocess.Popen(["sleep", "60"])
        begun.set()
        process.wait()
        raise Refused("SB0512", seen="gone", required="an engine", hint="samebits doctor")

    works = [
        lanes.Task(n, functools.partial(run.stage, n, w))
        for n, w in (("bad", fail), ("other", wait))
    ]
    with pytest.raises(Refused, match="SB0609"):
        list(lanes.run(works))
    said = capsys.readouterr().err
    assert "bad: ended by SB0609" in said and "other: stopped after" in said
    assert not runs.stopping.is_set()


def test_two_runs_of_one_case_are_refused(tmp_path, monkeypatch):
    from samebits.gates import prove

    workspace = Workspace(tmp_path)
    (tmp_path / "cases").symlink_to(recipes.cases_folder())
    monkeypatch.setattr(Workspace, "find", classmethod(lambda cls: workspace))
    monkeypatch.setattr(prove, "open_run", lambda case, size: types.SimpleNamespace(size=size))
    with locked_run("qwen3-tiny", Size()) as first:
        assert first.size.requests == 28
        with (
            pytest.raises(Refused, match="SB0108") as error,
            locked_run("qwen3-tiny", Size.quick()),
        ):
            pass
        assert "build/locks/run-qwen3-tiny.lock" in error.value.seen
        with locked_run("smollm2-135m", Size()):  # another case works on other files
            pass
    with locked_run("qwen3-tiny", Size.quick()) as second:
        assert second.size.requests == 18


def test_a_recipe_decides_the_size_of_its_recorded_run_only():
    dense, hybrid = (recipes.load(case) for case in ("qwen3-tiny", "qwen3.5-tiny"))
    assert "run" not in dense.data and Size.of(dense, quick=False, record=True) == Size.full()
    sized = Size.of(hybrid, quick=False, record=True)
    assert sized.flag == " --record"
    assert {name: getattr(sized, name) for name in hybrid.run} == dict(hybrid.run)
    assert Size.of(dense, quick=True, record=False) == Size.quick()
    assert Size.of(hybrid, quick=True, record=False).flag == " --quick"
    assert Size.of(hybrid, quick=False, record=False) == Size()


def test_the_size_of_a_run_reaches_the_stress_engine():
    recipe = recipes.load("smollm2-135m-h200")
    size = Size.of(recipe, quick=False, record=True)
    sizes = {k: v for k, v in asdict(size).items() if isinstance(v, int)}
    full = SimpleNamespace(recipe=recipe, options=sizes)
    assert stages.stress(full) == {
        "max_num_batched_tokens": recipe.run["stress_tokens"],
        "max_num_seqs": recipe.run["stress_seqs"],
        "kv_blocks": recipe.run["stress_blocks"],
    }


@pytest.mark.parametrize("case", ["smollm2-135m", "smollm2-135m-h200"])
def test_the_longest_sequence_fits_in_the_pages_of_the_stress_engine(case):
    recipe = recipes.load(case)
    pages = stages.stress(SimpleNamespace(recipe=recipe, options={}))["kv_blocks"]
    assert pages * recipe.engine["block_size"] >= recipe.engine["max_model_len"]
    quick = Size.of(recipe, quick=True, record=False)
    assert quick.flag == " --quick" and quick.stress_blocks is None


# `samebits prove` with the engines' interpreter replaced by one that never answers: everything
# from the command line to the processes' ends is real.
_PROGRAM = """
import sys
from pathlib import Path
from samebits import cli
from samebits.engines.rollout import RolloutEngine, RolloutSettings
from samebits.engines.trainer_process import TrainerProcess
from samebits.gates import lanes, prove, run
from samebits.gates.streams import Stream
from samebits.patching.workspace import Workspace

root, idle, second = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
workspace = Workspace(root)

def open_run(case, size):
    made = run.Run.__new__(run.Run)
    made.folder, made.workspace = root, workspace
    return made

def start_engine():
    sys.executable = idle
    if second == "trainer":
        TrainerProcess(root, contract=None)
    else:
        RolloutEngine(RolloutSettings(root, root / "contract.json", "series"))

def all_stages(made, size):
    first = lambda: made.stage("first", lambda: run.Stage({"decode": Stream()}, {}))
    tasks = [lanes.Task("first", first)]
    if second != "none":
        tasks.append(lanes.Task("second", lambda: made.stage("second", start_engine), ("first",)))
    list(lanes.run(tasks))
    raise SystemExit(7)

Workspace.find = classmethod(lambda cls: workspace)
RolloutSettings.environment = lambda self: {"PATH": "/usr/bin:/bin"}
prove.open_run, prove._stages = open_run, all_stages
sys.exit(cli.run(["prove", "qwen3-tiny"]))
"""


def _alive(marker: str) -> list[str]:
    """Processes whose command line names `marker`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marker in command and state != "Z":
            found.append(command)
    return found


def _wait_for(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize(("engine", "processes"), [("rollout", 2), ("trainer", 1)])
def test_an_interrupted_run_ends_its_processes_and_resumes(tmp_path, engine, processes):
    idle, child = tmp_path / "idle-engine", f"{tmp_path}/idle-child"
    # As vLLM's front end does, that of the rollout has a child of its own.
    idle.write_text(f'#!/bin/sh\ncase "$2" in *rollout*) sh {child} & esac\nexec sh {child}\n')
    (tmp_path / "idle-child").write_text("sleep 600\n")
    idle.chmod(0o755)
    (tmp_path / "program.py").write_text(_PROGRAM)
    log = tmp_path / "log"

    (tmp_path / "cases").symlink_to(recipes.cases_folder())

    def start(second: str) -> subprocess.Popen:
        command = [sys.executable, tmp_path / "program.py", tmp_path, idle, second]
        with log.open("w") as file:
            return subprocess.Popen(command, stderr=file, start_new_session=True)

    process = start(engine)
    assert _wait_for(lambda: len(_alive(child)) == processes, 90), log.read_text()
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
    assert process.wait(90) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    assert _wait_for(lambda: not _alive(child), 5), _alive(child)
    assert (tmp_path / "first.json").exists() and not (tmp_path / "second.json").exists()

    start("none").wait(90)
    assert "first: finished earlier, reused" in log.read_text()


def test_changed_prompts_start_a_run_afresh(tmp_path):
    recipe = recipes.load("qwen3-tiny")
    contract = Contract.load(recipe.contract_path)
    (tmp_path / "recipe.yaml").write_text(recipe.path.read_text())
    mine = recipes.load(tmp_path / "recipe.yaml")
    keys = set()
    for prompts in ("one\n", "two\n"):
        (tmp_path / "prompts.jsonl").write_text(prompts)
        made = Run(mine, contract, tmp_path, {})
        keys.add(made.folder.name)
        assert "prompts.jsonl" in made.dependencies
    assert len(keys) == 2


def test_a_change_of_the_engines_starts_a_run_afresh(tmp_path, monkeypatch):
    recipe = recipes.load("qwen3-tiny")
    contract = Contract.load(recipe.contract_path)
    monkeypatch.setattr(runs.current, "trees", lambda _: {})
    monkeypatch.setattr(runs.Workspace, "find", lambda: types.SimpleNamespace(build=tmp_path))
    hashed: list[str] = []

    def source_hash(modules):
        hashed.extend(modules)
        return str(len(hashed))

    monkeypatch.setattr(runs, "source_hash", source_hash)
    folders = {Run(recipe, contract, tmp_path, {}).folder for _ in range(2)}
    assert len(folders) == 2  # what was hashed is part of the name
    engines = {"rollout", "rollout_server", "trainer", "trainer_worker"}
    assert {f"samebits.engines.{name}" for name in engines} <= set(hashed)
    assert {"samebits.weights.transport", "samebits.faults", "samebits.gates.rl"} <= set(hashed)


@pytest.mark.parametrize(
    "name, size", [("rl_stock", "stock_rl_prompts"), ("rl_aligned", "prompts")]
)
def test_a_step_whose_refit_moved_nothing_is_told(run, capsys, name, size):
    """A control has no gradient on record for its last step."""
    run.flag = " --record"
    steps = [{"step": 1, "grad_norm": 0.0}, {"step": 2, "grad_norm": 0.5}, {"step": 3}]
    prove._tell_unmoved(run, name, Stage({}, {"steps": steps}))
    said = capsys.readouterr().err
    assert f"{name}: all rewards of step 1 were alike" in said and size in said
    prove._tell_unmoved(run, name, Stage({}, {"steps": steps[1:]}))
    assert capsys.readouterr().err == ""
