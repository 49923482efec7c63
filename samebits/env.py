"""What decides bits on this machine, and what only happened to be so.

`intent` is the part that a result depends on: versions, instruction set, GPU, settings. Two records
with one intent must give one set of bits. `happenstance` (threads, driver, kernel, date) is kept
for a reader and compared with nothing. Needs no torch; reads package metadata, /proc and
`nvidia-smi`.
"""

from __future__ import annotations

import datetime
import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "llvmlite",
    "triton",
    "transformers",
    "vllm",
    "megatron-core",
    "verl",
    "fla-core",
    "flash-attn",
    "transformer-engine",
)

# Environment variables that can move bits (a trailing * is a prefix), with the reason.
VARIABLES = {
    "SAMEBITS_ARITHMETIC": "chooses aligned or stock arithmetic, or regions of either",
    "SAMEBITS_CONTRACT": "names the contract",
    "SAMEBITS_FAULT": "plants a fault",
    "SAMEBITS_PLATFORM": "chooses the kind of chip that operators run on",
    "ATEN_CPU_CAPABILITY": "selects torch's CPU kernels",
    "BLIS_*": "selects CPU matrix kernels",
    "CUBLAS_WORKSPACE_CONFIG": "changes which split-K kernels cuBLAS may use",
    "DNNL_*": "selects oneDNN kernels and their accuracy",
    "FLA_*": "selects kernels of flash-linear-attention",
    "MKL_*": "selects MKL kernels and threads",
    "NCCL_ALGO": "fixes the order of native reductions",
    "NCCL_COLLNET_ENABLE": "lets the network reduce",
    "NCCL_MAX_NCHANNELS": "cuts native reductions into channels",
    "NCCL_MIN_NCHANNELS": "cuts native reductions into channels",
    "NCCL_NVLS_ENABLE": "lets the switch reduce",
    "NCCL_PROTO": "fixes the order of native reductions",
    "NUMBA_*": "changes how kernels are compiled",
    "NVIDIA_TF32_OVERRIDE": "rounds fp32 operands to TF32",
    "NVTE_*": "selects Transformer Engine kernels",
    "OMP_NUM_THREADS": "cuts sums of native CPU operators",
    "ONEDNN_*": "selects oneDNN kernels and their accuracy",
    "OPENBLAS_*": "selects CPU matrix kernels and threads",
    "PYTORCH_JIT*": "changes fusion",
    "TORCHDYNAMO_*": "turns compilation on or off",
    "TORCHINDUCTOR_*": "changes fusion and autotuning",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "rounds fp32 operands to TF32",
    "TORCH_BLAS_PREFER_*": "selects matrix kernels",
    "TORCH_COMPILE_DISABLE": "turns compilation on or off",
    "TRITON_DEFAULT_FP_FUSION": "turns FP contraction on or off",
    "TRITON_F32_DEFAULT": "rounds fp32 operands of dot products",
    "TRITON_INTERPRET": "runs kernels in an interpreter that is wrong for bf16",
    "TRITON_PTXAS_PATH": "chooses the assembler of GPU kernels",
    "VLLM_ATTENTION_BACKEND": "selects attention kernels",
    "VLLM_BATCH_INVARIANT": "replaces some operators of vLLM",
    "VLLM_DISABLED_KERNELS": "selects kernels",
    "VLLM_ENABLE_*": "selects kernels of vLLM",
    "VLLM_FLASH_ATTN_VERSION": "selects attention kernels",
    "VLLM_SSM_*": "changes the layout of recurrent state",
    "VLLM_USE_*": "selects kernels and runners of vLLM",
}

_VECTOR_FLAGS = ("fma", "avx", "avx2", "f16c", "avx512f", "avx512_bf16", "amx_bf16")


def version(package: str) -> str | None:
    """Installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _cpu() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_flags() -> list[str]:
    """The vector extensions that kernels may use, of those that x86-64 chips have."""
    present = set(_cpu().get("flags", "").split())
    return [flag for flag in _VECTOR_FLAGS if flag in present]


@functools.cache
def gpus() -> tuple[dict[str, str], ...]:
    """Name, compute capability, driver, memory of every NVIDIA GPU; none without `nvidia-smi`."""
    fields = ("name", "compute_cap", "driver_version", "memory.total")
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if done.returncode:
        return ()
    rows = (line.split(", ") for line in done.stdout.splitlines())
    return tuple(dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields))


def chip() -> str:
    """The chip that computes, in words."""
    if found := gpus():
        return f"{len(found)} x {found[0]['name']}"
    name = _cpu().get("model name") or platform.processor() or platform.machine()
    return f"{name} ({', '.join(cpu_flags()) or 'no vector extensions known'})"


def variables() -> dict[str, str]:
    """The set environment variables of VARIABLES."""
    prefixes = tuple(name[:-1] for name in VARIABLES if name.endswith("*"))
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in VARIABLES or name.startswith(prefixes)
    }


def reason(name: str) -> str:
    """Why a variable of `variables()` is listed."""
    if name in VARIABLES:
        return VARIABLES[name]
    prefixes = [key for key in VARIABLES if key.endswith("*") and name.startswith(key[:-1])]
    return VARIABLES[max(prefixes, key=len)]


def intent() -> dict[str, str]:
    """Everything that may decide bits, as flat text; absent packages and variables are left out."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    found["vector_extensions"] = " ".join(cpu_flags())
    found |= {name: text for name in PACKAGES if (text := version(name))}
    if graphics := gpus():
        found["gpu"] = " + ".join(sorted({gpu["name"] for gpu in graphics}))
        found["compute_capability"] = " + ".join(sorted({g["compute_cap"] for g in graphics}))
    # A path says where this machine keeps a file, not what is in it; the contract's digest counts.
    hidden = ("SAMEBITS_CONTRACT", "TRITON_PTXAS_PATH")
    found |= {f"env.{k}": v for k, v in variables().items() if k not in hidden}
    return found


def happenstance() -> dict[str, str]:
    """What a reader may want to know, and no result may depend on."""
    found = {
        "chip": chip(),
        "cpus": str(len(os.sched_getaffinity(0))),
        "system": f"{platform.system()} {platform.release()}",
        "libc": " ".join(platform.libc_ver()),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if graphics := gpus():
        found["driver"] = graphics[0]["driver_version"]
    return found


def record() -> dict[str, dict[str, str]]:
    """The whole record, as evidence keeps it."""
    return {"intent": intent(), "happenstance": happenstance()}
