"""Record what every aligned region returned, and find the first region where two engines differ.

Both engines call the same operators in the same order, so the n-th call of one is the n-th call of
the other. A trace of one sequence, scored alone, is a folder of arrays: `00017.attention.npy` holds
the bit patterns [rows, features] of call 17. Set SAMEBITS_TRACE to a folder to record.
"""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from samebits import bits

# region -> (operator module, public function)
_TRACED = {
    "embedding": ("embedding", "lookup"),
    "norm.rms": ("rms_norm", "rms_norm"),
    "gemm.column": ("gemm", "linear"),
    "gemm.row": ("gemm", "row_parallel"),
    "rope": ("rotary", "apply"),
    "attention": ("attention", ("paged", "varlen")),
    "act.silu_mul": ("silu_mul", "silu_mul"),
    "gemm.lm_head": ("gemm", "lm_head"),
}
# The engines order the columns of this product differently (q, k, v against interleaved groups).
_UNORDERED = ("gemm.column",)


def install() -> None:
    """Wrap the operators of this process when SAMEBITS_TRACE names a folder; idempotent."""
    folder = os.environ.get("SAMEBITS_TRACE")
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    calls = iter(range(1 << 30))
    for region, (module_name, functions) in _TRACED.items():
        module = importlib.import_module(f"samebits.ops.{module_name}")
        for name in (functions,) if isinstance(functions, str) else functions:
            original = getattr(module, name)
            if not hasattr(original, "traced"):
                setattr(module, name, _wrap(original, region, Path(folder), calls))


def _wrap(function, region, folder, calls):
    @functools.wraps(function)
    def traced(*args, **kwargs):
        output = function(*args, **kwargs)
        rows = args[0].reshape(-1) if region == "embedding" else None
        count = rows.numel() if rows is not None else _rows(region, args[0])
        values = bits.int_view(output).reshape(count, -1)
        np.save(folder / f"{next(calls):05d}.{region}.npy", values)
        return output

    traced.traced = True  # type: ignore[attr-defined]
    return traced


def _rows(region: str, first) -> int:
    """Tokens of a call: per-head regions get [T, H, D], the others [..., K]."""
    if region in ("rope", "attention"):
        return first.shape[0]
    return first.numel() // first.shape[-1]


@dataclass(frozen=True)
class RegionDifference:
    """Where two traces part: call index, layer, region, element (row, column), both patterns."""

    call: int
    layer: int
    region: str
    row: int
    column: int
    left: str
    right: str
    differing: int
    elements: int


def _calls(folder: Path) -> list[tuple[int, str, Path]]:
    found = []
    for path in sorted(folder.glob("*.npy")):
        index, region = path.stem.split(".", 1)
        found.append((int(index), region, path))
    return found


def first_difference(left: Path, right: Path) -> RegionDifference | None:
    """First call whose outputs differ, or None. ValueError when the call sequences differ."""
    layer, rows_done = 0, 0
    pairs = list(zip(_calls(left), _calls(right), strict=False))
    for (index, region, a_path), (_, other, b_path) in pairs:
        if region != other:
            raise ValueError(f"call {index} is {region} on one side and {other} on the other")
        a, b = np.load(a_path), np.load(b_path)
        # Per-head calls (q/k norm) may come as one row per head on one side: compare flat rows.
        if a.shape != b.shape and a.size == b.size:
            b = b.reshape(a.shape)
        if a.shape != b.shape:
            raise ValueError(f"call {index} ({region}) has shapes {a.shape} and {b.shape}")
        if region in _UNORDERED:
            a, b = np.sort(a, axis=1), np.sort(b, axis=1)
        if (a != b).any():
            row, column = (int(i) for i in np.argwhere(a != b)[0])
            digits = a.dtype.itemsize * 2
            return RegionDifference(
                index,
                layer,
                region,
                row,
                column,
                f"{int(a[row, column]):0{digits}x}",
                f"{int(b[row, column]):0{digits}x}",
                int((a != b).sum()),
                int(a.size),
            )
        if region == "gemm.row":  # two per layer: attention output, then MLP down
            rows_done += 1
            layer = rows_done // 2
    return None
