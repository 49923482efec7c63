"""Content hashes of Python modules, without importing them (and so without torch)."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from samebits.errors import Refused


def module_file(name: str) -> Path:
    """Source file of a dotted module name. Only the top-level package is looked up."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is not None and spec.origin is not None:
        if not rest:
            return Path(spec.origin)
        base = Path(spec.origin).parent.joinpath(*rest)
        for candidate in (base.with_name(base.name + ".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    raise Refused(
        "SB0404",
        seen=f"module {name} has no source file here",
        required="every module that the contract or the evidence names",
        hint="pip install -e . --no-deps",
    )


def source_hash(modules: Sequence[str]) -> str:
    """sha256 over (name, NUL, source bytes, NUL) of `modules`, in the listed order.

    The same bytes as `Implementation.content_hash`, so that a file can be checked without torch.
    """
    digest = hashlib.sha256()
    for name in modules:
        digest.update(name.encode() + b"\0" + module_file(name).read_bytes() + b"\0")
    return digest.hexdigest()
