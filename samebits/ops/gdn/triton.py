"""The core of the gated delta rule on Hopper: prefill, decoding, training.

The roundings are those of the CPU's law; sums follow the chip (README.md, "On a GPU"). On an H200
prefill, slices, decoding and the packed form gave one set of bits (`samebits.bench.gpu_gdn`); no
integer law of the chip stands behind them yet, and no contract binds them.

Operands are contiguous CUDA tensors (SB0420, SB0421), head sizes 32, 64 or 128 (SB0481), states as
`state_spec` lists them (SB0482). Values of slots, starts and lengths are not read by the host: the
engine answers for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samebits.errors import Refused
from samebits.ops import gpu
from samebits.ops.gdn import SCHEDULES, state_spec
from samebits.ops.gdn import triton_backward as backward
from samebits.ops.gdn import triton_chunk as chunk
from samebits.ops.gdn import triton_decode as decoding
from samebits.ops.gdn import triton_segments as segments

SIZES = (32, 64, 128)


def advance(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: Sequence[torch.Tensor],
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    schedule: str,
) -> torch.Tensor:
    """`gdn.advance` by the chunk kernels: any number of rows of each sequence, any phase.

    Shapes, dtypes and effects as there, tables on the device.
    """
    _check(q, k, v, g, beta, schedule)
    _check_state(schedule, k, v, state)
    if not len(v) or not len(slots):
        return chunk.zeros(v, schedule == "cpr")
    at = chunk.steps(query_start_loc, context_lens, slots, len(v))
    return chunk.forward(q, k, v, g, beta, state, at, scale, schedule == "cpr")[0]


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: Sequence[torch.Tensor],
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    schedule: str,
) -> torch.Tensor:
    """`gdn.advance` with one row of each of N sequences, by kernels that compute just that row.

    Row n belongs to the state in slots[n] (negative: padding, zeros). All launches depend on
    shapes alone, so that a CUDA graph may hold them; slots and context_lens int32.
    """
    _check(q, k, v, g, beta, schedule)
    _check_state(schedule, k, v, state)
    for name, table in (("slots", slots), ("context_lens", context_lens)):
        gpu.require(name, table, torch.int32, table.shape == v.shape[:1], f"[{len(v)}]")
    if not len(v):
        return chunk.zeros(v, schedule == "cpr")
    return decoding.step(q, k, v, g, beta, state, slots, context_lens, scale, schedule == "cpr")


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    schedule: str,
    initial_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gdn.varlen`: packed sequences from phase 0, differentiable as there.

    The backward of both schedules is that of the chunk form, from boundary states computed again
    between those kept.
    """
    _check(q, k, v, g, beta, schedule)
    if initial_state is not None:
        shape = (len(cu_seqlens) - 1, v.shape[1], k.shape[2], v.shape[2])
        fits = initial_state.shape == shape
        gpu.require("initial_state", initial_state, torch.float32, fits, str(list(shape)))
    if not len(v):
        return chunk.zeros(v, schedule == "cpr")
    return Varlen.apply(q, k, v, g, beta, initial_state, cu_seqlens, scale, schedule == "cpr")


class Varlen(torch.autograd.Function):
    """`varlen` without checks; `raw` is true for cpr."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, starts, scale, raw):
        """o [T, HV, V]; for the backward the operands are kept and what `segments.Kept` lists."""
        h, at = chunk.whole_sequences(v, k.shape[2], initial_state, starts)
        o, work = chunk.forward(q, k, v, g, beta, [h], at, scale, raw)
        if any(ctx.needs_input_grad):
            kept = segments.keep(work, at, len(v))
            ctx.save_for_backward(q, k, v, initial_state, at.starts, *vars(kept).values())
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx, grad):
        """Gradients of the tensor operands; None for the rest."""
        q, k, v, initial_state, starts, *kept = ctx.saved_tensors
        found = backward.gradients(
            q, k, v, segments.Kept(*kept), initial_state, starts, ctx.scale,
            grad.to(v.dtype).contiguous(),
        )  # fmt: skip
        return *found, None, None, None


def boundary(state: Sequence[torch.Tensor]) -> torch.Tensor:
    """fp32 boundary states [slots, HV, K, V] of a state as `state_spec` of sm90 lists it."""
    high, rest, ties = state[:3]
    if high.dtype != torch.bfloat16:
        return high
    bit = torch.arange(high.shape[3], device=high.device) % 8
    tie = ties.int().repeat_interleave(8, 3) >> bit & 1
    bits = (high.view(torch.int16).int() << 16) + rest.int() + (tie << 16)
    return bits.int().view(torch.float32)


def _check(q, k, v, g, beta, schedule) -> None:
    gpu.prepare(v.device.index or 0)
    if schedule not in SCHEDULES:
        raise _refused("SB0480", f"schedule {schedule!r}", f"one of {', '.join(SCHEDULES)}")
    gpu.require("q", q, torch.bfloat16, q.dim() == 3, "[T, HK, K]")
    gpu.require("k", k, torch.bfloat16, k.shape == q.shape, f"{list(q.shape)}, as q")
    tokens, key_heads, key_size = k.shape
    gpu.require("v", v, torch.bfloat16, v.dim() == 3 and len(v) == tokens, f"[{tokens}, HV, V]")
    heads, size = v.shape[1:]
    for name, x in (("g", g), ("beta", beta)):
        gpu.require(name, x, torch.float32, x.shape == (tokens, heads), f"[{tokens}, {heads}]")
    if key_size not in SIZES or size not in SIZES or not key_heads or heads % key_heads:
        raise _refused(
            "SB0481",
            f"key heads {key_heads} x {key_size}, value heads {heads} x {size}",
            "head sizes of 32, 64 or 128, value heads a multiple of key heads",
        )


def _check_state(schedule, k, v, state) -> None:
    spec = state_spec(schedule, k.shape[1], v.shape[1], k.shape[2], v.shape[2], "sm90")
    if len(state) != len(spec):
        raise _refused("SB0482", f"{len(state)} tensors", f"{len(spec)} tensors")
    for x, (name, shape, dtype) in zip(state, spec, strict=True):
        packed = len(x) == 0 or x[0].is_contiguous()
        if x.shape[1:] != shape or x.dtype != dtype or x.device != v.device or not packed:
            raise _refused(
                "SB0482",
                f"{name} {list(x.shape)} {x.dtype} on {x.device}, strides {list(x.stride())}",
                f"[slots, {', '.join(map(str, shape))}] {dtype}, contiguous inside a slot",
            )


def _refused(error_id: str, seen: str, required: str) -> Refused:
    return Refused(error_id, seen=seen, required=required, hint=f"samebits explain {error_id}")
