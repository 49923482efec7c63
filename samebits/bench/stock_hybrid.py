"""vLLM's own text-only Qwen3.5, under a name that vLLM can be asked for.

vLLM registers Qwen3.5 with its vision tower only. The text model is a class of the same module,
which lacks what a hybrid model tells vLLM about its states; here it takes that from its sibling.
Nothing computes in this file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

# What vLLM's module imports for pictures, and its text model never calls.
_PICTURES = ("torchvision", "transforms", "v2", "functional")


@contextlib.contextmanager
def _without_pictures() -> Iterator[None]:
    """Empty modules in the place of torchvision while vLLM's module is imported, where it is not
    installed. Afterwards it is not there again, for all who ask."""
    if importlib.util.find_spec(_PICTURES[0]) is not None:
        yield
        return
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # asked now, since the answer is kept
    names = [".".join(_PICTURES[: i + 1]) for i in range(len(_PICTURES))]
    modules = [types.ModuleType(name) for name in names]
    for parent, child, leaf in zip(modules, modules[1:], _PICTURES[1:], strict=False):
        setattr(parent, leaf, child)
    sys.modules.update(zip(names, modules, strict=True))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


with _without_pictures():
    from vllm.model_executor.models import qwen3_5

from vllm.model_executor.models.interfaces import IsHybrid  # noqa: E402

_Sibling = qwen3_5.Qwen3_5ForConditionalGeneration


class Qwen3_5ForCausalLM(qwen3_5.Qwen3_5ForCausalLM, IsHybrid):
    """vLLM's text model with what vLLM's own hybrid class says of its states."""

    get_mamba_state_shape_from_config: Any = classmethod(
        _Sibling.get_mamba_state_shape_from_config.__func__
    )
    get_mamba_state_dtype_from_config: Any = classmethod(
        _Sibling.get_mamba_state_dtype_from_config.__func__
    )
    get_mamba_state_copy_func: Any = classmethod(_Sibling.get_mamba_state_copy_func.__func__)
