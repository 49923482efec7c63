"""Entry points that vLLM calls by itself: `vllm.platform_plugins` and `vllm.general_plugins`.

Both run in every vLLM process (front end, engine core, workers), so both are idempotent and cheap.
Without a contract and with `SAMEBITS_ARITHMETIC` unset they do nothing, nor does a case of a CPU
beside a GPU. vLLM swallows what a platform plugin raises and chooses by itself, so a case of a GPU
always names its platform: that module refuses a host which cannot run it.
"""

from __future__ import annotations

import os

_registered = False


def wanted() -> bool:
    """True when this process was started for a case: a contract is named, or a control runs."""
    return bool(os.environ.get("SAMEBITS_CONTRACT")) or (
        os.environ.get("SAMEBITS_ARITHMETIC", "aligned") != "aligned"
    )


def _accelerator_present() -> bool:
    import torch

    return torch.cuda.is_available() or torch.xpu.is_available()


def _chosen() -> str | None:
    """The platform of this process's case, or None where vLLM is left alone."""
    from samebits import runtime

    if not wanted():
        return None
    platform = runtime.platform()
    return None if platform == "cpu" and _accelerator_present() else platform


def platform() -> str | None:
    """Qualified name of the platform class, or None to leave vLLM's own choice alone."""
    chosen = _chosen()
    if chosen == "sm90":
        return "samebits.hooks.vllm.cuda.platform.CudaPlatform"
    if chosen is None:
        return None
    from samebits.hooks.vllm import cpu_ops

    cpu_ops.define()
    return "samebits.hooks.vllm.platform.CpuPlatform"


def register() -> None:
    """Register the model loader, hybrid models and the out-of-tree layers of aligned regions."""
    global _registered
    if _registered or _chosen() is None:
        return
    _registered = True
    import torch._dynamo

    # vLLM wraps a few sampler helpers in torch.compile even with enforce_eager. On a CPU that asks
    # for a C++ compiler; on both it fuses across rounding points. Eager runs the same lines.
    torch._dynamo.config.disable = True

    from samebits import faults, runtime, trace
    from samebits.hooks.vllm import gdn, loader

    loader.register()
    gdn.register()
    if runtime.regions():
        from samebits.hooks.vllm import modules

        modules.register()
    if runtime.aligned():
        faults.install()
    trace.install("rollout")  # here, since a worker process may be spawned and inherit nothing
