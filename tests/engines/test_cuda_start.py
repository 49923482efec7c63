"""What vLLM is started with on a GPU, as far as a host without one can show it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_support import QWEN2, QWEN3, make_case

from samebits.engines.rollout import RolloutSettings
from samebits.errors import Refused
from samebits.hooks.vllm import cuda, plugin

CUDA = "samebits.hooks.vllm.cuda.platform.CudaPlatform"


@pytest.fixture
def process(monkeypatch):
    """Sets the environment of a case's process, and whether there is a GPU."""

    def of(gpu: bool, **environment: str) -> None:
        for name in ("SAMEBITS_CONTRACT", "SAMEBITS_ARITHMETIC", "SAMEBITS_PLATFORM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(f"SAMEBITS_{name}", value)
        monkeypatch.setattr(plugin, "_accelerator_present", lambda: gpu)

    return of


@pytest.mark.parametrize("gpu", [False, True])
def test_a_case_of_a_gpu_names_its_platform_wherever_it_runs(process, gpu):
    process(gpu, CONTRACT="contract.json", PLATFORM="sm90")
    assert plugin.platform() == CUDA
    process(gpu, ARITHMETIC="stock", PLATFORM="sm90")
    assert plugin.platform() == CUDA


def test_vllm_is_left_alone_without_a_case_and_beside_a_gpu(process):
    process(True)
    assert plugin.platform() is None
    process(True, PLATFORM="sm90")
    assert plugin.platform() is None
    process(True, CONTRACT="contract.json")
    assert plugin.platform() is None


def test_a_tree_without_compiled_extensions_is_refused_by_name(tmp_path):
    flash = tmp_path / "vllm_flash_attn"
    flash.mkdir()
    for present, missing in (
        ((), ["_C_stable_libtorch", "_vllm_fa3_C"]),
        (("_C_stable_libtorch.abi3.so",), ["_vllm_fa3_C"]),
        (("_C_stable_libtorch.abi3.so", "vllm_flash_attn/_vllm_fa2_C.abi3.so"), []),
    ):
        for name in present:
            (tmp_path / name).touch()
        if not missing:
            cuda.require_extensions(tmp_path)
            continue
        with pytest.raises(Refused) as refusal:
            cuda.require_extensions(tmp_path)
        assert refusal.value.error_id == "SB0519"
        assert all(name in refusal.value.seen for name in missing)
        assert ("_C_stable_libtorch" in refusal.value.seen) == (len(missing) == 2)


@pytest.mark.engine
def test_a_host_without_a_gpu_is_refused_before_vllm_chooses(tmp_path):
    """vLLM swallows what a platform plugin raises; the refusal has to come through all the same."""
    model, contract = make_case(tmp_path, "qwen3", QWEN3)
    settings = RolloutSettings(model=model, contract=contract, series="qwen3-tiny", platform="sm90")
    code = (
        "from samebits.errors import Refused\n"
        "try:\n"
        "    import vllm.platforms\n"
        "    vllm.platforms.current_platform\n"
        "except Refused as error:\n"
        "    print(error.error_id)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=settings.environment() | {"CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["SB0451"], done.stderr[-2000:]


def test_processes_on_a_gpu_are_spawned(tmp_path):
    settings = RolloutSettings(model=tmp_path, contract=tmp_path / "c.json", series="qwen3-tiny")
    on_gpu = dataclasses.replace(settings, platform="sm90").environment()
    assert on_gpu["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert on_gpu["SAMEBITS_PLATFORM"] == "sm90"
    assert settings.environment()["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


# What `cuda.config.check` is asked about -> the id that it answers with.
SETTINGS = {
    "eager": ({}, None),
    "decode graphs": ({"cudagraph_mode": "FULL_DECODE_ONLY"}, None),
    "graphs of mixed steps": ({"cudagraph_mode": "FULL"}, "SB0506"),
    "piecewise graphs": ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, "SB0506"),
    "async": ({"async_scheduling": True}, "SB0504"),
    "async, stock": ({"async_scheduling": True, "arithmetic": "stock"}, "SB0504"),
    "graphs of mixed steps, stock": ({"cudagraph_mode": "FULL", "arithmetic": "stock"}, None),
    "microbatches": ({"use_ubatching": True}, "SB0504"),
    "pages of 8": ({"block_size": 8}, "SB0414"),
    "heads of 80": ({"head_size": 80}, "SB0414"),
    "another chip": ({"capability": [8, 0]}, "SB0451"),
    "no chip": ({"capability": None}, "SB0451"),
    "hybrid": ({"architecture": "Qwen3_5ForCausalLM", "block_size": 960, "head_size": 256}, None),
    "hybrid, pages of no part": (
        {"architecture": "Qwen3_5ForCausalLM", "block_size": 24, "head_size": 256},
        "SB0414",
    ),
    "traced graphs": ({"cudagraph_mode": "FULL_DECODE_ONLY", "trace": "1"}, "SB0506"),
}


@pytest.mark.engine
def test_unproved_settings_on_a_gpu_are_refused_by_id(tmp_path):
    model, contract = make_case(tmp_path, "qwen3", QWEN3)
    settings = RolloutSettings(model=model, contract=contract, series="qwen3-tiny")
    script = Path(__file__).with_name("cuda_settings.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps({k: v for k, (v, _) in SETTINGS.items()})],
        env=settings.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {name: expected for name, (_, expected) in SETTINGS.items()}


@pytest.mark.engine
def test_tables_of_decode_steps_stay_where_a_graph_reads_them(tmp_path):
    model, contract = make_case(tmp_path, "qwen3", QWEN3)
    settings = RolloutSettings(model=model, contract=contract, series="qwen3.5-tiny")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cuda_metadata.py"))],
        env=settings.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    padded, mixed, decode = json.loads(done.stdout.splitlines()[-1])
    assert padded["slots"] == [5, 8, 0, 0]
    assert padded["contexts"] == [127, 128, 0, 0]
    assert padded["starts"] == [0, 1, 2, 2, 2]  # who pads the step owns no row
    assert mixed["slots"] == [6, 9]
    assert mixed["contexts"] == [128, 0]
    assert decode["slots"] == [6, 8, 9]
    assert decode["contexts"] == [129, 129, 30]
    assert [step["most"] for step in (padded, mixed, decode)] == [1, 30, 1]
    assert padded["at"] == decode["at"]
    assert not set(mixed["at"]) & set(decode["at"])
    assert all(step["dtypes"] == ["torch.int32"] for step in (padded, mixed, decode))


@pytest.mark.engine
def test_a_product_with_a_bias_is_admitted_as_one(tmp_path):
    model, contract = make_case(tmp_path, "qwen2", QWEN2)
    settings = RolloutSettings(model=model, contract=contract, series="qwen3-tiny")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cuda_products.py"))],
        env=settings.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = json.loads(done.stdout.splitlines()[-1])
    assert one == [
        ["96", "64", "1", "torch.bfloat16", "True"],
        ["64", "64", "2", "torch.bfloat16", "False"],
        ["256", "64", "1", "torch.bfloat16", "False"],
        ["128", "64", "1", "torch.float32", "False"],
    ]
    assert two == [
        ["48", "64", "1", "torch.bfloat16", "True"],
        ["64", "32", "1", "torch.float32", "False"],
        ["128", "64", "1", "torch.bfloat16", "False"],
        ["64", "64", "1", "torch.float32", "False"],
    ]
