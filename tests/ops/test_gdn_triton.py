"""Hopper kernels of gated delta nets where there is no GPU: control flow and types.

Control flow runs under Triton's interpreter in fp32, in a process of its own
(`gdn_interpreted.py`), held against float64. Types are held by compiling for sm90. Neither says
anything about a bit on a chip.
"""

from __future__ import annotations

import interpreter
import pytest
import torch

pytest.importorskip("triton")

import compiled_sm90

from samebits.errors import Refused
from samebits.ops import gdn, gpu, sums_backward
from samebits.ops.conv1d import triton as conv1d
from samebits.ops.conv1d import triton_backward as conv1d_backward
from samebits.ops.gated_rms_norm import triton as gated_rms_norm
from samebits.ops.gated_rms_norm import triton_backward as gated_backward
from samebits.ops.gdn import (
    gluon_chain,
    gluon_close,
    gluon_decode,
    gluon_decode_few,
    gluon_gradients,
    gluon_reverse,
    gluon_rows,
    tiles_sm90,
    triton_backward,
    triton_chunk,
    triton_decode,
    triton_decode_cpr,
    triton_inverse,
    triton_scan,
    triton_segments,
)
from samebits.ops.gdn_gate import triton as gdn_gate
from samebits.ops.l2_norm import triton as l2_norm
from samebits.ops.l2_norm import triton_backward as l2_backward

GRADIENTS = {f"gradient of {x}" for x in ("q", "k", "v", "g", "beta", "initial state")}
OUTPUTS = {"o", "o from zero"}
STATES = {"o of 0", "boundary of 0", "o of 1", "boundary of 1"}
CHECKS = {
    "convolution": {
        *("y", "fresh", "window", "packed", "single rows", "window of single rows"),
    },
    **{
        f"convolution's gradients, {taps} taps, {count} sequences, {behind} behind": {"x", "weight"}
        for taps, count, behind in (
            *((4, 8, 0), (4, 1, 0), (2, 3, 0), (1, 2, 0)),
            *((4, 2, 11), (2, 1, 2)),
        )
    },
    "elements": {
        *("l2", "l2 of heads", "gated", "gated of heads", "g", "beta", "gradient of l2"),
        *(f"gradient of gated in {x}{eps}" for x in "xzw" for eps in ("", ", eps 0")),
    },
    "varlen chunk_row": OUTPUTS | GRADIENTS,
    "varlen cpr": OUTPUTS,
    "varlen of 64 chunk_row": OUTPUTS | GRADIENTS,
    "varlen of 64 cpr": OUTPUTS,
    "steps chunk_row": STATES | {"gamma", "u", "k", "t", "x"},
    "steps cpr": STATES,
}
TOLERANCE = 5e-6  # fp32 sums of at most 128 terms; seen: 1e-6


@pytest.fixture(scope="module")
def errors():
    return interpreter.run("gdn_interpreted.py")


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(errors, check):
    assert set(errors[check]) == CHECKS[check]
    assert all(error <= TOLERANCE for error in errors[check].values()), errors[check]


def train(rows, starts, raw):
    """All launches of a forward and its backward; kernels may be stand-ins that compute nothing."""
    q, k, v = rows[:3]
    h, at = triton_chunk.whole_sequences(v, k.shape[2], None, starts)
    _, work = triton_chunk.forward(*rows, [h], at, 0.1, raw)
    first, origin = triton_segments.cut(at, len(v), *v.shape[1:])
    states = work.entry[: len(first) - 1]
    kept = triton_segments.Kept(work.rows, work.t, at.places, at.base, states, first, origin)
    triton_backward.gradients(q, k, v, kept, None, at.starts, 0.1, v)


def decode(rows, state, raw):
    """Steps of one row and of as many as do not fit into one launch."""
    for count in (1, tiles_sm90.FEW_PAIRS):
        many = [torch.zeros(count, *x.shape[1:], dtype=x.dtype) for x in rows]
        table = torch.zeros(count, dtype=torch.int32)
        triton_decode.step(*many, state, table, table, 0.1, raw)


@pytest.mark.parametrize(("slot", "begin"), [(64 * 64 + 4, 0), (64 * 64 + 8, 1)])
def test_slots_that_bulk_copies_cannot_reach_are_refused(slot, begin):
    room = torch.zeros(2 * slot + 8, dtype=torch.bfloat16)
    state = room[begin:].as_strided((2, 1, 64, 64), (slot, 64 * 64, 64, 1))
    with pytest.raises(Refused) as refused:
        gluon_close.pieces(state, 64, 64)
    assert refused.value.error_id == "SB0482"


def launches():
    """(kernel, arguments) of every launch on operands of head size 128, of chunk_row of all."""
    modules = (
        triton_inverse, triton_scan, gluon_chain, triton_chunk, gluon_rows, triton_decode,
        gluon_decode_few, gluon_close, gluon_decode, triton_decode_cpr, triton_segments,
        triton_backward, gluon_reverse, gluon_gradients, conv1d, l2_norm, gdn_gate, gated_rms_norm,
        conv1d_backward, gated_backward, l2_backward, sums_backward,
    )  # fmt: skip
    tokens, key_heads, heads, size = 130, 1, 2, 128
    k = torch.zeros(tokens, key_heads, size, dtype=torch.bfloat16)
    v = torch.zeros(tokens, heads, size, dtype=torch.bfloat16)
    g = torch.zeros(tokens, heads)
    starts, context, slots = (torch.tensor(x) for x in ([0, tokens], [3], [0]))
    with compiled_sm90.recorded(*modules) as recorders:
        for schedule in gdn.SCHEDULES:
            spec = gdn.state_spec(schedule, key_heads, heads, size, size, "sm90")
            state = [torch.zeros(1, *shape, dtype=dtype) for _, shape, dtype in spec]
            raw = schedule == "cpr"
            at = triton_chunk.steps(starts, context, slots, tokens)
            triton_chunk.forward(k, k, v, g, g, state, at, 0.1, raw)
            train((k, k, v, g, g), starts, raw)
            decode((k, k, v, g, g), state, raw)
        for less in (64, 32):
            narrow = [x[..., :less].contiguous() for x in (k, k, v)]
            spec = gdn.state_spec("chunk_row", key_heads, heads, less, less, "sm90")
            state = [torch.zeros(1, *shape, dtype=dtype) for _, shape, dtype in spec]
            at = triton_chunk.steps(starts, context, slots, tokens)
            triton_chunk.forward(*narrow, g, g, state, at, 0.1, False)
            decode((*narrow, g, g), state, False)
            train((*narrow, g, g), starts, False)
        flat, one = v.reshape(tokens, -1), torch.zeros(1, 3, heads * size).bfloat16()
        weight = torch.zeros(heads * size, 4).bfloat16()
        conv1d.launch(flat, weight, one, slots, starts, context, size)
        conv1d.launch(flat[:1], weight, one, slots, starts, context, size)
        place, _ = conv1d.places(starts.int(), tokens, 4)
        conv1d.packed(flat, weight, place, size)
        wide = torch.zeros(tokens, size)
        part = torch.zeros(tokens, (heads - 1) * size).bfloat16()
        conv1d_backward.gradients(flat, weight, place, wide, part)
        l2_norm.launch(k.float(), 1e-6, torch.bfloat16)
        for x in (v, v.float()):
            gated_rms_norm.launch(x, v, torch.zeros(size).bfloat16(), 1e-6)
            gated_backward.gradients(v, x, v, torch.zeros(size).bfloat16(), 1e-6)
        l2_backward.gradient(k, k.float(), 1e-6)
        half = g.bfloat16()
        gdn_gate.launch(half, half, g[0], half[0])
    return [(r.kernel, arguments) for r in recorders for _, arguments in r.calls]


def test_every_kernel_compiles_for_sm90(monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(gpu.ptxas()))
    seen = set()
    for kernel, arguments in launches():
        code = compiled_sm90.compiled(kernel, arguments)
        assert ".target sm_90a" in code.asm["ptx"]
        assert code.asm["cubin"]
        seen.add(f"{kernel.__module__.removeprefix('samebits.ops.')}.{kernel.__name__}")
    assert seen == {
        "gdn.triton_inverse._begin",
        "gdn.triton_inverse._lower",
        "gdn.triton_inverse._solve",
        "gdn.triton_scan._odd",
        "gdn.triton_scan._whole",
        "gdn.gluon_chain._whole",
        "gdn.gluon_rows._rows",
        "gdn.triton_chunk._rows",
        "gdn.triton_chunk._recur",
        "gdn.triton_chunk._save",
        "gdn.triton_decode._row",
        "gdn.gluon_close._close",
        "gdn.gluon_decode._state",
        "gdn.gluon_decode_few._few",
        "gdn.triton_decode._close",
        "gdn.triton_decode_cpr._recur_row",
        "gdn.triton_segments._cut",
        "gdn.triton_backward._inner",
        "gdn.triton_backward._reverse",
        "gdn.gluon_reverse._reverse",
        "gdn.gluon_gradients._gradients",
        "gdn.triton_backward._gradients",
        "conv1d.triton._rows",
        "conv1d.triton._shift",
        "conv1d.triton._steps",
        "conv1d.triton._places",
        "conv1d.triton_backward._gradients",
        "sums_backward._sum",
        "l2_norm.triton._kernel",
        "l2_norm.triton_backward._gradient",
        "gated_rms_norm.triton_backward._gradients",
        "gdn_gate.triton._kernel",
        "gated_rms_norm.triton._kernel",
    }
