import json
import subprocess

import pytest

from samebits import cli, env


@pytest.fixture(autouse=True)
def fresh():
    env.gpus.cache_clear()
    yield
    env.gpus.cache_clear()


def test_intent_holds_versions_and_settings_as_text(monkeypatch):
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("SAMEBITS_CONTRACT", "/somewhere/contract.json")
    monkeypatch.setenv("UNRELATED", "1")
    found = env.intent()
    assert all(type(k) is str and type(v) is str for k, v in found.items())
    assert found["numpy"] == env.version("numpy")
    assert found["env.NVTE_FLASH_ATTN"] == "0"
    assert "/somewhere" not in json.dumps(found)
    assert "UNRELATED" not in json.dumps(found)
    assert env.reason("NVTE_FLASH_ATTN") == env.VARIABLES["NVTE_*"]


def test_a_setting_that_moves_bits_changes_intent_and_threads_do_not(monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    before = env.intent()
    monkeypatch.setattr(env.os, "sched_getaffinity", lambda pid: set(range(77)))
    assert env.intent() == before
    assert env.happenstance()["cpus"] == "77"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert env.intent() != before


def test_gpus_are_read_from_nvidia_smi(monkeypatch):
    text = "NVIDIA H200, 9.0, 570.1, 143771 MiB\nNVIDIA H200, 9.0, 570.1, 143771 MiB\n"
    monkeypatch.setattr(
        env.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, text, "")
    )
    assert env.chip() == "2 x NVIDIA H200"
    assert env.intent()["compute_capability"] == "9.0"
    assert env.happenstance()["driver"] == "570.1"


@pytest.mark.parametrize("problem", ["absent", "failing", "slow"])
def test_no_gpu_tool(monkeypatch, problem):
    def run(*args, **options):
        if problem == "absent":
            raise FileNotFoundError
        if problem == "slow":
            raise subprocess.TimeoutExpired(args, 20)
        return subprocess.CompletedProcess(args, 9, "", "no driver")

    monkeypatch.setattr(env.subprocess, "run", run)
    assert env.gpus() == ()
    assert "gpu" not in env.intent()


def test_command(capsys):
    assert cli.run(["env", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"intent", "happenstance"}
    assert cli.run(["env"]) == 0
    assert "  numpy" in capsys.readouterr().out
