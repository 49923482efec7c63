"""Record what every aligned region returned, and find the first region where two engines differ.

Both engines call the same operators in the same order for one sequence, so the n-th call of one is
the n-th call of the other. That holds for dense models; recurrent layers are not traced.
SAMEBITS_TRACE names a folder; while that folder exists, every call leaves one file in it, so that a
driver records exactly the requests between making the folder and moving it away.
`00017.attention.npz` holds the output's bit patterns and digests of the operands.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samebits import bits

# region -> (operator module, public functions)
_TRACED = {
    "embedding": ("embedding", ("lookup",)),
    "norm.rms": ("rms_norm", ("rms_norm",)),
    "gemm.column": ("gemm", ("linear",)),
    "gemm.row": ("gemm", ("row_parallel",)),
    "rope": ("rotary", ("apply",)),
    "attention": ("attention", ("paged", "varlen")),
    "act.silu_mul": ("silu_mul", ("silu_mul",)),
    "gemm.lm_head": ("gemm", ("lm_head",)),
}
_WEIGHTED = ("embedding", "norm.rms", "gemm.column", "gemm.row", "gemm.lm_head")
_DIGEST_ROWS = 4096  # rows of a weight that are digested at one time


# --- recording ------------------------------------------------------------------------------------


def install() -> None:
    """Wrap the operators of this process when SAMEBITS_TRACE names a folder; idempotent.

    Call it after planted faults are installed, so that what a fault returns is what is recorded.
    """
    folder = os.environ.get("SAMEBITS_TRACE")
    if not folder:
        return
    recorder = _Recorder(Path(folder))
    for region, (module_name, functions) in _TRACED.items():
        module = importlib.import_module(f"samebits.ops.{module_name}")
        for name in functions:
            original = getattr(module, name)
            if not hasattr(original, "traced"):
                setattr(module, name, recorder.wrap(original, region))


class _Recorder:
    """Writes the outermost calls of one process; calls of one operator by another are inside."""

    def __init__(self, folder: Path):
        self._folder, self._inside = folder, False
        self._start()

    def _start(self) -> None:
        self._calls, self._weights = itertools.count(), dict[tuple, int]()

    def wrap(self, function: Callable, region: str) -> Callable:
        @functools.wraps(function)
        def traced(*args, **kwargs):
            if self._inside:
                return function(*args, **kwargs)
            if not self._folder.is_dir():
                self._start()
                return function(*args, **kwargs)
            self._inside = True
            try:
                output = function(*args, **kwargs)
            finally:
                self._inside = False
            self._write(region, args, output)
            return output

        traced.traced = True  # type: ignore[attr-defined]
        return traced

    def _write(self, region: str, args: tuple, output: Any) -> None:
        tokens = _tokens(region, args[0])
        found = {"output": bits.int_view(output).reshape(tokens, -1)}
        found["input"] = _row_digests(bits.int_view(args[0]).reshape(tokens, -1))
        if region in _WEIGHTED:
            found["weight"] = np.array([self._weight(args[1])], np.uint64)
        if region == "rope":
            angles = args[2][args[1].long()]
            found["angles"] = _row_digests(bits.int_view(angles).reshape(tokens, -1))
        path = self._folder / f"{next(self._calls):05d}.{region}.npz"
        with contextlib.suppress(FileNotFoundError):  # the driver has what it wants and moved on
            np.savez(path, **found)  # type: ignore[arg-type]

    def _weight(self, weight: Any) -> int:
        """Digest of a weight that does not depend on the order of its rows; taken once."""
        key = (weight.data_ptr(), tuple(weight.shape))
        if key not in self._weights:
            view = bits.int_view(weight)
            view = view.reshape(-1, view.shape[-1])
            parts = (
                _row_digests(view[i : i + _DIGEST_ROWS]).sum(dtype=np.uint64)
                for i in range(0, len(view), _DIGEST_ROWS)
            )
            self._weights[key] = int(np.array(list(parts), np.uint64).sum(dtype=np.uint64))
        return self._weights[key]


def _tokens(region: str, first: Any) -> int:
    """Rows of a call: ids, [T, heads, D] of per-head regions, or [..., K]."""
    if region == "embedding":
        return first.numel()
    if region in ("rope", "attention"):
        return first.shape[0]
    return first.numel() // first.shape[-1]


def _row_digests(rows: np.ndarray) -> np.ndarray:
    """uint64 [n]: digest of each row of an integer view [n, F]."""
    with np.errstate(over="ignore"):
        seed = bits.splitmix64(np.arange(1, rows.shape[1] + 1, dtype=np.uint64) * bits.GOLDEN)
        return bits.splitmix64(seed ^ rows.astype(np.uint64)).sum(axis=1, dtype=np.uint64)


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One region of a sequence's forward pass.

    output    [tokens, features] bit patterns, in order of position
    operands  name -> uint64 digests, one per token, or one in all (a weight)
    start     position of the first row; logits of a decoded response begin after its prompt
    """

    layer: int | None
    region: str
    output: np.ndarray
    operands: Mapping[str, np.ndarray]
    start: int = 0


@dataclass(frozen=True)
class RegionDifference:
    """Where two traces part. `element` is (position, feature); counts are of the compared rows.

    operands   name -> digest that both sides hold for that position, or the two that differ
    """

    layer: int | None
    region: str
    element: tuple[int, int]
    left: str
    right: str
    differing: int
    elements: int
    operands: dict[str, str]


def qkv_order(heads: int, kv_heads: int, head_dim: int) -> np.ndarray:
    """Columns of Megatron's fused projection (groups of q.., k, v) in the order q, k, v."""
    group = heads // kv_heads
    width = group + 2
    blocks = [h // group * width + h % group for h in range(heads)]
    blocks += [g * width + group + i for i in (0, 1) for g in range(kv_heads)]
    return (np.array(blocks)[:, None] * head_dim + np.arange(head_dim)).ravel()


def load(
    folder: Path,
    rows: int,
    *,
    qkv: np.ndarray | None = None,
    skip_logits: int = 0,
    first_logits: int = 0,
) -> list[Call]:
    """Calls of one sequence. Forward passes over parts of it (decode steps) are put end to end.

    rows          tokens that went in; later passes, which an engine may run ahead, are left out
    qkv           column order of the fused projections (`qkv_order`), where it is not q, k, v
    skip_logits   rows of logits that come first and are not wanted
    first_logits  position of the row that comes then

    ValueError when the folder holds no whole pass or passes of different calls.
    """
    passes: list[list[tuple[str, dict[str, np.ndarray]]]] = []
    logits: list[dict[str, np.ndarray]] = []
    missing = rows
    for region, found in _files(folder):
        if region == "embedding":
            if missing <= 0:
                break
            missing -= len(found["output"])
            passes.append([])
        if not passes:
            raise ValueError(f"the trace starts with {region}")
        (logits if region == "gemm.lm_head" else passes[-1]).append(
            found if region == "gemm.lm_head" else (region, found)  # type: ignore[arg-type]
        )
    if missing > 0:
        raise ValueError(f"the trace lacks {missing} of {rows} tokens")
    steps = [_joined(step) for step in zip(*passes, strict=True)]
    calls = _in_layers(steps, qkv)
    if logits:
        whole = _concatenate(logits)
        calls.append(
            Call(
                None,
                "gemm.lm_head",
                whole["output"][skip_logits:],
                _cut(whole, skip_logits),
                first_logits,
            )
        )
    return calls


def _files(folder: Path):
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as stored:
            yield path.stem.split(".", 1)[1], dict(stored)


def _joined(step: Sequence[tuple[str, dict[str, np.ndarray]]]):
    regions = {region for region, _ in step}
    if len(regions) != 1:
        raise ValueError(f"forward passes of one sequence call {' and '.join(sorted(regions))}")
    # q/k norm has one row per head: bring every call to one row per token of its pass.
    return step[0][0], [found for _, found in step]


def _per_token(found: dict[str, np.ndarray], tokens: int) -> dict[str, np.ndarray]:
    output = found["output"].reshape(tokens, -1)
    if len(found["input"]) != tokens:
        with np.errstate(over="ignore"):
            found = found | {"input": _row_digests(found["input"].reshape(tokens, -1))}
    return found | {"output": output}


def _concatenate(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {
        name: parts[0][name] if name == "weight" else np.concatenate([p[name] for p in parts])
        for name in parts[0]
    }


def _cut(found: dict[str, np.ndarray], skip: int) -> dict[str, np.ndarray]:
    operands = {name: value for name, value in found.items() if name != "output"}
    return {name: v if name == "weight" else v[skip:] for name, v in operands.items()}


def _in_layers(steps, qkv: np.ndarray | None) -> list[Call]:
    """Number the layers: each ends with its second row-parallel product (MLP down)."""
    sizes = [len(part["output"]) for part in steps[0][1]]
    layers = sum(region == "gemm.row" for region, _ in steps) // 2
    calls, done = [], 0
    for region, parts in steps:
        whole = _concatenate(
            [_per_token(part, tokens) for part, tokens in zip(parts, sizes, strict=True)]
        )
        output = whole["output"]
        if region == "gemm.column" and done % 2 == 0 and qkv is not None:
            output = output[:, qkv]
        inside = region != "embedding" and done // 2 < layers
        calls.append(Call(done // 2 if inside else None, region, output, _cut(whole, 0)))
        done += region == "gemm.row"
    return calls


def first_difference(
    left: Sequence[Call], right: Sequence[Call], rows: int | None = None
) -> RegionDifference | None:
    """First call whose outputs differ in the first `rows` tokens, or None.

    ValueError when the calls of the two sides do not correspond.
    """
    for index, (a, b) in enumerate(itertools.zip_longest(left, right)):
        if a is None or b is None or (a.layer, a.region) != (b.layer, b.region):
            raise ValueError(f"call {index} is {_name(a)} on one side and {_name(b)} on the other")
        if a.output.shape[1:] != b.output.shape[1:] or a.output.dtype != b.output.dtype:
            raise ValueError(f"{_name(a)} has outputs {a.output.shape} and {b.output.shape}")
        begin = max(a.start, b.start)
        end = min(a.start + len(a.output), b.start + len(b.output))
        end = end if rows is None else min(end, rows)
        left_rows, right_rows = (
            c.output[begin - c.start : max(begin, end) - c.start] for c in (a, b)
        )
        wrong = np.argwhere(left_rows != right_rows)
        if len(wrong):
            row, column = (int(i) for i in wrong[0])
            digits = a.output.dtype.itemsize * 2
            return RegionDifference(
                layer=a.layer,
                region=a.region,
                element=(begin + row, column),
                left=f"{int(left_rows[row, column]):0{digits}x}",
                right=f"{int(right_rows[row, column]):0{digits}x}",
                differing=len(wrong),
                elements=int(left_rows.size),
                operands=_operands(a, b, begin + row),
            )
    return None


def _name(call: Call | None) -> str:
    if call is None:
        return "missing"
    return call.region if call.layer is None else f"{call.region} of layer {call.layer}"


def _operands(a: Call, b: Call, row: int) -> dict[str, str]:
    found = {}
    for name in a.operands:
        left, right = (
            f"{int(side.operands[name][0 if name == 'weight' else row - side.start]):016x}"
            for side in (a, b)
        )
        found[name] = left if left == right else f"{left} left, {right} right"
    return found
