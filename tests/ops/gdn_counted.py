"""Counts what the Hopper kernels of gated delta nets move and multiply, under Triton's interpreter.

A program of its own because TRITON_INTERPRET counts when a kernel is defined. fp16 takes the place
of bf16, which the interpreter multiplies wrongly: it is as wide. Bytes are distinct addresses of
floating-point elements and of the integers of a state in each launch, not of tables. Prints, for
each path, what one chunk adds, and the error of the outputs against float64: what was counted did
compute them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import gdn_interpreted as interpreted
import numpy as np
import torch
from triton.runtime import interpreter

from samebits.ops import gdn
from samebits.ops.gdn import (
    oracle,
    triton_backward,
    triton_chunk,
    triton_decode,
    triton_inverse,
    triton_parts,
    triton_segments,
)

# Two tiles of columns or more in every kernel that has them.
KEY_HEADS, HEADS, KEY, VALUE, CHUNK, BLOCK = 1, 2, 16, 128, 8, 4
SCALE = 0.3

count: Counter[str] = Counter()
touched: dict[str, list[np.ndarray]] = {"read": [], "written": []}
_inside = [True]
_words = range(0)  # addresses of a state's ties, which kernels read as int32, as they do tables


def observe() -> None:
    """Count every load, store, matrix product and fma step; those of exp2 are left out."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    dot, fma, launch = builder.create_dot, builder.create_fma, executor.__call__

    def touch(what, pointers, mask):
        kind = pointers.get_element_ty()
        width = kind.primitive_bitwidth // 8
        live = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        live = live.astype(np.int64)
        if not kind.is_floating() and width == 4:
            live = live[(live >= _words.start) & (live < _words.stop)]
        if kind.is_floating() or width <= 4:
            touched[what].append(live * 8 + width)

    def counted_load(self, pointers, mask, *rest, **named):
        touch("read", pointers, mask)
        return load(self, pointers, mask, *rest, **named)

    def counted_store(self, pointers, value, mask, *rest, **named):
        touch("written", pointers, mask)
        return store(self, pointers, value, mask, *rest, **named)

    def counted_dot(self, a, b, *rest):
        count["multiply_adds"] += a.data.size * b.data.shape[-1]
        return dot(self, a, b, *rest)

    def counted_fma(self, x, y, z):
        if _inside[-1]:
            count["multiply_adds"] += z.data.size
        return fma(self, x, y, z)

    def counted_launch(self, *args, **kwargs):
        for parts in touched.values():
            parts.clear()
        launch(self, *args, **kwargs)
        for what, parts in touched.items():
            distinct = np.unique(np.concatenate([np.empty(0, np.int64), *parts]))
            count[what] += int((distinct % 8).sum())

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    builder.create_dot, builder.create_fma = counted_dot, counted_fma
    executor.__call__ = counted_launch

    def outside(function):
        def call(x):
            _inside.append(False)
            try:
                return function(x)
            finally:
                _inside.pop()

        return call

    def fold(x, *rest):
        count["multiply_adds"] += x.handle.data.size
        return folded(x, *rest)

    folded = triton_parts.fold
    triton_parts.fold = fold
    for module in (triton_parts, triton_inverse, triton_decode):
        module.exp2_32 = outside(module.exp2_32)


def operands(tokens: int) -> list[torch.Tensor]:
    rows = interpreted.operands(tokens, KEY_HEADS, HEADS, KEY, VALUE)
    return [x.half() for x in rows[:3]] + rows[3:]


def chunks(what: str, raw: bool, number: int) -> tuple[Counter[str], float]:
    """One sequence of whole chunks from phase 0: the forward, or the backward alone."""
    rows = operands(number * CHUNK)
    starts = torch.tensor([0, number * CHUNK])
    count.clear()
    h, at = triton_chunk.whole_sequences(rows[2], KEY, None, starts)
    o, work = triton_chunk.forward(*rows, [h], at, SCALE, raw)
    if what == "prefill":
        wanted, _ = oracle.recurrence(rows, starts.tolist(), SCALE)
        return count.copy(), interpreted.error(o, wanted)
    grad = torch.randn(rows[2].shape).half()
    kept = triton_segments.keep(work, at, len(grad))
    count.clear()
    found = triton_backward.gradients(*rows[:3], kept, None, at.starts, SCALE, grad)
    leaves = [x.double().requires_grad_() for x in rows]
    o, _ = oracle.recurrence(leaves, starts.tolist(), SCALE)
    wanted = torch.autograd.grad(o, leaves, grad.double())
    return count.copy(), max(interpreted.error(a, b) for a, b in zip(found, wanted, strict=False))


def decode(schedule: str) -> tuple[Counter[str], float]:
    """All rows of a chunk, one launch or two for each, behind a state that is there."""
    rows = operands(CHUNK)
    state = []
    for _, shape, dtype in gdn.state_spec(schedule, KEY_HEADS, HEADS, KEY, VALUE, "sm90"):
        dtype = torch.half if dtype == torch.bfloat16 else dtype
        state.append(torch.zeros((1, *shape), dtype=dtype))
        if dtype.is_floating_point:
            state[-1].fill_(torch.nan)
    state[0].normal_()
    if schedule == "chunk_row":
        global _words
        ties = state[2]
        _words = range(ties.data_ptr(), ties.data_ptr() + ties.nbytes)
    wanted, _ = oracle.recurrence(rows, [0, CHUNK], SCALE, state[0].clone())
    slots, outputs = torch.zeros(1, dtype=torch.int32), []
    count.clear()
    for i in range(CHUNK):
        row = [x[i : i + 1] for x in rows]
        context = torch.tensor([CHUNK + i], dtype=torch.int32)
        outputs.append(
            triton_decode.step(*row, state, slots, context, SCALE, raw=schedule == "cpr")
        )
    return count.copy(), interpreted.error(torch.cat(outputs), wanted)


def main() -> None:
    interpreted.patch_once()
    interpreted.chunks_of(CHUNK, BLOCK)
    observe()
    found = {}
    for schedule in gdn.SCHEDULES:
        found[f"decode {schedule}"] = decode(schedule)
        short, _ = chunks("prefill", schedule == "cpr", 1)
        long, error = chunks("prefill", schedule == "cpr", 2)
        found[f"prefill {schedule}"] = (long - short, error)
    short, _ = chunks("backward", False, 1)
    long, error = chunks("backward", False, 2)
    found["backward"] = (long - short, error)
    json.dump({name: {**counts, "error": e} for name, (counts, e) in found.items()}, sys.stdout)


if __name__ == "__main__":
    main()
