"""One environment for every test, whoever calls.

Variables that choose arithmetic, kernels or import paths are removed before any test module is
imported, so that child processes do not see them either. A planted fault is refused, not removed:
whoever set it believes that the suite runs with it.

Memory that `empty` hands out is filled: NaN in floats, the largest value in integers (which is a
NaN when the integers are bf16 or fp16 bits). Code that reads what it never wrote then fails.
"""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest

# PYTEST_* and what pip needs stay. HOME and XDG_CACHE_HOME stay: kernels are compiled once.
REMOVED = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONDONTWRITEBYTECODE",  # engines would compile all of vLLM at every start
    "LD_PRELOAD",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "COLUMNS",
    "NO_COLOR",
    "FORCE_COLOR",
)
REMOVED_PREFIXES = (
    "SAMEBITS_",
    "VLLM_",
    "TORCH",
    "PYTORCH_",
    "ATEN_",
    "NUMBA_",
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "OPENBLAS_",
    "DNNL_",
    "ONEDNN_",
    "BLIS_",
    "TRITON_",
    "NCCL_",
    "CUBLAS_",
    "GIT_",
)
SET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONHASHSEED": "0",
    "TZ": "UTC",
    "LC_ALL": "C.UTF-8",
}


def cleaned(environment: dict[str, str]) -> dict[str, str]:
    """`environment` as tests see it; refuses one with a planted fault."""
    if fault := environment.get("SAMEBITS_FAULT"):
        raise pytest.UsageError(f"SAMEBITS_FAULT={fault} is set\n\nhint: unset SAMEBITS_FAULT")
    kept = {
        name: value
        for name, value in environment.items()
        if name not in REMOVED and not name.startswith(REMOVED_PREFIXES)
    }
    return kept | SET


def pytest_configure() -> None:
    wanted = cleaned(dict(os.environ))
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


def _filled_torch(make):
    import torch

    def filled(*args, **kwargs):
        made = make(*args, **kwargs)
        with torch.no_grad():
            if made.is_floating_point() or made.is_complex():
                made.fill_(float("nan"))
            elif made.dtype != torch.bool and not made.is_quantized:
                made.fill_(torch.iinfo(made.dtype).max)
        return made

    return filled


@functools.cache
def _filled_numpy(make):
    """`make` with its memory filled. A kernel compiled while a test runs means `make` by it: numba
    goes by the identity of a function, and its own code calls these two by their names in numpy."""
    from numba.core.registry import cpu_target

    def filled(*args, **kwargs):
        made = make(*args, **kwargs)
        if made.dtype.kind in "fc":
            made.fill(np.nan)
        elif made.dtype.kind in "iu":
            made.fill(np.iinfo(made.dtype).max)
        return made

    cpu_target.target_context.refresh()  # numba learns numpy's functions on first use
    context = cpu_target.typing_context
    context.refresh()
    context.insert_global(filled, context.resolve_value_type(make))
    return filled


@pytest.fixture(autouse=True)
def unwritten_memory_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only calls from Python are reached; what a compiled kernel allocates is left as it is."""
    import torch

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _filled_torch(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", _filled_torch(torch.Tensor.new_empty))
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(np, name, _filled_numpy(getattr(np, name)))


@pytest.fixture(autouse=True)
def environment_is_left_as_found():
    """A test that changes a variable for good would change what later tests prove. What libraries
    set for themselves on import (cache folders) is taken back without a word."""
    before = dict(os.environ)
    yield
    changed = {name for name in REMOVED if before.get(name) != os.environ.get(name)}
    changed |= {
        name
        for name in before.keys() | os.environ.keys()
        if name.startswith(("SAMEBITS_", "VLLM_", "NUMBA_", "OMP_"))
        and before.get(name) != os.environ.get(name)
    }
    os.environ.clear()
    os.environ.update(before)
    assert not changed, f"the test changed the environment: {sorted(changed)}"
