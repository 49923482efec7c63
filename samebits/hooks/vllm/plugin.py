"""Entry points that vLLM calls by itself: `vllm.platform_plugins` and `vllm.general_plugins`.

Both run in every vLLM process (front end, engine core, workers), so both are idempotent and
cheap. Without a contract, with `SAMEBITS_ARITHMETIC` unset, or beside a GPU they do nothing.
"""

from __future__ import annotations

import os

_registered = False


def wanted() -> bool:
    """True when this process was started for a case: a contract is named, or the control runs."""
    return bool(os.environ.get("SAMEBITS_CONTRACT")) or (
        os.environ.get("SAMEBITS_ARITHMETIC") == "stock"
    )


def _accelerator_present() -> bool:
    import torch

    return torch.cuda.is_available() or torch.xpu.is_available()


def platform() -> str | None:
    """Qualified name of the CPU platform, or None to leave vLLM's own choice alone."""
    if not wanted() or _accelerator_present():
        return None
    from samebits.hooks.vllm import cpu_ops

    cpu_ops.define()
    return "samebits.hooks.vllm.platform.CpuPlatform"


def register() -> None:
    """Register the model loader, hybrid models and, when aligned, the out-of-tree layers."""
    global _registered
    if _registered or not wanted() or _accelerator_present():
        return
    _registered = True
    import torch._dynamo

    # vLLM wraps a few sampler helpers in torch.compile even with enforce_eager. On a CPU that
    # asks for a C++ compiler and fuses across rounding points; eager runs the same lines.
    torch._dynamo.config.disable = True

    from samebits import faults, runtime
    from samebits.hooks.vllm import gdn, loader

    loader.register()
    gdn.register()
    if runtime.aligned():
        from samebits.hooks.vllm import modules

        faults.install()
        modules.register()
