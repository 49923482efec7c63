"""Runs the Hopper kernels of gated delta nets under Triton's interpreter: prints their errors.

A program of its own because TRITON_INTERPRET counts when a kernel is defined. The interpreter
multiplies bf16 wrongly, so all operands are fp32 and nothing is rounded: what is left is control
flow, held against float64. Chunks are shortened where their length is not the point.
"""

from __future__ import annotations

import json
import math
import sys

import torch
from triton import jit
from triton import language as tl
from triton.runtime import interpreter

from samebits.ops import gdn, sums_backward
from samebits.ops.conv1d import triton as conv1d
from samebits.ops.conv1d import triton_backward as conv1d_backward
from samebits.ops.gated_rms_norm import triton as gated_rms_norm
from samebits.ops.gated_rms_norm import triton_backward as gated_backward
from samebits.ops.gdn import (
    oracle,
    reference,
    tiles_sm90,
    triton,
    triton_backward,
    triton_chunk,
    triton_decode,
)
from samebits.ops.gdn_gate import triton as gdn_gate
from samebits.ops.l2_norm import triton as l2_norm
from samebits.ops.l2_norm import triton_backward as l2_backward
from samebits.ops.silu_mul import triton as silu_mul

SCALE = 0.3
POISON = 0x55  # in integer planes
NAMES = ("q", "k", "v", "g", "beta", "initial state")
Errors = dict[str, float]


@jit
def _reciprocal(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


def chunks_of(rows: int, block: int) -> None:
    """Set the chunk length wherever it is read."""
    for module in (gdn, reference, triton_chunk, triton_decode, triton_backward):
        for name, value in (("CHUNK", rows), ("BLOCK", block)):
            if hasattr(module, name):
                setattr(module, name, value)


def patch_once() -> None:
    """The interpreter patches the language again for every device function that a kernel calls, a
    good part of its time: here once for each kernel launch and module."""
    patch, patched = interpreter._patch_lang, set()

    class Scope:
        def __init__(self, fn) -> None:
            self.outer = not patched
            self.inner = None if id(fn.__globals__) in patched else patch(fn)
            patched.add(id(fn.__globals__))

        def restore(self) -> None:
            if self.outer:
                patched.clear()
            if self.inner:
                self.inner.restore()

    interpreter._patch_lang = Scope


def operands(tokens: int, key_heads: int, heads: int, key_size: int, size: int):
    torch.manual_seed(tokens)
    q, k = (torch.randn(tokens, key_heads, key_size) for _ in range(2))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g, beta = -torch.rand(tokens, heads), torch.rand(tokens, heads)
    return [q, k, torch.randn(tokens, heads, size), g, beta]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest element; infinite for a NaN."""
    worst = float((found.double() - wanted.double()).abs().max() / wanted.abs().max())
    return math.inf if math.isnan(worst) else worst


def varlen(schedule: str, lengths: list[int], *heads: int) -> Errors:
    """Outputs and all gradients of packed sequences with and without initial states."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    rows = operands(starts[-1], *heads)
    first = torch.randn(len(lengths), heads[1], heads[2], heads[3])
    grad = torch.randn(rows[2].shape)
    found = {}
    leaves = [x.requires_grad_() for x in (*rows, first)]
    wanted, _ = oracle.recurrence(leaves[:5], starts, SCALE, first)
    wanted_grads = torch.autograd.grad(wanted, leaves, grad.double())
    at = torch.tensor(starts)
    o = triton.Varlen.apply(*leaves, at, SCALE, schedule == "cpr")
    found["o"] = error(o, wanted)
    if schedule == "chunk_row":  # both have the same backward
        grads = torch.autograd.grad(o, leaves, grad)
        for name, got, want in zip(NAMES, grads, wanted_grads, strict=True):
            found[f"gradient of {name}"] = error(got, want)
    with torch.no_grad():
        wanted, _ = oracle.recurrence(rows, starts, SCALE)
        o = triton.Varlen.apply(*rows, None, at, SCALE, schedule == "cpr")
        found["o from zero"] = error(o, wanted)
    return found


class Sequences:
    """Two sequences in poisoned, strided slots 2 and 0 of 3, advanced step by step."""

    SLOTS = (2, 0)

    def __init__(self, schedule: str, lengths: tuple[int, int], *heads: int) -> None:
        self.raw = schedule == "cpr"
        self.rows = [operands(length, *heads) for length in lengths]
        self.state = []
        for _, shape, dtype in gdn.state_spec(schedule, *heads, "sm90"):
            poison = torch.nan if dtype.is_floating_point else POISON
            kind = torch.float32 if dtype.is_floating_point else dtype
            padded = torch.full((3, math.prod(shape) + 16), poison, dtype=kind)
            self.state.append(padded[:, :-16].unflatten(1, shape))
        self.done = [0, 0]
        self.outputs: list[list[torch.Tensor]] = [[], []]

    def _take(self, counts: tuple[int, int]) -> list[torch.Tensor]:
        spans = [slice(a, a + n) for a, n in zip(self.done, counts, strict=True)]
        return [
            torch.cat([rows[i][span] for rows, span in zip(self.rows, spans, strict=True)])
            for i in range(5)
        ]

    def _keep(self, o: torch.Tensor, counts: tuple[int, int]) -> None:
        for s, part in enumerate(o.split(list(counts))):
            self.outputs[s].append(part)
            self.done[s] += counts[s]

    def advance(self, *counts: int) -> None:
        """Any number of rows of each by the chunk kernels; rows of no sequence behind them give
        zeros."""
        rows = [
            torch.cat([x, x.new_full((gdn.CHUNK + 3, *x.shape[1:]), torch.nan)])
            for x in self._take(counts)
        ]
        starts = torch.tensor([0, counts[0], sum(counts)])
        context, slots = torch.tensor(self.done), torch.tensor(self.SLOTS)
        at = triton_chunk.steps(starts, context, slots, len(rows[2]))
        o, _ = triton_chunk.forward(*rows, self.state, at, SCALE, self.raw)
        assert not o[sum(counts) :].any()
        self._keep(o[: sum(counts)], counts)

    def decode(self) -> None:
        """One row of each, and a row of padding, which gives zeros."""
        rows = [torch.cat([x, torch.full_like(x[:1], torch.nan)]) for x in self._take((1, 1))]
        slots = torch.tensor([*self.SLOTS, -1], dtype=torch.int32)
        context = torch.tensor([*self.done, 7], dtype=torch.int32)
        o = triton_decode.step(*rows, self.state, slots, context, SCALE, self.raw)
        assert not o[2].any()
        self._keep(o[:2], (1, 1))

    def errors(self) -> Errors:
        """Of all outputs so far and of the boundary states."""
        found = {}
        for s, (rows, parts) in enumerate(zip(self.rows, self.outputs, strict=True)):
            o = torch.cat(parts)
            wanted, _ = oracle.recurrence([x[: len(o)] for x in rows], [0, len(o)], SCALE)
            found[f"o of {s}"] = error(o, wanted)
            edge = len(o) // gdn.CHUNK * gdn.CHUNK
            if edge:
                _, final = oracle.recurrence([x[:edge] for x in rows], [0, edge], SCALE)
                found[f"boundary of {s}"] = error(self.state[0][self.SLOTS[s]], final[0])
        third = [x[1] for x in self.state]
        untouched = (x.isnan() if x.is_floating_point() else x == POISON for x in third)
        assert all(x.all() for x in untouched), "the third slot was touched"
        return found


def steps(schedule: str) -> Errors:
    """Slices that cut chunks, decoding over boundaries and back to slices, in mixed phases."""
    c = gdn.CHUNK
    pair = Sequences(schedule, (5 * c, 2 * c + 1), 2, 4, 32, 32)
    pair.advance(c + 3, 1)
    pair.advance(2, 0)
    for _ in range(c + 1):
        pair.decode()
    open_rows = open_chunk(pair) if schedule == "chunk_row" else {}
    pair.advance(c + 3, c - 2)  # one over a boundary to mid-chunk, one to a boundary
    pair.decode()
    return pair.errors() | open_rows


def open_chunk(pair: Sequences) -> Errors:
    """The rows of sequence 0's open chunk against the law without rounding."""
    edge = pair.done[0] // gdn.CHUNK * gdn.CHUNK
    q, k, v, g, beta = (x[edge : pair.done[0]] for x in pair.rows[0])
    group = v.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, 1).transpose(0, 1)
    reference.bf16 = lambda x: x
    h, _, _, x, gamma, keys, _, u, t = (part[pair.SLOTS[0]] for part in pair.state)
    rows = reference.chunk_rows(k, v.transpose(0, 1), g.T, beta.T, h)
    n = len(q)
    lower = (beta.T[..., None] * (k @ k.mT) * rows.decay).tril(-1)
    whole = torch.linalg.inv((lower + torch.eye(n)).double())
    block = n // gdn.BLOCK * gdn.BLOCK
    return {
        "gamma": error(gamma[:, :n], rows.gamma),
        "u": error(u[:, :n], rows.u),
        "k": error(keys.repeat_interleave(group, 0)[:, :, :n], k.mT),
        "t": error(t[:, :n, :n], whole),
        "x": error(x[:, : n - block, :n], whole[:, block:]),
    }


def convolution() -> Errors:
    """A sequence in slices shorter and longer than the window, beside another."""
    torch.manual_seed(1)
    x, weight = torch.randn(14, 20), torch.randn(20, 4)
    window = torch.full((3, 3 * 20 + 8), torch.nan)[:, :-8].unflatten(1, (3, 20))
    slots, outputs, done = torch.tensor([2, 0]), [], 0
    for count in (1, 2, 5, 1, 3):
        rows = torch.cat([x[done : done + count], x[12:], torch.full((2, 20), torch.nan)])
        rows = torch.cat([rows, torch.full_like(rows, torch.nan)], 1)[:, :20]
        starts, context = torch.tensor([0, count, count + 2]), torch.tensor([done, 0])
        y = torch.cat(conv1d.launch(rows, weight, window, slots, starts, context, 12), 1)
        assert not y[count + 2 :].any()
        outputs.append(y[:count])
        done += count
    assert window[1].isnan().all()

    def law(part: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(part.double().T[None], (3, 0))
        full = torch.nn.functional.conv1d(padded, weight.double()[:, None], groups=20)
        return torch.nn.functional.silu(full[0].T)

    place, _ = conv1d.places(torch.tensor([0, 0, 12, 14, 14]).int(), 14, 4)
    packed = torch.cat(conv1d.packed(x, weight, place, 12), 1)
    return single_rows(x, weight, law(x)) | {
        "packed": error(packed, torch.cat([law(x[:12]), law(x[12:])])),
        "y": error(torch.cat(outputs), law(x[:12])),
        "fresh": error(y[count : count + 2], law(x[12:])),
        "window": error(window[2], x[9:12]),
    }


def single_rows(x: torch.Tensor, weight: torch.Tensor, law: torch.Tensor) -> Errors:
    """As many rows as sequences: one each, none, several; and rows of none behind them."""
    window = torch.full((4, 3, 20), torch.nan)
    slots, done, outputs, blank = torch.tensor([3, 1, 0]), 0, [], []
    for count in (1, 1, 2, 1, 3, 1):
        rows = torch.cat([x[done : done + count], torch.full((3 - count, 20), torch.nan)])
        starts, context = torch.tensor([0, 0, count, count]), torch.tensor([7, done, 0])
        y = torch.cat(conv1d.launch(rows, weight, window, slots, starts, context, 12), 1)
        outputs.append(y[:count])
        blank.append(y[count:])
        done += count
    assert not torch.cat(blank).any() and window[[0, 2, 3]].isnan().all()
    return {
        "single rows": error(torch.cat(outputs), law[:done]),
        "window of single rows": error(window[1], x[done - 3 : done]),
    }


def convolution_gradients(
    lengths: list[int], channels: int, taps: int, exact: int, behind: int
) -> Errors:
    """Of packed sequences that cut blocks of rows; x lies in a wider tensor of NaN.

    `behind` rows of NaN follow the last sequence.
    """
    torch.manual_seed(3)
    tokens = sum(lengths) + behind
    x = torch.full((tokens, channels + 9), torch.nan)[:, 4 : 4 + channels]
    x.copy_(torch.randn(x.shape))
    weight, grad = torch.randn(channels, taps), torch.randn(tokens, channels)
    x[tokens - behind :] = grad[tokens - behind :] = torch.nan
    place, _ = conv1d.places(torch.tensor([0, *lengths]).cumsum(0).int(), tokens, taps)
    parts = grad[:, :exact].contiguous(), grad[:, exact:].contiguous()
    found = conv1d_backward.gradients(x, weight, place, *parts)
    real = slice(tokens - behind)
    leaves = [t.double().requires_grad_() for t in (x[real], weight)]
    rows = []
    for part in leaves[0].split(lengths):
        padded = torch.cat([part.new_zeros(taps - 1, channels), part])
        acc = sum(padded[j : j + len(part)] * leaves[1][:, j] for j in range(taps))
        rows.append(torch.nn.functional.silu(acc))
    dx, dweight = torch.autograd.grad(torch.cat(rows), leaves, grad[real].double())
    dx = torch.cat([dx, dx.new_zeros(behind, channels)])
    return {"x": error(found[0], dx), "weight": error(found[1], dweight)}


def elements() -> Errors:
    """l2 norm, gated norm and gate; rows of heads inside wider rows of NaN."""
    torch.manual_seed(2)

    def inside(x: torch.Tensor) -> torch.Tensor:
        wider = torch.full((len(x), 5 * 64), torch.nan)
        rows = wider[:, 64:-64].unflatten(1, (3, 64))
        return rows.copy_(x)

    x, z, weight = torch.randn(5, 3, 64), 3 * torch.randn(5, 3, 64), torch.randn(64)
    a, b = 12 * torch.randn(9, 3), 4 * torch.randn(9, 3)
    A_log, bias = torch.randn(3), torch.randn(3)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    g, beta = gdn_gate.launch(a, b, A_log, bias)
    wanted_g = -A_log.double().exp() * torch.nn.functional.softplus((a + bias).double())
    unit = wide / (wide.square().sum(-1, keepdim=True) + 1e-3).sqrt()
    gated = normed * torch.nn.functional.silu(z.double())
    found = {
        "l2": error(l2_norm.launch(x, 1e-3, torch.float32), unit),
        "l2 of heads": error(l2_norm.launch(inside(x), 1e-3, torch.float32), unit),
        "gated": error(gated_rms_norm.launch(x, z, weight, 1e-3), gated),
        "gated of heads": error(gated_rms_norm.launch(x, inside(z), weight, 1e-3), gated),
        "g": error(g, wanted_g),
        "beta": error(beta, b.double().sigmoid()),
    }
    x, z, weight = torch.randn(29, 3, 64), 3 * torch.randn(29, 3, 64), torch.randn(64)
    grad = torch.randn(29, 3, 64)
    leaves = [t.double().requires_grad_() for t in (x, z, weight)]
    wide, gate, scale = leaves
    unit = wide / (wide.square().sum(-1, keepdim=True) + 1e-3).sqrt()
    (wanted,) = torch.autograd.grad(unit, wide, grad.double())
    found["gradient of l2"] = error(l2_backward.gradient(grad, inside(x), 1e-3), wanted)
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * scale
    gated = normed * torch.nn.functional.silu(gate)
    grads = gated_backward.gradients(grad, x, inside(z), weight, 1e-3)
    wanted = torch.autograd.grad(gated, leaves, grad.double())
    for name, got, want in zip("xzw", grads, wanted, strict=True):
        found[f"gradient of gated in {name}"] = error(got, want)
    gated = wide / wide.square().mean(-1, keepdim=True).sqrt() * scale
    gated = gated * torch.nn.functional.silu(gate)
    grads = gated_backward.gradients(grad, x, z, weight, 0.0)
    wanted = torch.autograd.grad(gated, leaves, grad.double())
    for name, got, want in zip("xzw", grads, wanted, strict=True):
        found[f"gradient of gated in {name}, eps 0"] = error(got, want)
    return found


def main() -> None:
    patch_once()
    silu_mul.reciprocal = _reciprocal  # the interpreter has no inline assembly
    gated_backward.TILES = 2
    torch.use_deterministic_algorithms(True)  # new tensors hold NaN until they are written
    sums_backward.PARTS = 2
    found = {"convolution": convolution(), "elements": elements()}
    conv1d_backward.ROWS, conv1d_backward.BLOCK = 8, 16
    for taps, exact, lengths, behind in (
        (4, 7, [3, 0, 1, 1, 9, 2, 0, 12], 0),
        (4, 20, [37], 0),
        (2, 16, [5, 8, 1], 0),
        (1, 0, [9, 4], 0),
        (4, 7, [5, 9], 11),
        (2, 16, [15], 2),
    ):
        name = f"convolution's gradients, {taps} taps, {len(lengths)} sequences, {behind} behind"
        found[name] = convolution_gradients(lengths, 20, taps, exact, behind)
    chunks_of(8, 4)
    tiles_sm90.SEGMENT = 2
    for schedule in gdn.SCHEDULES:
        found[f"varlen {schedule}"] = varlen(schedule, [21, 0, 16], 2, 4, 32, 64)
        found[f"steps {schedule}"] = steps(schedule)
    chunks_of(64, 16)
    for schedule in gdn.SCHEDULES:
        found[f"varlen of 64 {schedule}"] = varlen(schedule, [67], 1, 1, 32, 32)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
