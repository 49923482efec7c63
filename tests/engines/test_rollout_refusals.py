"""vLLM's front end: what nobody has proved does not run, and a seed is a row's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from rollout_settings import ENGINES, REQUESTS
from trainer_support import QWEN3, make_case

from samebits.engines.rollout import RolloutSettings
from samebits.patching import tree_path

pytestmark = pytest.mark.engine

EXPECTED = {
    "plain": None,
    "two ranks": None,
    "four ranks": "SB0316",
    "pipeline": "SB0507",
    "dtype": "SB0503",
    "kv cache dtype": "SB0503",
    "lora": "SB0504",
    "speculation": "SB0504",
    "processed logprobs": "SB0505",
    "compiled": "SB0506",
    "architecture": "SB0501",
    "bias": "SB0501",
    "scaled rope": "SB0501",
    "another model": "SB0311",
    "quantization": "SB0503",
    "request: sampled": None,
    "request: scored": None,
    "request: no seed": "SB0510",
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("refusals"), "qwen3", QWEN3)


def _run(case, **changes: str) -> dict[str, str | None]:
    model, contract = case
    settings = RolloutSettings(model=model, contract=contract, series="qwen3-tiny")
    script = Path(__file__).with_name("rollout_settings.py")
    done = subprocess.run(
        [sys.executable, str(script), str(model)],
        env=settings.environment() | changes,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(case):
    return _run(case)


def test_unproved_settings_are_refused_by_id(found):
    requests = [f"request: {name}" for name in REQUESTS]
    wanted = {name: EXPECTED.get(name, "SB0509") for name in [*ENGINES, "quantization", *requests]}
    assert {name: value for name, value in found.items() if name != "draws"} == wanted


def test_a_seeded_row_draws_alone_in_a_mixed_batch(found):
    assert len(set(found["draws"])) == 1


def test_runner_v2_is_refused_and_the_control_runs_what_it_is_given(case):
    assert _run(case, VLLM_USE_V2_MODEL_RUNNER="1")["plain"] == "SB0502"
    assert _run(case, SAMEBITS_ARITHMETIC="stock")["request: top-p"] is None


def test_an_unpatched_tree_is_refused(case, tmp_path):
    tree = tree_path("vllm", "qwen3-tiny")
    archive = tmp_path / "upstream.tar"
    root = subprocess.check_output(
        ["git", "-C", tree, "rev-list", "--max-parents=0", "HEAD"], text=True
    ).strip()
    subprocess.check_call(["git", "-C", tree, "archive", f"--output={archive}", root, "vllm"])
    with tarfile.open(archive) as upstream:
        upstream.extractall(tmp_path, filter="data")
    assert _run(case, PYTHONPATH=str(tmp_path))["plain"] == "SB0513"


def test_the_callers_environment_neither_reaches_in_nor_changes(case, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("SAMEBITS_FAULT", "k_cut_by_rows")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    before = dict(os.environ)
    settings = RolloutSettings(model=case[0], contract=case[1], series="qwen3-tiny")
    inside = settings.environment()
    assert "VLLM_BATCH_INVARIANT" not in inside and "SAMEBITS_FAULT" not in inside
    assert "/nowhere" not in inside["PYTHONPATH"]
    assert dict(os.environ) == before
