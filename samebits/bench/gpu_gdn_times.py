"""Times of Gated DeltaNet's core on Hopper beside flash-linear-attention; part of
`samebits.bench.gpu`.

flash-linear-attention must be importable. Its chunk and recurrent kernels take the same
operands: normalised q and k, log decays, fp32 states, half as many key heads as value heads. Where
FlashQLA is importable, prefill has rows against it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from samebits.bench import gpu_gdn_fla
from samebits.bench.gpu_gdn import (
    O_ERROR_ELSEWHERE,
    SCALE,
    SIZE,
    Sequences,
    State,
    integers,
    packed_from,
    poisoned,
)
from samebits.bench.gpu_gdn_fla import row
from samebits.bench.gpu_timing import Calls, Row, medians
from samebits.ops import gdn
from samebits.ops.gdn import errors
from samebits.ops.gdn import triton as kernels

HEADS = (32, 8, 4, 16)  # value heads
PREFILLS = ((1, 10240), (5, 2048))  # sequences, tokens of each
DECODES = (16, 256, 1024)  # sequences
CLOSED = 256  # sequences that are also timed where all close a chunk
# Of fp32 states in one graph of decoding steps, as that of a model holds a step of each layer: more
# than caches hold; and most steps of a graph. A graph of one short step shows its own launch.
ALL_STATES, STEPS = 256 << 20, 16
PREFILL_STEPS = 4
TARGETS = {4: 0.75, 8: 0.65, 32: 0.55}  # of decoding CLOSED sequences, phases spread


def rows() -> Iterator[Row]:
    """Forward of the core against flash-linear-attention."""
    for heads in HEADS:
        for count, length in PREFILLS:
            theirs, *ours = medians(prefill_sides(heads, count, length)[: 1 + len(gdn.SCHEDULES)])
            yield from _prefill_rows(heads, count, length, ours, "fla chunk", theirs, 0.90)
        for count in DECODES:
            theirs, *ours = medians(decode_sides(heads, count))
            for (schedule, phase), time in zip(_decodes(count), ours, strict=True):
                target: float | None = 2.0 if phase == "closing" else 1.0
                if phase == "middle" and count == CLOSED:
                    target = TARGETS.get(heads)
                work = f"gdn {schedule}, decode {count} x 1, {phase}, {heads} heads"
                yield row(work, time, "fla fused recurrent, fp32 state", theirs, target)
    yield from flash_qla_rows()


def _prefill_rows(
    heads: int,
    count: int,
    length: int,
    ours: Sequence[float],
    name: str,
    theirs: float,
    target: float,
) -> Iterator[Row]:
    for schedule, time in zip(gdn.SCHEDULES, ours, strict=True):
        work = f"gdn {schedule}, prefill {count} x {length}, {heads} heads"
        yield row(work, time, name, theirs, target)


def flash_qla_rows() -> Iterator[Row]:
    """Prefill against FlashQLA where it is at hand; last, as it is not ours to make it run."""
    for heads in HEADS if gpu_gdn_fla.flash_qla_at_hand() else ():
        for count, length in PREFILLS:
            try:
                law, *ours, theirs = prefill_sides(heads, count, length)
                distance = _distance(theirs, law)
                if not distance <= O_ERROR_ELSEWHERE:
                    raise ValueError(f"its outputs are {distance:.1e} from those of fla chunk")
                times = medians([*ours, theirs])
            except Exception as error:
                print(
                    f"no row against FlashQLA, prefill {count} x {length}, {heads} heads: {error}"
                )
                continue
            *found, time = times
            name = gpu_gdn_fla.FLASH_QLA
            yield from _prefill_rows(heads, count, length, found, name, time, 1.25)


def _distance(found: Calls, law: Calls) -> float:
    a, b = (calls[0]() for calls in (found, law))
    return errors.relative(a[0], b[0].double())  # type: ignore[index]


def prefill_sides(heads: int, count: int, length: int) -> list[Calls]:
    """Calls of flash-linear-attention, of each schedule, and of FlashQLA where it is at hand."""
    data = drawn(heads, [length] * count)
    q, k, v, g, beta = data.operands
    starts, zero, slots = (integers(x) for x in (data.starts, [0] * count, range(count)))
    sides: list[Calls] = [[_native(gpu_gdn_fla.chunk(), data)] * PREFILL_STEPS]
    for schedule in gdn.SCHEDULES:
        state = poisoned(schedule, heads // 2, heads, count)
        step = partial(kernels.advance, q, k, v, g, beta, state, slots, starts, zero)
        sides.append([partial(step, SCALE, schedule)] * PREFILL_STEPS)
    if gpu_gdn_fla.flash_qla_at_hand():
        sides.append([_native(gpu_gdn_fla.flash_qla(), data)] * PREFILL_STEPS)
    return sides


def decode_sides(heads: int, count: int) -> list[Calls]:
    """Calls for one token of each sequence: of flash-linear-attention, then of `_decodes`; each
    call of a side has states of its own."""
    data = drawn(heads, [1] * count)
    q, k, v, g, beta = data.operands
    slots = integers(range(count))
    phases = {
        "middle": [n % (gdn.CHUNK - 1) for n in range(count)],
        "closing": [gdn.CHUNK - 1] * count,
    }
    at = {name: integers([gdn.CHUNK + n for n in phase]) for name, phase in phases.items()}
    steps = min(STEPS, max(1, ALL_STATES // (4 * count * heads * SIZE * SIZE)))
    states = {s: [used(s, heads, count) for _ in range(steps)] for s in gdn.SCHEDULES}
    native = gpu_gdn_fla.recurrent()
    sides: list[Calls] = [[_native(native, data, state=True) for _ in range(steps)]]
    for schedule, phase in _decodes(count):
        side = [
            partial(kernels.decode, q, k, v, g, beta, state, slots, at[phase], SCALE, schedule)
            for state in states[schedule]
        ]
        sides.append(side)
    return sides


def _decodes(count: int) -> list[tuple[str, str]]:
    """Schedule and phases. `middle`: spread, no chunk closes; `closing`: every chunk closes."""
    phases = ("middle", "closing") if count == CLOSED else ("middle",)
    return [(schedule, phase) for schedule in gdn.SCHEDULES for phase in phases]


def used(schedule: str, heads: int, count: int) -> State:
    """Left-over values of a used state, not NaN: a phase needs the rows before it."""
    state = poisoned(schedule, heads // 2, heads, count)
    for x in state:
        if x.is_floating_point():
            x.normal_(0, 0.05)
        else:
            x.zero_()
    return state


def drawn(heads: int, lengths: Sequence[int]) -> Sequences:
    """Scenario `n`, drawn on the GPU: long ones take the host seconds."""
    tokens = sum(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, device="cuda")

    q, k = (
        torch.nn.functional.normalize(normal(heads // 2, SIZE), dim=-1).bfloat16() for _ in range(2)
    )
    g = -0.3 * torch.rand(tokens, heads, device="cuda")
    operands = (q, k, normal(heads, SIZE).bfloat16(), g, normal(heads).sigmoid())
    return Sequences(operands, packed_from(lengths))


def _native(
    function: Callable[..., object], data: Sequences, state: bool = False
) -> Callable[[], object]:
    q, k, v, g, beta = (x[None] for x in data.operands)
    shape = (len(data.lengths), v.shape[2], SIZE, SIZE)
    return partial(
        function, q, k, v, g, beta=beta, scale=SCALE, cu_seqlens=integers(data.starts).long(),
        output_final_state=True,
        initial_state=torch.randn(shape, device="cuda") * 0.05 if state else None,
    )  # fmt: skip
