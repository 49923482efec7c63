import json
import subprocess

import pytest

from samebits import cli, doctor, env
from samebits.doctor import check_settings, machine, read_settings
from samebits.errors import Refused
from samebits.patching.workspace import Workspace

H200 = {"name": "NVIDIA H200", "compute_cap": "9.0", "driver_version": "570", "memory.total": "1"}
B200 = {**H200, "name": "NVIDIA B200", "compute_cap": "10.0"}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """A CPU machine without settings that move bits."""
    for name in env.variables():
        monkeypatch.delenv(name)
    monkeypatch.setattr(env, "gpus", lambda: ())
    machine._ptxas_version.cache_clear()


def find(check, workspace=None):
    return [f for f in doctor.examine(workspace) if f.check == check]


def one(check, workspace=None):
    (finding,) = find(check, workspace)
    return finding


def test_every_finding_that_is_not_fine_has_one_command():
    for finding in doctor.examine():
        assert finding.severity in ("ok", "note", "warning", "problem")
        if finding.severity in ("warning", "problem"):
            assert finding.fix and "\n" not in finding.fix and finding.required


# --- versions ---


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "requirements.lock").write_text(
        f"numpy=={env.version('numpy')}\ntorch==1.0\n"
    )
    source = Workspace.find().patches / "pins.yaml"
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "pins.yaml").write_text(source.read_text())
    return Workspace(tmp_path)


def test_versions_against_the_lock_file(checkout):
    assert one("numpy", checkout).severity == "ok"
    wrong = one("torch", checkout)
    assert (wrong.severity, wrong.required, wrong.fix) == ("problem", "1.0", "make setup")
    assert find("triton", checkout) == []  # not in this lock file


def test_engines_against_the_pins(checkout, monkeypatch):
    real = env.version
    monkeypatch.setattr(machine.trees, "tree_path", lambda *args: checkout.build)
    assert one("vllm", checkout).severity == "ok"
    monkeypatch.setattr(env, "version", lambda n: "0.25.1" if n == "vllm" else real(n))
    wrong = one("vllm", checkout)
    assert (wrong.severity, wrong.fix) == ("problem", "pip install vllm==0.24.0")
    assert find("fla-core", checkout) == []


def test_outside_a_checkout_nothing_is_claimed_about_pins(monkeypatch):
    def nowhere():
        raise Refused("SB0101", seen="", required="", hint="")

    monkeypatch.setattr(machine.Workspace, "find", nowhere)
    assert one("packages").severity == one("upstreams").severity == "note"


@pytest.mark.parametrize(("version", "severity"), [((3, 10, 9), "problem"), ((3, 12, 1), "ok")])
def test_python(monkeypatch, version, severity):
    monkeypatch.setattr(machine.sys, "version_info", version)
    assert machine._python().severity == severity


# --- chips and tools ---


def test_cpu_needs_fused_multiply_add(monkeypatch):
    assert one("cpu").severity == "ok"
    monkeypatch.setattr(env, "cpu_flags", lambda: ["avx", "avx2"])
    assert one("cpu").severity == "problem"
    assert one("cpu").seen == "no fma"


def tool(tmp_path, version):
    path = tmp_path / f"ptxas-{version}"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, V{version}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("version", "severity"), [("12.8.93", "problem"), ("12.9.86", "ok"), ("13.0.1", "ok")]
)
def test_ptxas_that_miscompiles_is_a_problem_on_a_gpu(monkeypatch, tmp_path, version, severity):
    monkeypatch.setenv("TRITON_PTXAS_PATH", tool(tmp_path, version))
    assert find("ptxas") == []
    monkeypatch.setattr(env, "gpus", lambda: (H200,))
    found = one("ptxas")
    assert (found.severity, found.seen) == (severity, version)
    if severity == "problem":
        assert found.fix.startswith(("export TRITON_PTXAS_PATH=", "pip install"))


def test_ptxas_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(env, "gpus", lambda: (H200,))
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "none"))
    assert (one("ptxas").severity, one("ptxas").seen) == ("problem", "not found")


def test_two_kinds_of_gpu_and_native_reductions(monkeypatch):
    monkeypatch.setattr(env, "gpus", lambda: (H200,))
    assert one("gpu").severity == "ok"
    assert find("NCCL_ALGO") == []
    monkeypatch.setattr(env, "gpus", lambda: (H200, B200))
    assert one("gpu").severity == "problem"
    assert one("NCCL_ALGO").fix == "export NCCL_ALGO=Ring"
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert one("NCCL_ALGO").severity == "ok"
    assert one("CUBLAS_WORKSPACE_CONFIG").severity == "warning"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert find("CUBLAS_WORKSPACE_CONFIG") == []


@pytest.mark.parametrize(("triton", "warned"), [("3.3.1", 0), ("3.6.0", 1), ("3.7.1", 0)])
def test_backward_that_is_refused_on_hopper(monkeypatch, triton, warned):
    versions = {"fla-core": "0.5.2", "triton": triton}
    real = env.version
    monkeypatch.setattr(env, "version", lambda name: versions.get(name) or real(name))
    monkeypatch.setattr(env, "gpus", lambda: (H200,))
    assert len([f for f in machine._chip() if f.check == "fla-core"]) == warned


# --- variables ---


@pytest.mark.parametrize(
    ("name", "value", "severity"),
    [
        ("SAMEBITS_ARITHMETIC", "stock", "problem"),
        ("SAMEBITS_ARITHMETIC", "aligned", "ok"),
        ("SAMEBITS_FAULT", "gemm_k_cut", "problem"),
        ("TRITON_INTERPRET", "1", "problem"),
        ("NVIDIA_TF32_OVERRIDE", "1", "problem"),
        ("NVIDIA_TF32_OVERRIDE", "0", "ok"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16", "problem"),
        ("VLLM_USE_V2_MODEL_RUNNER", "1", "problem"),
        ("VLLM_USE_V2_MODEL_RUNNER", "0", "ok"),
        ("VLLM_BATCH_INVARIANT", "1", "warning"),
        ("NVTE_FLASH_ATTN", "0", "note"),
    ],
)
def test_variables_that_move_bits(monkeypatch, name, value, severity):
    monkeypatch.setenv(name, value)
    assert one(name).severity == severity


def test_runner_is_asked_for(monkeypatch):
    name = "VLLM_USE_V2_MODEL_RUNNER"
    assert find(name) == []  # our own commands set it
    (found,) = [f for f in doctor.examine(own_job=True) if f.check == name]
    assert (found.severity, found.fix) == ("warning", f"export {name}=0")


# --- room ---


def test_room(monkeypatch, checkout):
    usage = machine.shutil.disk_usage("/")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage._replace(free=10 << 20))
    monkeypatch.setattr(machine, "_available_memory", lambda: 5 << 30)
    assert one("weight transfer", checkout).severity == "problem"
    assert one("disk", checkout).severity == "problem"
    assert one("memory", checkout).severity == "warning"


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "severity"),
    [
        ({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs_mode": "raw_logprobs"}, "ok"),
        ({"temperature": 0.7}, "problem"),
        ({"temperature": 0.7, "logprobs_mode": "raw_logprobs"}, "problem"),
        ({"temperature": 0.7, "logprobs_mode": "processed_logprobs"}, "warning"),
        ({"temperature": 0, "logprobs_mode": "processed_logprobs"}, "problem"),
        ({"logprobs_mode": "raw_logits"}, "problem"),
        ({"top_p": 0.95}, "problem"),
        ({"top_k": 50}, "problem"),
        ({"min_p": 0.05}, "problem"),
        ({"repetition_penalty": 1.1}, "problem"),
        ({"kv_cache_dtype": "fp8"}, "problem"),
        ({"mamba_ssm_cache_dtype": "auto"}, "problem"),
        ({"calculate_log_probs": False}, "problem"),
        ({"bypass_mode": True}, "problem"),
        ({"enforce_eager": False}, "warning"),
        ({"enforce_eager": True}, "ok"),
        ({"top_k": False}, "problem"),  # a bool is no number
        ({"logits_processors": []}, "ok"),
        ({"temperature": float("nan")}, "problem"),
        ({"temperature": "NaN"}, "problem"),
        ({"temperature": float("inf"), "logprobs_mode": "processed_logprobs"}, "problem"),
        ({"a.temperature": 0.7, "b.logprobs_mode": "processed_logprobs"}, "warning"),
        (
            {
                "a.temperature": 0.7,
                "a.logprobs_mode": "raw_logprobs",
                "b.logprobs_mode": "processed_logprobs",
            },
            "problem",
        ),
    ],
)
def test_settings(settings, severity):
    worst = max(
        (f.severity for f in check_settings(settings)),
        key=["ok", "note", "warning", "problem"].index,
    )
    assert worst == severity


def test_settings_are_found_where_verl_nests_them(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "actor_rollout_ref:\n  rollout:\n    top_p: 0.9\n"
        "    engine_kwargs: [{enforce_eager: true}]\n    val_kwargs: {top_p: 0.7, temperature: 0}\n"
    )
    place = "actor_rollout_ref.rollout"
    assert read_settings(path) == {
        f"{place}.top_p": 0.9,
        f"{place}.engine_kwargs.0.enforce_eager": True,
    }


# In the places and with the values of the configurations that verl generates.
VERL = """
actor_rollout_ref:
  actor: {fsdp_config: {dtype: bfloat16, full_determinism: false}}
  rollout: {temperature: 1.0, dtype: bfloat16, logprobs_mode: processed_logprobs, top_k: -1}
  model: {lora: {dtype: null}}
critic: {fsdp: {dtype: float32}}
reward: {reward_model: {rollout: {temperature: 0.7, dtype: null}}}
distillation:
  teacher_models: {teacher_model: {inference: {temperature: 0.7}}}
  other: {dtype: "${oc.select:actor_rollout_ref.rollout.dtype}"}
"""


def test_settings_of_verl_are_judged_place_by_place(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(VERL)
    assert {f.severity for f in check_settings(read_settings(path))} == {"ok"}
    path.write_text(VERL.replace("dtype: bfloat16, log", "dtype: float16, log"))
    (found,) = [f for f in check_settings(read_settings(path)) if f.severity != "ok"]
    assert found.check == "actor_rollout_ref.rollout.dtype"
    assert found.fix == "grep -n dtype SETTINGS  # write auto there"
    path.write_text("a: {temperature: .nan}\nb: {temperature: .nan}\n")
    assert [f.severity for f in check_settings(read_settings(path))] == ["problem"] * 2


def test_settings_that_no_check_knows_are_listed(tmp_path, capsys):
    path = tmp_path / "a b.yaml"
    path.write_text("top_p: 1\nrollout: {temprature: 0.7, seed: 3}\nlearning_rate: 1\n")
    near, others = doctor.check_names(path)
    assert (near.check, near.severity) == ("rollout.temprature", "warning")
    assert near.required.startswith("temperature,")
    assert others.severity == "note"
    assert others.seen == "not checked: rollout.seed, learning_rate"
    assert cli.run(["doctor", "--json", "--settings", str(path)]) in (0, 2)
    found = json.loads(capsys.readouterr().out)
    assert {near.check, others.check} <= {finding["check"] for finding in found}


def test_every_fix_of_a_setting_can_be_run(tmp_path):
    path = tmp_path / "a b.yaml"
    path.write_text("top_p: 0.9\ntemperature: 0.7\nlogprobs_mode: raw_logits\nmin_p: 1\n")
    findings = check_settings(read_settings(path), path)
    assert len(findings) == 4
    for finding in findings:
        done = subprocess.run(finding.fix, shell=True, capture_output=True, text=True)
        assert finding.check in done.stdout, finding.fix


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "{"),
        ("a.yaml", "a: [1"),
        ("a.yaml", "learning_rate: 1"),
        ("a.yaml", ""),
        ("absent.yaml", None),
    ],
)
def test_settings_that_cannot_be_checked(tmp_path, capsys, name, text):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert cli.run(["doctor", "--settings", str(path)]) == 2
    assert capsys.readouterr().err.startswith("SB1005")


# --- the command ---


def test_command(monkeypatch, capsys, checkout):
    monkeypatch.setattr(machine.Workspace, "find", lambda: checkout)
    (checkout.root / "scripts" / "requirements.lock").write_text("")
    monkeypatch.setattr(machine.trees, "tree_path", lambda *args: checkout.build)
    monkeypatch.setattr(machine, "_room", lambda workspace: [])
    assert cli.run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "0 problem, 0 warning" in shown and "ok       " not in shown
    settings = checkout.root / "settings.json"
    settings.write_text('{"top_p": 0.9}')
    assert cli.run(["doctor", "--settings", str(settings)]) == 2
    shown = capsys.readouterr().out
    assert "warning  VLLM_USE_V2_MODEL_RUNNER" in shown
    assert f"fix: grep -n top_p {settings}  # write 1 there" in shown
    monkeypatch.setenv("SAMEBITS_FAULT", "any")
    assert cli.run(["doctor", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert [f["check"] for f in found if f["severity"] == "problem"] == ["SAMEBITS_FAULT"]


def test_what_cases_of_sm90_need(monkeypatch):
    monkeypatch.setattr(
        env, "version", lambda name: {"torch": "2.11.0", "triton": "3.6.0"}.get(name)
    )
    assert find("sm90") == [] and "sm90 are refused" in one("gpu").seen
    monkeypatch.setattr(env, "gpus", lambda: (H200,))
    assert one("sm90").severity == "ok"
    monkeypatch.setattr(env, "gpus", lambda: (B200,))
    assert one("sm90").severity == "warning"
    monkeypatch.setattr(env, "gpus", lambda: (H200,))
    monkeypatch.setattr(env, "version", lambda name: None)
    assert "no triton" in one("sm90").seen
