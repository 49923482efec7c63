"""Checks of this machine: versions, chips, tools, environment variables, room."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from samebits import env
from samebits.doctor.finding import Finding
from samebits.errors import Refused, word
from samebits.patching import pins, trees
from samebits.patching.workspace import Workspace

_LOCKED = ("torch", "triton", "numpy", "numba", "llvmlite", "transformers", "tensordict")
_MIN_PTXAS = (12, 9)  # 12.8 miscompiles a wgmma descriptor: wrong rows, no error
_GIB = 1 << 30

# variable -> (harmless values, severity of any other, fix)
_VALUES = {
    "SAMEBITS_ARITHMETIC": (("aligned",), "problem", "unset SAMEBITS_ARITHMETIC"),
    "SAMEBITS_FAULT": (("",), "problem", "unset SAMEBITS_FAULT"),
    "TRITON_INTERPRET": (("", "0"), "problem", "unset TRITON_INTERPRET"),
    "NVIDIA_TF32_OVERRIDE": (("", "0"), "problem", "export NVIDIA_TF32_OVERRIDE=0"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (
        ("", "0"),
        "problem",
        "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    ),
    "TRITON_F32_DEFAULT": (("", "ieee"), "problem", "unset TRITON_F32_DEFAULT"),
    "DNNL_DEFAULT_FPMATH_MODE": (
        ("", "STRICT", "strict"),
        "problem",
        "unset DNNL_DEFAULT_FPMATH_MODE",
    ),
    "ONEDNN_DEFAULT_FPMATH_MODE": (
        ("", "STRICT", "strict"),
        "problem",
        "unset ONEDNN_DEFAULT_FPMATH_MODE",
    ),
    "NUMBA_DISABLE_JIT": (("", "0"), "problem", "unset NUMBA_DISABLE_JIT"),
    "VLLM_USE_V2_MODEL_RUNNER": (("0",), "problem", "export VLLM_USE_V2_MODEL_RUNNER=0"),
    "VLLM_BATCH_INVARIANT": (("", "0"), "warning", "unset VLLM_BATCH_INVARIANT"),
}

# What native multi-GPU reductions need for one order of summation.
_NCCL = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}


def examine(workspace: Workspace | None = None, *, own_job: bool = False) -> list[Finding]:
    """All findings of this machine, in the order in which to fix them.

    `own_job`: the user starts engines; those that our commands start set what they need.
    """
    if workspace is None:
        try:
            workspace = Workspace.find()
        except Refused:
            workspace = None  # the wheel alone: checks that need a checkout say so
    return [
        _python(),
        *_locked(workspace),
        *_upstreams(workspace),
        *_chip(),
        *_gpu_tools(own_job),
        *_variables(own_job),
        *_room(workspace),
    ]


def _python() -> Finding:
    seen = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return Finding("python", "ok", seen)
    return Finding("python", "problem", seen, "3.11 or 3.12", "make setup PYTHON=python3.11")


def _locked(workspace: Workspace | None) -> Iterator[Finding]:
    lock = workspace.root / "scripts" / "requirements.lock" if workspace else None
    if lock is None or not lock.is_file():
        yield Finding("packages", "note", "no lock file here: versions are not compared")
        return
    wanted = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", lock.read_text(), re.MULTILINE))
    # The lock describes the CPU machine; on a GPU each engine brings its own torch.
    severity = "note" if env.gpus() else "problem"
    for name in _LOCKED:
        if name not in wanted:
            continue
        version = env.version(name)
        if version and version.partition("+")[0] == wanted[name].partition("+")[0]:
            yield Finding(name, "ok", version)
        else:
            yield Finding(name, severity, version or "not installed", wanted[name], "make setup")


def _upstreams(workspace: Workspace | None) -> Iterator[Finding]:
    """Engines run from patched trees; an installed release must at least be the pinned one."""
    if workspace is None:
        yield Finding("upstreams", "note", "no checkout of the project here: pins are not compared")
        return
    for pin in pins.load(workspace).values():
        installed = env.version(pin.distribution)
        if installed and installed.partition("+")[0] != pin.version:
            fix = f"pip install {pin.distribution}=={pin.version}"
            yield Finding(pin.distribution, "problem", installed, pin.version, fix)
        elif installed:
            yield Finding(pin.distribution, "ok", installed)
        elif pin.trees is None:
            continue  # a plain dependency, which only some cases need
        else:
            yield from _trees(workspace, pin)


def _trees(workspace: Workspace, pin: pins.Pin) -> Iterator[Finding]:
    """The tree of each model against its recorded id, its series and its own files."""
    ready: list[str] = []
    refused: dict[str, Refused] = {}
    for model in pin.trees or {}:
        try:
            trees.tree_path(pin.name, model, workspace)
            ready.append(model)
        except Refused as problem:
            refused[model] = problem
    if ready:
        seen = f"{pin.version}, patched trees for {', '.join(ready)}"
        yield Finding(pin.distribution, "ok", seen)
    elif all(error.error_id == "SB0115" for error in refused.values()):
        seen, fix = "no tree of the present series", f"samebits patch apply {pin.name}"
        yield Finding(pin.distribution, "problem", seen, f"{pin.version}, patched", fix)
        return
    for model, error in refused.items():
        # A job needs the trees of its own model only; one that was edited is wrong for any.
        severity = "warning" if error.error_id == "SB0115" else "problem"
        check = f"{pin.distribution} for {model}"
        yield Finding(check, severity, error.seen, error.required, error.hint)


def _chip() -> Iterator[Finding]:
    gpus = env.gpus()
    if not gpus:
        flags = env.cpu_flags()
        missing = [flag for flag in ("fma", "avx2") if flag not in flags]
        if missing:
            required = "an x86-64 CPU with FMA and AVX2: the schedules fuse multiply and add"
            yield Finding("cpu", "problem", f"no {', '.join(missing)}", required, "lscpu")
        else:
            yield Finding("cpu", "ok", env.chip())
        seen = "none found: engines compute on the CPU, and cases of platform sm90 are refused"
        yield Finding("gpu", "note", seen)
        return
    kinds = sorted({f"{gpu['name']} ({gpu['compute_cap']})" for gpu in gpus})
    if len(kinds) > 1:
        required = "one kind of GPU: bits are promised within one platform"
        fix = "export CUDA_VISIBLE_DEVICES=0"
        yield Finding("gpu", "problem", " and ".join(kinds), required, fix)
    else:
        yield Finding("gpu", "ok", f"{len(gpus)} x {kinds[0]}, driver {gpus[0]['driver_version']}")
    triton, fla = env.version("triton"), env.version("fla-core")
    hopper = any(gpu["compute_cap"] == "9.0" for gpu in gpus)
    yield from _sm90(hopper, triton)
    if hopper and fla and triton and (3, 4) <= _numbers(triton) < (3, 7, 1):
        seen = f"fla-core {fla} with triton {triton} on compute capability 9.0"
        required = "another backward: fla-core refuses its own here as miscompiled"
        fix = "pip install --no-deps triton==3.7.1"
        yield Finding("fla-core", "warning", seen, required, fix)


def _sm90(hopper: bool, triton: str | None) -> Iterator[Finding]:
    """What a case of platform sm90 needs; ptxas is judged with the other tools."""
    required = "compute capability 9.0 (H100, H200), torch and Triton"
    lacking = [] if hopper else ["no GPU of compute capability 9.0"]
    lacking += [f"no {name}" for name in ("torch", "triton") if not env.version(name)]
    if lacking:
        fix = "nvidia-smi" if not hopper else "pip install torch"
        yield Finding("sm90", "warning", ", ".join(lacking), required, fix)
    else:
        seen = f"torch {env.version('torch')}, triton {triton}: cases of platform sm90 can run"
        yield Finding("sm90", "ok", seen)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


@functools.cache
def _ptxas_version(path: str) -> tuple[int, ...] | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"V(\d+)\.(\d+)\.(\d+)", done.stdout)
    return tuple(map(int, found.groups())) if found else None


def _gpu_tools(own_job: bool) -> Iterator[Finding]:
    """Our kernels are assembled by the newer ptxas of Triton's wheel, a job's own by the other."""
    gpus = env.gpus()
    if not gpus:
        return
    spec = find_spec("triton")
    folder = Path(spec.origin or "").parent / "backends" / "nvidia" / "bin" if spec else None
    own = str(folder / ("ptxas" if own_job else "ptxas-blackwell")) if folder else "ptxas"
    chosen = os.environ.get("TRITON_PTXAS_PATH") or own
    version = _ptxas_version(chosen)
    seen = ".".join(map(str, version)) if version else "not found"
    if version and version[:2] >= _MIN_PTXAS:
        yield Finding("ptxas", "ok", seen)
    else:
        newer = str(folder / "ptxas-blackwell") if folder else ""
        good = (_ptxas_version(newer) or (0,))[:2] >= _MIN_PTXAS
        fix = f"export TRITON_PTXAS_PATH={word(newer)}" if good else "pip install nvidia-cuda-nvcc"
        required = "12.9 or newer: 12.8 miscompiles kernels without an error"
        yield Finding("ptxas", "problem", seen, required, fix)
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        seen = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "not set")
        fix = "export CUBLAS_WORKSPACE_CONFIG=:4096:8"
        yield Finding("CUBLAS_WORKSPACE_CONFIG", "warning", seen, ":4096:8 or :16:8", fix)
    if len(gpus) > 1:
        for name, value in _NCCL.items():
            if name in os.environ:
                yield Finding(name, "ok", os.environ[name])
                continue
            required = "one order for native all-reduce, the same in both engines"
            yield Finding(name, "warning", "not set", required, f"export {name}={value}")


def _variables(own_job: bool) -> Iterator[Finding]:
    if own_job and "VLLM_USE_V2_MODEL_RUNNER" not in os.environ:
        seen = "not set: vLLM 0.24 then picks V2 for Qwen3, Llama and Mistral"
        fix = "export VLLM_USE_V2_MODEL_RUNNER=0"
        yield Finding("VLLM_USE_V2_MODEL_RUNNER", "warning", seen, "0", fix)
    for name, value in env.variables().items():
        harmless, severity, fix = _VALUES.get(name, ((), "note", f"unset {name}"))
        why = env.reason(name)
        if value in harmless:
            yield Finding(name, "ok", value or "empty")
        elif name in _NCCL or name in ("CUBLAS_WORKSPACE_CONFIG", "SAMEBITS_CONTRACT"):
            continue  # judged elsewhere
        else:
            required = " or ".join(v for v in harmless if v) if any(harmless) else "unset"
            yield Finding(name, severity, f"{value} ({why})", required, fix)


def _room(workspace: Workspace | None) -> Iterator[Finding]:
    shared, temporary = Path("/dev/shm"), Path(tempfile.gettempdir())
    rooms = {str(f): shutil.disk_usage(f).free for f in (shared, temporary) if f.is_dir()}
    largest = max(rooms.values(), default=0)
    seen = ", ".join(f"{free / _GIB:.1f} GiB in {name}" for name, free in rooms.items())
    if largest < _GIB:
        required = "1 GiB in one of them for a copy of the weights"
        yield Finding(
            "weight transfer", "problem", seen, required, f"df -h {' '.join(map(word, rooms))}"
        )
    else:
        yield Finding("weight transfer", "ok", seen)
    if workspace is not None:
        free = shutil.disk_usage(workspace.root).free / _GIB
        severity = "ok" if free >= 4 else "warning" if free >= 1 else "problem"
        fix = "" if severity == "ok" else f"df -h {word(workspace.root)}"
        yield Finding("disk", severity, f"{free:.1f} GiB free", "4 GiB" if fix else "", fix)
    memory = _available_memory() / _GIB
    severity = "ok" if memory >= 8 else "warning" if memory >= 4 else "problem"
    fix = "" if severity == "ok" else "free -h"
    yield Finding("memory", severity, f"{memory:.1f} GiB available", "8 GiB" if fix else "", fix)


def _available_memory() -> int:
    """Bytes that can be had: of the machine, and of this control group where it is less."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    available = int(found.group(1)) * 1024 if found else 0
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass
    return available
