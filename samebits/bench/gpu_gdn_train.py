"""Forward and backward of Gated DeltaNet's core, as a trainer runs them, beside
flash-linear-attention and FlashQLA; part of `samebits.bench.gpu`.

Gradients first: with the variants that are timed, each side is held against the recurrence in
float64. A side that is wrong gets no row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from samebits.bench import gpu_gdn_ahead, gpu_gdn_fla
from samebits.bench.gpu_gdn import GRADIENT_ERROR, SCALE, Sequences, integers, sequences
from samebits.bench.gpu_gdn_ahead import Part
from samebits.bench.gpu_gdn_fla import row
from samebits.bench.gpu_gdn_times import drawn
from samebits.bench.gpu_timing import Row, medians
from samebits.errors import Different
from samebits.ops import gdn, gpu
from samebits.ops.gdn import errors, oracle
from samebits.ops.gdn import triton as kernels

HEADS = (32, 8, 4, 16)  # value heads; half as many key heads
SHAPES = ((1, 10240), (5, 2048))  # sequences, tokens of each
CHECKED = (65, 200)  # tokens of the sequences whose gradients are checked
NATIVES = {"fla chunk": 0.90, gpu_gdn_fla.FLASH_QLA: 1.25}  # target against each
SHARES = 4  # processes that compile the variants of one number of heads

# q, k, v, g, beta, each of one dimension more than `Sequences` has, and an output gradient.
Leaves = Sequence[torch.Tensor]


def natives() -> dict[str, Callable[..., Any]]:
    """Name and function of every other implementation at hand."""
    found: dict[str, Callable[[], Callable[..., Any]]] = {"fla chunk": gpu_gdn_fla.chunk}
    if gpu_gdn_fla.flash_qla_at_hand():
        found[gpu_gdn_fla.FLASH_QLA] = gpu_gdn_fla.flash_qla
    return {name: load() for name, load in found.items()}


def output_gradient(data: Sequences) -> torch.Tensor:
    """Drawn, bf16: the same for every side."""
    v = data.operands[2]
    random = torch.Generator(v.device).manual_seed(len(v))
    return torch.randn(v.shape, generator=random, device=v.device).bfloat16()


def native_step(function: Callable[..., Any], data: Sequences) -> Callable[[], Leaves]:
    """A call that returns the gradients of q, k, v, g and beta, in one dimension more."""
    leaves = [x[None].detach().requires_grad_() for x in data.operands]
    q, k, v, g, beta = leaves
    grad = output_gradient(data)[None]
    # The same tensor in every call: what follows from it is cached by identity, and a capture
    # cannot wait for the host to make it again.
    starts = integers(data.starts).long()

    def call() -> Leaves:
        o, _ = function(q, k, v, g, beta=beta, scale=SCALE, cu_seqlens=starts)
        return torch.autograd.grad(o, leaves, grad)

    return call


def step(data: Sequences, schedule: str) -> Callable[[], Leaves]:
    """A call that returns our gradients of q, k, v, g and beta."""
    leaves = [x.detach().requires_grad_() for x in data.operands]
    q, k, v, g, beta = leaves
    grad = output_gradient(data).to(gdn.OUTPUTS[schedule])
    starts = integers(data.starts)

    def call() -> Leaves:
        o = kernels.varlen(q, k, v, g, beta, starts, SCALE, schedule)
        return torch.autograd.grad(o, leaves, grad)

    return call


@functools.cache
def gradient_errors(heads: int) -> dict[str, float]:
    """Largest relative error of the gradients of every side against float64; infinite where another
    side fails.

    The other sides choose their variants at the size that is timed, and keep them.
    """
    data = drawn(heads, [SHAPES[0][1]] * SHAPES[0][0])
    small = sequences("n", heads // 2, heads, CHECKED)
    exact = [x.double().requires_grad_() for x in small.operands]
    o, _ = oracle.recurrence(exact, small.starts, SCALE)
    truth = torch.autograd.grad(o, exact, output_gradient(small).double())
    found = {}
    for name, function in natives().items():
        try:
            native_step(function, data)()
            found[name] = _largest(native_step(function, small)(), truth)
        except Exception as error:
            print(f"gdn train, {heads} heads, {name} failed: {error}", flush=True)
            found[name] = torch.inf
    return found | {s: _largest(step(small, s)(), truth) for s in gdn.SCHEDULES}


def _largest(found: Leaves, truth: Leaves) -> float:
    pairs = zip(found, truth, strict=True)
    return max(errors.relative(a.view_as(b), b) for a, b in pairs)


def gates() -> Iterator[str]:
    """One line for each number of heads; an error where our gradients are wrong."""
    yield from gpu_gdn_ahead.compiled("gdn train", parts())
    gpu_gdn_fla.tune_briefly()
    for heads in HEADS:
        found = gradient_errors(heads)
        for schedule in gdn.SCHEDULES:
            if not found[schedule] <= GRADIENT_ERROR:
                raise Different(
                    "SB0440",
                    seen=f"gdn {schedule}, gradients, {heads} heads: relative error "
                    f"{found[schedule]:.2e} against float64",
                    required=f"at most {GRADIENT_ERROR:.0e}",
                    hint="python -m samebits.bench.gpu --only gdn-train",
                )
        text = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
        yield f"gdn train, {heads} heads, gradients against float64: {text}"
        for name in found:
            if name in NATIVES and not found[name] <= GRADIENT_ERROR:
                yield f"gdn train, {heads} heads: no row against {name}, its gradients are wrong"


def rows() -> Iterator[Row]:
    """Forward and backward against every side whose gradients are right; FlashQLA last."""
    gpu_gdn_fla.tune_briefly()
    for name, target in NATIVES.items():
        for heads in HEADS:
            if not gradient_errors(heads).get(name, torch.inf) <= GRADIENT_ERROR:
                continue
            for count, length in SHAPES:
                data = drawn(heads, [length] * count)
                native = native_step(natives()[name], data)
                ours = [step(data, schedule) for schedule in gdn.SCHEDULES]
                theirs, *times = medians([[call] for call in (native, *ours)])
                for schedule, time in zip(gdn.SCHEDULES, times, strict=True):
                    work = f"gdn {schedule}, train {count} x {length}, {heads} heads"
                    yield row(work, time, name, theirs, target)


def parts() -> list[Part]:
    """All that is launched, long parts first."""
    found = [Part(f"train {heads} heads", compile_ours, (heads,)) for heads in HEADS]
    for index in range(SHARES):
        for heads in HEADS:
            part = Part(f"fla, {heads} heads, {index}", compile_fla, (heads, index))
            found.append(part)
    if gpu_gdn_fla.flash_qla_at_hand():
        found += [Part(f"FlashQLA, {heads} heads", compile_flash_qla, (heads,)) for heads in HEADS]
    return found


def compile_ours(heads: int) -> None:
    """Both schedules."""
    gpu.prepare(0)
    for count, length in SHAPES:
        data = drawn(heads, [length] * count)
        gpu_gdn_ahead.launch([[step(data, schedule)] for schedule in gdn.SCHEDULES])


def compile_fla(heads: int, index: int) -> None:
    """A share of the variants of flash-linear-attention."""
    gpu.prepare(0)
    gpu_gdn_fla.compile_share(index, SHARES)
    data = drawn(heads, [SHAPES[0][1]] * SHAPES[0][0])
    gpu_gdn_ahead.launch([[native_step(gpu_gdn_fla.chunk(), data)]])


def compile_flash_qla(heads: int) -> None:
    """FlashQLA, at both shapes: it splits them in different ways."""
    gpu.prepare(0)
    for count, length in SHAPES:
        data = drawn(heads, [length] * count)
        gpu_gdn_ahead.launch([[native_step(gpu_gdn_fla.flash_qla(), data)]])
