"""Core of the gated delta rule (GDN): two schedules, each with one law for training and decoding.

For one value head with state S [K, V], per token: S = exp(g) S; S += k (beta (v - S^T k))^T;
o = scale S^T q. Positions are cut into chunks of `CHUNK` by absolute position, and the state at a
boundary is the same fp32 chain in both schedules:

    chunk_row   every row computes its own row of the chunk form from the bf16 snapshot of the
                boundary state, as the chain does
    cpr         inside a chunk the recurrence runs in fp32, restarted at every boundary from the
                fp32 state

Any slicing of a sequence into steps, any batch and any slot give the same bits (`reference.py` is
the law, README.md lists the roundings). HK key heads, HV value heads; value head h reads key head
h // (HV // HK). Refusals: SB0420 dtype, SB0421 shape, SB0480 schedule, SB0481 geometry, SB0482
state, SB0483 tables. A NaN result carries no bit promise: comparisons fail on every NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from samebits.bits import mixsum
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.checks import require_dtype, require_shape
from samebits.ops.gdn import backward, cpu
from samebits.ops.gdn.cpu import BLOCK, CHUNK, OUTPUTS
from samebits.ops.packed import integers, require_slots, require_starts

__all__ = ["CHUNK", "OUTPUTS", "SCHEDULES", "advance", "state_spec", "varlen"]

SCHEDULES = ("chunk_row", "cpr")

Spec = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def state_spec(
    schedule: str,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    platform: str = "cpu",
) -> Spec:
    """(name, shape without the slot dimension, dtype) of every state tensor on a platform.

    boundary [HV, K, V] fp32 is the state at the last boundary, chained. All others hold rows of the
    open chunk and are dead at a boundary (context length a multiple of `CHUNK`): there a sequence
    is its boundary tensor alone. k is stored as [HK, K, CHUNK].

    chunk_row on sm90 keeps the same fp32 values in planes, the first of which is all that decoding
    reads inside a chunk: boundary in bf16, rest [HV, K, V] int16 (bits(h) - (bits(boundary) << 16)
    modulo 2^16) and, where that difference is 2^15, bit v % 8 of byte v // 8 of ties [HV, K, V / 8]
    int8.
    """
    _check_schedule(schedule)
    f32, bf16 = torch.float32, torch.bfloat16
    square = (value_heads, key_dim, value_dim)
    keys = (key_heads, key_dim, CHUNK)
    rows = (value_heads, CHUNK, value_dim)
    if schedule == "cpr":
        return (
            ("boundary", square, f32),
            ("running", square, f32),
            ("g", (value_heads, CHUNK), f32),
            ("beta", (value_heads, CHUNK), f32),
            ("k", keys, bf16),
            ("v", rows, bf16),
        )
    kept: Spec = (("boundary", square, f32),)
    if platform == "sm90":
        bits = (value_heads, key_dim, value_dim // 8)
        kept = (
            ("boundary", square, bf16),
            ("rest", square, torch.int16),
            ("ties", bits, torch.int8),
        )
    return (
        *kept,
        ("x", (value_heads, BLOCK, CHUNK), f32),
        ("gamma", (value_heads, CHUNK), f32),
        ("k", keys, bf16),
        ("r", rows, bf16),
        ("u", rows, bf16),
        ("t", (value_heads, CHUNK, CHUNK), bf16),
    )


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
    *,
    most: int | None = None,
) -> torch.Tensor:
    """One step of R sequences -> o [T, HV, V] of dtype `OUTPUTS[schedule]`; states move in place.

    q, k             [T, HK, K] bf16, l2-normalised by the caller
    v                [T, HV, V] bf16
    g, beta          [T, HV] fp32; g, the log of the decay, is finite and <= 0. Not checked: the law
                     takes any g, but a positive one may overflow, and -inf makes later rows NaN
    state            tensors [slots, ...] as `state_spec` lists them; only dim 0 may be strided
    slots            [R] integers: index into dim 0 of every state tensor, all distinct
    query_start_loc  [R + 1] integers, cumulative, from 0; rows past the last one give zeros
    context_lens     [R] integers: tokens of each sequence before this step; 0 starts from a zero
                     state whatever the slot holds
    most             no sequence has more rows: where it is 1, CUDA tensors take the kernels that
                     decode; ignored on a CPU
    Forward only. A sequence without rows is left as it is. CUDA tensors: `sm90.advance`.
    """
    if q.is_cuda:
        from samebits.ops.gdn import sm90

        tables = slots, query_start_loc, context_lens
        return sm90.advance(q, k, v, g, beta, state, *tables, scale, schedule, most=most)
    heads = _check_operands(q, k, v, g, beta, scale)
    _check_state(schedule, heads, state)
    at, starts, context = (integers(x) for x in (slots, query_start_loc, context_lens))
    require_starts(starts, q.shape[0], whole=False)
    require_slots(at, context, len(starts) - 1, state[0].shape[0])
    registry.count_served("gdn.core", int(starts[-1]))
    return _forward(
        schedule, (q, k, v, g, beta), state, at, starts, context % CHUNK, context == 0, scale
    )


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
    """Packed sequences, each from phase 0 -> o [T, HV, V], the dtype and bits of `advance`.

    Operands as in `advance`; cu_seqlens [R + 1] integers, cumulative, from 0 to T. initial_state
    [R, HV, K, V] fp32 (zero when not given) takes the place of a boundary state. Differentiable
    in q, k, v, g, beta and initial_state: the backward is that of the fp32 chunk form without the
    schedule's inner roundings, rounded once to each operand's dtype; it carries no bit promise.
    CUDA tensors: `sm90.varlen`.
    """
    if q.is_cuda:
        from samebits.ops.gdn import sm90

        return sm90.varlen(q, k, v, g, beta, cu_seqlens, scale, schedule, initial_state)
    heads = _check_operands(q, k, v, g, beta, scale)
    _check_schedule(schedule)
    starts = integers(cu_seqlens)
    require_starts(starts, q.shape[0], whole=True)
    if initial_state is not None:
        require_dtype("initial_state", initial_state, torch.float32)
        shape = (len(starts) - 1, heads[1], heads[2], heads[3])
        require_shape("initial_state", initial_state, initial_state.shape == shape, str(shape))
    registry.count_served("gdn.core", q.shape[0])
    operands = (q, k, v, g, beta, initial_state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands):
        return _Varlen.apply(*operands, starts, scale, schedule)
    return _packed(*operands, starts, scale, schedule)


def _packed(q, k, v, g, beta, initial_state, starts, scale, schedule) -> torch.Tensor:
    """`varlen` without checks: `advance` over a scratch state."""
    count = len(starts) - 1
    spec = state_spec(schedule, k.shape[1], v.shape[1], k.shape[2], v.shape[2])
    state = [torch.empty((count, *shape), dtype=dtype) for _, shape, dtype in spec]
    if initial_state is not None:
        state[0].copy_(initial_state)
    fresh = np.full(count, initial_state is None)
    at, phases = np.arange(count), np.zeros(count, np.int64)
    return _forward(schedule, (q, k, v, g, beta), state, at, starts, phases, fresh, scale)


def _forward(schedule, operands, state, slots, starts, phases, fresh, scale) -> torch.Tensor:
    q, k, v, g, beta = (x.detach().contiguous() for x in operands)
    out = torch.empty(v.shape, dtype=OUTPUTS[schedule])
    out[int(starts[-1]) :] = 0
    cpu.advance(schedule, q, k, v, g, beta, state, slots, starts, phases, fresh, scale, out)
    return out


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, starts, scale, schedule):
        ctx.save_for_backward(q, k, v, g, beta, initial_state)
        ctx.starts, ctx.scale = starts, scale
        return _packed(q, k, v, g, beta, initial_state, starts, scale, schedule)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, g, beta, initial_state = ctx.saved_tensors
        grads = backward.gradients(q, k, v, g, beta, initial_state, ctx.starts, ctx.scale, grad)
        return *grads, None, None, None


def _refused(error_id: str, seen: str, required: str) -> Refused:
    return Refused(error_id, seen=seen, required=required, hint=f"samebits explain {error_id}")


def _check_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise _refused("SB0480", f"schedule {schedule!r}", f"one of {', '.join(SCHEDULES)}")


def _check_operands(q, k, v, g, beta, scale) -> tuple[int, int, int, int]:
    """(HK, HV, K, V) of operands that some schedule covers."""
    for name, tensor, dtype in (
        ("q", q, torch.bfloat16),
        ("k", k, torch.bfloat16),
        ("v", v, torch.bfloat16),
        ("g", g, torch.float32),
        ("beta", beta, torch.float32),
    ):
        require_dtype(name, tensor, dtype)
    require_shape("q", q, q.dim() == 3, "[T, HK, K]")
    require_shape("k", k, k.shape == q.shape, f"{list(q.shape)}, as q")
    tokens, key_heads, key_dim = q.shape
    require_shape("v", v, v.dim() == 3 and v.shape[0] == tokens, f"[{tokens}, HV, V]")
    heads, value_dim = v.shape[1:]
    for name, tensor in (("g", g), ("beta", beta)):
        require_shape(name, tensor, tensor.shape == (tokens, heads), f"[{tokens}, {heads}]")
    if (
        min(key_heads, heads, key_dim, value_dim) == 0
        or heads % key_heads
        or key_dim % 16
        or value_dim % 16
        or not 0 < scale < float("inf")
    ):
        raise _refused(
            "SB0481",
            f"key heads {key_heads} x {key_dim}, value heads {heads} x {value_dim}, scale {scale}",
            "head sizes in multiples of 16, value heads a multiple of key heads, a positive scale",
        )
    return key_heads, heads, key_dim, value_dim


def _check_state(
    schedule: str, heads: tuple[int, int, int, int], state: Sequence[torch.Tensor]
) -> None:
    spec = state_spec(schedule, *heads)
    if len(state) != len(spec):
        raise _refused("SB0482", f"{len(state)} tensors", f"{len(spec)} tensors")
    for tensor, (name, shape, dtype) in zip(state, spec, strict=True):
        slots = state[0].shape[0]
        if (
            tensor.shape != (slots, *shape)
            or tensor.dtype != dtype
            or tensor.device.type != "cpu"
            or (slots > 0 and not tensor[0].is_contiguous())
            or (slots > 1 and tensor.stride(0) < tensor[0].numel())
        ):
            raise _refused(
                "SB0482",
                f"{name} {list(tensor.shape)} {tensor.dtype} with strides {list(tensor.stride())}",
                f"{[slots, *shape]} {dtype}, contiguous inside a slot",
            )


def _probe() -> int:
    # Two sequences, one across two boundaries, cut inside a chunk; K != V, two value heads a key.
    tokens, key_heads, heads, key_dim, value_dim = 2 * CHUNK + 9, 1, 2, 32, 16
    q, k = (samples.bf16((tokens, key_heads, key_dim), seed, -5, -1) for seed in (1, 2))
    v = samples.bf16((tokens, heads, value_dim), 3, -3, 3)
    g = -samples.fp32((tokens, heads), 4, -9, 1).abs()
    beta = samples.fp32((tokens, heads), 5, -4, 0).abs()
    digests = []
    for schedule in SCHEDULES:
        starts = torch.tensor([0, 5, tokens])
        o = varlen(q, k, v, g, beta, starts, key_dim**-0.5, schedule)
        spec = state_spec(schedule, key_heads, heads, key_dim, value_dim)
        state = [torch.zeros((1, *shape), dtype=dtype) for _, shape, dtype in spec]
        zero, ends = torch.tensor([0]), torch.tensor([0, tokens])
        advance(q, k, v, g, beta, state, zero, ends, zero, key_dim**-0.5, schedule)
        digests += [mixsum(torch.cat([o.float().flatten(), state[0].flatten()]))]
    return mixsum(np.array([half >> 64 ^ half & (1 << 64) - 1 for half in digests], np.uint64))


registry.register(
    registry.Implementation(
        region="gdn.core",
        id="gdn.core.cpu.1",
        platform="cpu",
        constants={
            "schedule": "contract",
            "chunk": CHUNK,
            "block": BLOCK,
            "boundary_chained": "fp32",
            "boundary_consumed": "bf16; for o of cpr fp32",
            "output": "fp32; of cpr bf16",
            "g": "fp32",
            "beta": "fp32",
        },
        modules=(
            "samebits.ops.jit",
            "samebits.ops.scalar",
            "samebits.ops.vector",
            "samebits.ops.gdn_scalar",
            "samebits.ops.packed",
            "samebits.ops.gdn",
            "samebits.ops.gdn.cpu",
        ),
        probe=_probe,
    )
)
