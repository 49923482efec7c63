"""Bit gates of Gated DeltaNet's core on Hopper; part of `samebits.bench.gpu`.

One row's bits are its own: the same token must come out of a whole prefill, of slices cut anywhere,
of decoding from any phase inside a CUDA graph, alone and in a batch, and of the trainer's packed
form. The boundary state must agree wherever two ways stand at one boundary. Slots are filled with
NaN before a sequence takes them. Equal bits can be equally wrong, so o and every gradient are held
against the recurrence in float64 as well.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from samebits.bench.gpu_gates import Tally
from samebits.bench.gpu_timing import captured
from samebits.errors import Different, NotObserved
from samebits.ops import gdn
from samebits.ops.gdn import errors, oracle, scenarios, tiles_sm90
from samebits.ops.gdn import triton as kernels

SIZE = 128
SCALE = SIZE**-0.5
LENGTHS = (1, 63, 64, 65, 128, 130, 200)
SHAPES = ((2, 4), (4, 4), (16, 32))  # key heads, value heads
# Largest relative error in the 2-norm: about twice that of the law on the same kind of input.
O_ERROR = {"corr": 3e-2}
O_ERROR_ELSEWHERE = 8e-3
GRADIENT_ERROR = 1e-2
HAZARDS = (
    "boundary crossed in decode",
    "two cross in one step",
    "slice ends on a boundary",
    "slice ends before a boundary",
    "slice ends after a boundary",
    "slice inside a chunk",
    "slot reused",
)
TIE = "tie of a boundary state"  # a bit of its own in planes
State = list[torch.Tensor]


@dataclass(frozen=True)
class Sequences:
    """Packed operands q, k, v, g, beta of sequences cut at `starts`."""

    operands: scenarios.Operands
    starts: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)]

    def rows(self, index: Sequence[int] | slice) -> scenarios.Operands:
        """Operands of some packed rows, contiguous."""
        q, k, v, g, beta = (x[index].contiguous() for x in self.operands)
        return q, k, v, g, beta


def sequences(name: str, key_heads: int, heads: int, lengths: Sequence[int]) -> Sequences:
    """Sequences of one scenario on the GPU."""
    made = scenarios.make(name, sum(lengths), key_heads, heads, SIZE, SIZE)
    q, k, v, g, beta = (x.cuda() for x in made)
    return Sequences((q, k, v, g, beta), packed_from(lengths))


def packed_from(lengths: Sequence[int]) -> tuple[int, ...]:
    """First row of each packed sequence, and the end of the last."""
    return (0, *itertools.accumulate(lengths))


def poisoned(schedule: str, key_heads: int, heads: int, slots: int) -> State:
    """State tensors whose every slot holds NaN, or a pattern where they hold integers."""
    spec = gdn.state_spec(schedule, key_heads, heads, SIZE, SIZE, "sm90")
    return [
        torch.full(
            (slots, *shape),
            torch.nan if dtype.is_floating_point else 0x55,
            dtype=dtype,
            device="cuda",
        )
        for _, shape, dtype in spec
    ]


def integers(values: Sequence[int]) -> torch.Tensor:
    """int32 on the GPU."""
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def advance(
    data: Sequences,
    state: State,
    slots: Sequence[int],
    at: Sequence[int],
    to: Sequence[int],
    schedule: str,
) -> torch.Tensor:
    """Rows at[r] .. to[r] of every sequence in one step; o of these rows, packed."""
    picked = [
        data.starts[r] + i for r, (a, b) in enumerate(zip(at, to, strict=True)) for i in range(a, b)
    ]
    ends = [0]
    for a, b in zip(at, to, strict=True):
        ends.append(ends[-1] + b - a)
    return kernels.advance(
        *data.rows(picked), state, integers(slots), integers(ends), integers(at), SCALE, schedule
    )


class Decoder:
    """One row of each of N sequences, again and again, in one CUDA graph."""

    def __init__(self, data: Sequences, state: State, schedule: str, count: int):
        self.count = count
        self.inputs = [x[:1].repeat(count, *[1] * (x.dim() - 1)) for x in data.operands]
        self.slots, self.context = integers([-1] * count), integers([0] * count)
        q, k, v, g, beta = self.inputs

        def launch() -> torch.Tensor:
            self.output = kernels.decode(
                q, k, v, g, beta, state, self.slots, self.context, SCALE, schedule
            )
            return self.output

        self._graph = captured([launch])  # the first launch compiles: all rows are padding

    def step(
        self, rows: Sequence[torch.Tensor], slots: Sequence[int], at: Sequence[int]
    ) -> torch.Tensor:
        """o [N, HV, V] of one replay."""
        for kept, new in zip(self.inputs, rows, strict=True):
            kept.copy_(new)
        self.slots.copy_(integers(slots))
        self.context.copy_(integers(at))
        self._graph.replay()
        return self.output.clone()


def decode(
    data: Sequences,
    state: State,
    slots: Sequence[int],
    at: Sequence[int],
    schedule: str,
    tally: Tally,
    batches: Sequence[int],
) -> list[torch.Tensor]:
    """Decode every sequence from at[r] to its end; o of each sequence.

    Ended sequences are padding, and so is what fills a batch; batches of these sizes take turns.
    """
    lengths, now = data.lengths, list(at)
    decoders = [Decoder(data, state, schedule, count) for count in batches]
    found: list[list[torch.Tensor]] = [[] for _ in lengths]
    for decoder in itertools.cycle(decoders):
        if all(n >= length for n, length in zip(now, lengths, strict=True)):
            break
        alive = [n < length for n, length in zip(now, lengths, strict=True)]
        rows = [data.starts[r] + min(n, lengths[r] - 1) for r, n in enumerate(now)]
        used = [slot if on else -1 for slot, on in zip(slots, alive, strict=True)]
        rest = decoder.count - len(rows)
        o = decoder.step(data.rows(rows + rows[:1] * rest), used + [-1] * rest, now + [0] * rest)
        crossing = sum(
            on and n % gdn.CHUNK == gdn.CHUNK - 1 for on, n in zip(alive, now, strict=True)
        )
        tally.hazards["boundary crossed in decode"] += crossing
        tally.hazards["two cross in one step"] += crossing > 1
        for r, on in enumerate(alive):
            if on:
                found[r].append(o[r])
                now[r] += 1
    return [torch.stack(o) if o else data.operands[2][:0] for o in found]


def gate_schedule(schedule: str) -> str:
    """All ways to compute a row, on every scenario and shape, against one whole prefill."""
    tally = Tally(f"gdn {schedule}")
    for key_heads, heads in SHAPES:
        names = scenarios.NAMES if (key_heads, heads) == SHAPES[0] else ("n", "corr")
        for name in names:
            gate_scenario(tally, name, key_heads, heads, schedule)
    if schedule == "cpr":
        return tally.close(HAZARDS)
    gate_planes(tally)
    return tally.close((*HAZARDS, TIE))


def gate_planes(tally: Tally) -> None:
    """States of ties, planted in planes, go on as the same states in fp32 do: over the closing of
    a chunk in slices and in decode."""
    key_heads, heads = SHAPES[0]
    data = sequences("n", key_heads, heads, (2 * gdn.CHUNK + 2,))
    draw = torch.Generator(device="cuda").manual_seed(5)
    h = torch.randn(1, heads, SIZE, SIZE, generator=draw, device="cuda")
    # Every other element is a tie; half of these round down and need a bit of their own.
    bits = h.view(torch.int32)
    bits[..., ::2] = (bits[..., ::2] & -0x10000) | 0x8000
    high = h.bfloat16()
    low = bits.long() - (high.view(torch.int16).long() << 16)
    ties = (low == 1 << 15).int().unflatten(3, (-1, 8)) << torch.arange(8, device="cuda")
    tally.hazards[TIE] += int((low == 1 << 15).sum())
    law = kernels.varlen(*data.operands, integers(data.starts), SCALE, "chunk_row", initial_state=h)

    def planted() -> State:
        state = poisoned("chunk_row", key_heads, heads, 1)
        state[0].copy_(high)
        state[1].copy_(((low + (1 << 15)) % (1 << 16) - (1 << 15)).short())
        state[2].copy_(ties.sum(4).to(torch.uint8).view(torch.int8))
        return state

    state, rows = planted(), data.lengths[0]
    parts = []
    for a, b in ((0, 40), (40, gdn.CHUNK), (gdn.CHUNK, rows)):
        at = integers([gdn.CHUNK + a])
        part = data.rows(slice(a, b))
        parts.append(
            kernels.advance(
                *part, state, integers([0]), integers([0, b - a]), at, SCALE, "chunk_row"
            )
        )
    tally.require("planes, slices", torch.cat(parts), law)
    for way, batch in (("decoded", 1), ("decoded among many", tiles_sm90.FEW_PAIRS // heads + 1)):
        state, parts = planted(), []
        slots = integers([0] + [-1] * (batch - 1))
        for i in range(rows):
            part = data.rows([i] * batch)
            at = integers([gdn.CHUNK + i] * batch)
            parts.append(kernels.decode(*part, state, slots, at, SCALE, "chunk_row")[:1])
        tally.require(f"planes, {way}", torch.cat(parts), law)


def gate_scenario(tally: Tally, name: str, key_heads: int, heads: int, schedule: str) -> None:
    """One scenario and shape of `gate_schedule`, counted in `tally`."""
    what, data = f"{name}, heads {key_heads}/{heads}", sequences(name, key_heads, heads, LENGTHS)
    draw = random.Random(what)
    lengths = data.lengths
    count, zero = len(lengths), [0] * len(lengths)
    slots = draw.sample(range(count + 3), count)

    def fresh() -> State:
        return poisoned(schedule, key_heads, heads, count + 3)

    def boundary(state: State) -> list[torch.Tensor]:
        """States of the sequences that stand on a boundary."""
        h = kernels.boundary(state)
        return [h[s] for s, n in zip(slots, lengths, strict=True) if n % gdn.CHUNK == 0]

    state = fresh()
    law = advance(data, state, slots, zero, lengths, schedule)
    law_states = [h.clone() for h in boundary(state)]
    parts = [law[a:b] for a, b in zip(data.starts, data.starts[1:], strict=False)]
    _require_right(tally.name, what, name, data, law)

    def require(way: str, o: torch.Tensor, reached: State | None) -> None:
        tally.require(f"{what}, {way}", o, law)
        for ours, theirs in zip(boundary(reached) if reached else [], law_states, strict=False):
            tally.require(f"{what}, {way}, boundary state", ours, theirs)

    again = fresh()
    require("again", advance(data, again, slots, zero, lengths, schedule), again)
    # The same slots, left full by the sequences before: a new one starts from nothing.
    tally.hazards["slot reused"] += count
    require("used slots", advance(data, again, slots, zero, lengths, schedule), again)
    starts = integers(data.starts)
    require("packed", kernels.varlen(*data.operands, starts, SCALE, schedule), None)
    for r, part in enumerate(parts):
        rows = data.rows(slice(data.starts[r], data.starts[r + 1]))
        one = poisoned(schedule, key_heads, heads, 1)
        o = kernels.advance(
            *rows, one, integers([0]), integers([0, lengths[r]]), integers([0]), SCALE, schedule
        )
        tally.require(f"{what}, alone, {lengths[r]} rows", o, part)

    sliced, now, found = fresh(), list(zero), [[] for _ in lengths]  # type: ignore[var-annotated]
    while any(n < length for n, length in zip(now, lengths, strict=True)):
        to = [
            min(n + draw.choice((0, 1, 5, 16, 62, 63, 64, 65)), length)
            for n, length in zip(now, lengths, strict=True)
        ]
        o = advance(data, sliced, slots, now, to, schedule)
        for r, (a, b) in enumerate(zip(now, to, strict=True)):
            found[r].append(o[: b - a])
            o = o[b - a :]
            if b > a:
                tally.hazards["slice ends on a boundary"] += b % gdn.CHUNK == 0
                tally.hazards["slice ends before a boundary"] += b % gdn.CHUNK == gdn.CHUNK - 1
                tally.hazards["slice ends after a boundary"] += b % gdn.CHUNK == 1
                tally.hazards["slice inside a chunk"] += a % gdn.CHUNK > 0
        now = to
    require("slices", torch.cat([torch.cat(o) for o in found]), sliced)

    # The kernels of few rows, those of many, and both in turns.
    few, many = count, tiles_sm90.FEW_PAIRS // heads + 1
    for way, batches in (("decoded", [few]), ("decoded among many", [many])):
        decoded = fresh()
        o = torch.cat(decode(data, decoded, slots, zero, schedule, tally, batches))
        require(way, o, decoded)
    mixed, cut = fresh(), [draw.randrange(length + 1) for length in lengths]
    head = advance(data, mixed, slots, zero, cut, schedule)
    tail = decode(data, mixed, slots, cut, schedule, tally, [few, many])
    joined = []
    for r, n in enumerate(cut):
        joined += [head[:n], tail[r]]
        head = head[n:]
    require("prefill, then decode", torch.cat(joined), mixed)


def _require_right(gate: str, what: str, name: str, data: Sequences, o: torch.Tensor) -> None:
    truth, _ = oracle.recurrence(data.operands, data.starts, SCALE)
    _within(gate, f"{what}, o", errors.relative(o, truth), O_ERROR.get(name, O_ERROR_ELSEWHERE))


def _within(gate: str, what: str, error: float, bound: float) -> None:
    if not error <= bound:
        raise Different(
            "SB0440",
            seen=f"{gate}, {what}: relative error {error:.2e} against float64",
            required=f"at most {bound:.0e}",
            hint="python -m samebits.bench.gpu --only gdn",
        )


def gate_gradients(schedule: str) -> str:
    """Every gradient of `varlen` against float64 autograd of the recurrence; the same twice."""
    tally, worst = Tally(f"gdn {schedule}, gradients"), 0.0
    for name, tokens in (("n", 65), ("n", 200), ("wide", 130), ("g0", 130)):
        data = sequences(name, 1, 2, (tokens,))
        source = torch.Generator("cuda").manual_seed(tokens)
        state = torch.randn(1, 2, SIZE, SIZE, generator=source, device="cuda")
        grad = torch.randn(tokens, 2, SIZE, generator=source, device="cuda").bfloat16()
        starts = integers(data.starts)

        operands = (*data.operands, state)
        found = _gradients(operands, starts, grad, schedule)
        twice = _gradients(operands, starts, grad, schedule)
        exact = [x.double().requires_grad_() for x in operands]
        truth, _ = oracle.recurrence(exact[:5], data.starts, SCALE, exact[5])
        truth.backward(grad.double())
        if len(found) != len(exact):
            raise NotObserved(
                "SB0441",
                seen=f"{tally.name}: {len(found)} gradients",
                required=f"{len(exact)}",
                hint="python -m samebits.bench.gpu --only gdn",
            )
        for leaf, a, b, again in zip(errors.LEAVES, found, exact, twice, strict=True):
            assert b.grad is not None
            error = errors.relative(a, b.grad)
            worst = max(worst, error)
            _within(tally.name, f"{name}, {tokens} rows, into {leaf}", error, GRADIENT_ERROR)
            tally.require(f"{name}, {tokens} rows, into {leaf}, again", again, a)
    return f"{tally.close()}; largest error against float64 {worst:.1e}"


def _gradients(
    operands: Sequence[torch.Tensor], starts: torch.Tensor, grad: torch.Tensor, schedule: str
) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in operands]
    q, k, v, g, beta, h = leaves
    kernels.varlen(q, k, v, g, beta, starts, SCALE, schedule, h).backward(grad)
    return [x.grad for x in leaves if x.grad is not None]


def gates() -> Iterator[str]:
    """One line for each gate that is green, an error at the first that is red."""
    for schedule in gdn.SCHEDULES:
        yield gate_schedule(schedule)
        yield gate_gradients(schedule)
