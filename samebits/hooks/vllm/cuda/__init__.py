"""vLLM hooks for a GPU: platform, worker, runner and attention backend beside vLLM's own.

Unlike on a CPU, vLLM's compiled extensions are there. Aligned regions do not call them; they hold
what vLLM does around the arithmetic, and the stock control runs on them. Evidence of a case on a
CPU does not depend on this package.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from samebits.errors import Refused
from samebits.ops import gpu

# Without these vLLM's CUDA platform, and the module of every model, cannot be imported.
_EXTENSIONS = (
    ("_C_stable_libtorch*.so",),
    ("vllm_flash_attn/_vllm_fa3_C*.so", "vllm_flash_attn/_vllm_fa2_C*.so"),
)


def require() -> None:
    """Refuse a host without a GPU (SB0451) or a tree without compiled extensions (SB0519)."""
    import torch

    if not torch.cuda.is_available():
        gpu.require_capability(None)
    require_extensions(tree())


def tree() -> Path:
    """The folder of the `vllm` package that this process imports."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def require_extensions(folder: Path) -> None:
    """Refuse (SB0519) where the package in `folder` lacks an extension that it imports."""
    missing = [
        " or ".join(names)
        for names in _EXTENSIONS
        if not any(next(folder.glob(name), None) for name in names)
    ]
    if missing:
        raise Refused(
            "SB0519",
            seen=f"no {', no '.join(missing)} in {folder.name}",
            required="the compiled extensions of the pinned vLLM wheel in the patched tree",
            hint="samebits explain SB0519",
        )
