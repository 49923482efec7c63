"""The recorder inside an engine's process: it wraps the public operators and writes their calls."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samebits import bits
from samebits.plan import ReductionPlan
from samebits.trace import digests, operators, passes
from samebits.trace import rows as sequences
from samebits.trace.columns import CONSTANT, widened
from samebits.trace.digests import rows_of
from samebits.trace.passes import Pass

_WANTED = "sequence.npy"


@dataclass(frozen=True)
class Region:
    """What is recorded of an operator: module below `samebits`, functions, places of operands.

    inputs   arguments with one row per token, digested together
    weights  arguments that all tokens share
    """

    module: str
    functions: tuple[str, ...]
    inputs: tuple[int, ...] = (0,)
    weights: tuple[int, ...] = ()


REGIONS = {
    "embedding": Region("ops.embedding", ("lookup",), weights=(1,)),
    "norm.rms": Region("ops.rms_norm", ("rms_norm",), weights=(1,)),
    "gemm.column": Region("ops.gemm", ("linear",), weights=(1,)),
    "gemm.row": Region("ops.gemm", ("row_parallel",), weights=(1,)),
    "rope": Region("ops.rotary", ("apply",)),
    "attention": Region("ops.attention", ("paged", "varlen")),
    "attention.gate": Region("ops.output_gate", ("output_gate",), inputs=(0, 1)),
    "act.silu_mul": Region("ops.silu_mul", ("silu_mul",)),
    "gdn.conv": Region("ops.conv1d", ("advance", "varlen"), weights=(1,)),
    "gdn.l2_norm": Region("ops.l2_norm", ("l2_norm",)),
    "gdn.gate": Region("ops.gdn_gate", ("gate",), inputs=(0, 1), weights=(2, 3)),
    "gdn.core": Region("ops.gdn", ("advance", "varlen"), inputs=(0, 1, 2, 3, 4)),
    "norm.gated": Region("ops.gated_rms_norm", ("gated_rms_norm",), inputs=(0, 1), weights=(2,)),
    "gemm.lm_head": Region("ops.gemm", ("lm_head",), weights=(1,)),
}
# The same function with a third operand. Ranks split its entries, so each is digested by itself.
BIASED = Region("ops.gemm", ("linear",), weights=(1, 2))
# Regions of which every rank is given its columns of one row: digests of the parts add up.
_BY_COLUMNS = ("gemm.row", "norm.rms", "norm.rms_zero_centred", "rope", "attention")
# In the trainer the row-parallel product is wrapped where ranks meet, so that a fault that takes
# the place of the operator there is recorded as its call.
TRAINER = {"gemm.row": Region("hooks.megatron.linear", ("row_product",), weights=(1,))}
# Its outputs are the log-probabilities themselves, so they are not recorded; its operators are.
LOGPROB = Region("ops.logprob", ("log_softmax", "selected", "scale", "row_digest"))
# Those that make log-probabilities: how many rows each of their calls has is counted.
_SCORES = ("log_softmax", "selected")


def start(folder: Path, tokens: Sequence[int]) -> None:
    """Make the folder that an engine watches: from now on it records the sequence `tokens`."""
    draft = folder.with_name(f"{folder.name}.draft")
    draft.mkdir()
    np.save(draft / _WANTED, np.asarray(tokens, np.int64))
    os.replace(draft, folder)


def install(engine: str | None = None) -> None:
    """Wrap the operators of this process when SAMEBITS_TRACE names a folder; idempotent.

    engine   `rollout` or `trainer`: its forward passes are watched for torch operators too

    Call it after planted faults are installed, so that what a fault returns is what is recorded.
    """
    folder = os.environ.get("SAMEBITS_TRACE")
    if not folder:
        return
    recorder = _Recorder(Path(folder))
    tally = operators.install(engine, recorder.watched, Path(folder)) if engine else None
    for name, region in (REGIONS | (TRAINER if engine == "trainer" else {})).items():
        _wrap(
            region, lambda f, called, n=name, r=region: recorder.wrap(f, n, r, called), tally, name
        )
    if tally is not None:

        def counted(function: Callable, called: str) -> Callable:
            return tally.scoring(function, called) if called in _SCORES else function

        _wrap(LOGPROB, counted, tally, "logprob")


def _wrap(region: Region, recorded: Callable, tally: operators.Tally | None, name: str) -> None:
    module = importlib.import_module(f"samebits.{region.module}")
    for called in region.functions:
        original = getattr(module, called)
        if hasattr(original, "traced"):
            continue
        function = recorded(original, called)
        function = function if tally is None else tally.scoped(function, name)
        function.traced = True  # type: ignore[union-attr]
        setattr(module, called, function)


class _Recorder:
    """Writes the outermost calls of one process; calls of one operator by another are inside."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._inside = folder, False
        self._key: tuple[int, int] | None = None

    def wrap(self, function: Callable, name: str, region: Region, called: str) -> Callable:
        """`function`, recorded as `name`; its module knows it as `called`."""
        signature = inspect.signature(function)

        @functools.wraps(function)
        def traced(*args, **kwargs):
            if self._inside or not self.watched():
                return function(*args, **kwargs)
            self._inside = True
            try:
                output = function(*args, **kwargs)
                shown, seen = name, region
                if name == "norm.rms" and kwargs.get("zero_centred"):
                    shown = "norm.rms_zero_centred"
                elif name == "gemm.column" and args[2:] and args[2] is not None:
                    shown, seen = "gemm.bias", BIASED
                with contextlib.suppress(FileNotFoundError):  # the driver has what it wants
                    self._see(
                        shown, seen, called, args, output, _constants(signature, args, kwargs)
                    )
            finally:
                self._inside = False
            return output

        return traced

    def watched(self) -> bool:
        """Whether a recording is on; a new one starts afresh."""
        wanted = self._folder / _WANTED
        try:
            found = wanted.stat()
            if self._key != (found.st_ino, found.st_mtime_ns):
                self._finder = sequences.Finder(np.load(wanted))
                self._pass: Pass | None = None
                self._passes, self._weights = 0, dict[tuple, int]()
                self._key = found.st_ino, found.st_mtime_ns
        except FileNotFoundError:
            self._key = None
            return False
        return True

    def _see(
        self,
        name: str,
        region: Region,
        called: str,
        args: tuple,
        output: Any,
        constants: dict[str, np.uint64],
    ) -> None:
        if name == "embedding":
            ids = bits.int_view(args[0]).astype(np.int64)
            self._pass = Pass(ids.ravel(), len(ids) if ids.ndim > 1 else 1, self._passes)
            self._passes += 1
        step = self._pass
        if step is None:  # a pass that began before the recording
            return
        if name == "gemm.lm_head":
            self._output_layer(step, region, args, output)
            return
        if name == "attention" and step.rows is None:
            self._locate(step, called, args)
        if name.startswith("norm.rms"):
            step.normed = output
        if step.rows is None:
            whole = np.arange(len(step.ids))
            found = self._found(name, region, args, output, whole)
            step.waiting.append((name, found | _each(constants, len(whole))))
        elif len(step.rows):
            rows = step.of(name, step.rows)
            found = self._found(name, region, args, output, rows)
            self._write(step, name, found | _each(constants, len(rows)))

    def _locate(self, step: Pass, called: str, args: tuple) -> None:
        """Learn the rows of the sequence, and write what came before."""
        if called == "paged":
            block_size = args[1].shape[1]
            step.pieces = sequences.paged(args[3], args[4], args[5], block_size)
        else:
            block_size = 1
            step.pieces = sequences.packed(args[3])
        step.rows, step.positions = self._finder.find(step.ids, step.pieces, block_size)
        for name, found in step.waiting if len(step.rows) else ():
            rows = step.of(name, step.rows)
            mine = {k: v if k.startswith("weight") else v[rows] for k, v in found.items()}
            self._write(step, name, mine)
        step.waiting.clear()

    def _output_layer(self, step: Pass, region: Region, args: tuple, output: Any) -> None:
        if step.rows is None or step.positions is None or not len(step.rows):
            return
        at = passes.projected(
            step, digests.of_rows(rows_of(args[0], args[0].numel() // args[0].shape[-1]))
        )
        mine = np.flatnonzero(np.isin(at, step.rows))
        if not len(mine):
            return
        found = self._found("gemm.lm_head", region, args, output, mine, tokens=len(at))
        order = np.argsort(step.rows, kind="stable")
        positions = step.positions[order][np.searchsorted(step.rows[order], at[mine])]
        self._write(step, "gemm.lm_head", found, positions)

    def _found(
        self,
        name: str,
        region: Region,
        args: tuple,
        output: Any,
        rows: np.ndarray,
        *,
        tokens: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Copies of the rows `rows` of a call that has `tokens` of them (default: of the pass)."""
        assert self._pass is not None
        tokens = tokens or len(self._pass.ids)
        outputs = output if isinstance(output, tuple) else (output,)
        values = np.concatenate(widened([rows_of(part, tokens)[rows] for part in outputs]), axis=1)
        inputs = [rows_of(args[i], tokens)[rows].astype(np.uint64) for i in region.inputs]
        given = np.concatenate(inputs, axis=1)
        found = {"output": values, "input": digests.of_rows(given)}
        if region.weights:
            found["weight"] = self._weights_of(name, region, args)
        rank = _rank()
        if rank is not None and name in _BY_COLUMNS:
            found["input.part"] = digests.of_rows(given, rank * given.shape[1])
            if name == "gemm.row":
                first = rank * args[1].shape[-1]
                found["weight.part"] = self._weights_of(name, region, args, first)
        if name == "rope":
            found["angles"] = digests.of_rows(rows_of(args[2][args[1].long()], tokens)[rows])
        return found

    def _write(self, step: Pass, name: str, found: dict[str, np.ndarray], positions=None) -> None:
        folder = self._folder
        rank = _rank()
        if rank is not None:
            folder = folder / f"rank{rank}"
            folder.mkdir(exist_ok=True)
        where = step.positions if positions is None else positions
        path = folder / f"{step.number:04d}-{step.calls:04d}.{name}.npz"
        np.savez(path, position=where, **found)  # type: ignore[arg-type]
        step.calls += 1

    def _weights_of(self, name: str, region: Region, args: tuple, column: int = 0) -> np.ndarray:
        """Digest of a call's weights that does not depend on the order of their rows."""
        parts = [self._weight(name, args[i], column) for i in region.weights]
        return np.array(parts, np.uint64).sum(dtype=np.uint64, keepdims=True)

    def _weight(self, name: str, weight: Any, column: int) -> int:
        """`digests.of_weight`, taken once in a recording."""
        key = (weight.data_ptr(), tuple(weight.shape), column)
        if key not in self._weights:
            # Ranks split heads and columns, of which each has one value.
            by_value = name == "gdn.gate" or (name == "gemm.bias" and weight.dim() == 1)
            self._weights[key] = digests.of_weight(weight, column, by_value=by_value)
        return self._weights[key]


def _constants(signature: inspect.Signature, args: tuple, kwargs: dict) -> dict[str, np.uint64]:
    """Numbers that a call is given besides tensors (eps, scale, leaves of a plan): name -> bits of
    the number as a float64. A rank has its own part of a plan, so there that is left out."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    found = {}
    for name, value in bound.arguments.items():
        if isinstance(value, ReductionPlan) and _rank() is None:
            value = float(value.leaves)
        if isinstance(value, float):
            found[f"{CONSTANT}{name}"] = np.float64(value).view(np.uint64)
    return found


def _each(constants: dict[str, np.uint64], rows: int) -> dict[str, np.ndarray]:
    """The constants as an operand of every row."""
    return {name: np.full(rows, value) for name, value in constants.items()}


def _rank() -> int | None:
    """Rank of this process among several, None where it is the only one."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.get_rank()
