"""Times of a whole Gated DeltaNet layer of Qwen3.5-9B beside one of native parts, and of its
passes; part of `samebits.bench.gpu`.

Both layers are held against float64 first: outputs of decoding from fresh states, outputs and every
gradient of training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from samebits.bench import gpu_gdn_ahead, gpu_gdn_fla
from samebits.bench import gpu_gdn_layer as layer
from samebits.bench.gpu_gdn_ahead import Part
from samebits.bench.gpu_gdn_fla import row
from samebits.bench.gpu_gdn_layer import LEAVES, Pass, Sizes, Values
from samebits.bench.gpu_gdn_times import used
from samebits.bench.gpu_timing import Calls, Row, medians
from samebits.errors import Different
from samebits.ops import gdn, gpu
from samebits.ops.gdn import errors
from samebits.ops.gemm.sm90 import admit

SCHEDULE = "chunk_row"
SIZES = Sizes()
DECODED = 256  # sequences, one row each
TRAINED = 8192  # tokens of one sequence
NATIVE = "cuBLAS and fla"
TARGETS = {"decode": 1.00, "train": 1.10}
WORKS = {"decode": f"decode {DECODED} x 1", "train": f"train 1 x {TRAINED}"}
# Largest relative error against float64 in the 2-norm: of the output, of any gradient. The layer's
# bf16 activations make it, ours and native alike.
ERROR = {"decode": 2e-2, "train": 3e-2}
CHECKED_TOKENS, CHECKED_SEQUENCES, CHECKED_STEPS = 130, 8, 3
SHARES = {"train": 6, "decode": 2}  # processes that compile the variants of the native layer


def training(rows: int, native: bool) -> tuple[list[Pass], Values]:
    """Passes and values of one sequence of `rows` tokens; weights and x want gradients."""
    values = layer.drawn(SIZES, rows, "cuda")
    for name in LEAVES:
        values[name].requires_grad_()
    if native:
        return layer.natively_trained(SIZES, layer.native_kernels()), values
    starts = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
    return layer.trained(SIZES, starts, SCHEDULE), values


def decoding(native: bool) -> tuple[list[Pass], Values]:
    """Passes and values of one row of each of `DECODED` sequences, in phases that are spread: one
    sequence of each `gdn.CHUNK` closes its chunk."""
    values = layer.drawn(SIZES, DECODED, "cuda")
    if native:
        there = layer.natively_fresh(SIZES, DECODED, "cuda")
        there.states.normal_(0, 0.05)
        return layer.natively_decoded(SIZES, there, layer.native_kernels()), values
    at = layer.fresh(SIZES, SCHEDULE, DECODED, "cuda")
    at.context.copy_(gdn.CHUNK + at.slots % gdn.CHUNK)
    at = dataclasses.replace(at, states=used(SCHEDULE, SIZES.heads, DECODED))
    return layer.decoded(SIZES, at, SCHEDULE), values


def _mode(mode: str, native: bool) -> tuple[list[Pass], Values]:
    return decoding(native) if mode == "decode" else training(TRAINED, native)


def gradient_step(passes: Sequence[Pass], values: Values) -> Callable[[], Sequence[torch.Tensor]]:
    """A call that returns the output, and the gradients of all `LEAVES` for a drawn one of it."""
    x = values["x"]
    random = torch.Generator(x.device).manual_seed(1)
    grad = torch.randn(x.shape, generator=random, device=x.device).bfloat16().to(x.dtype)

    def call() -> Sequence[torch.Tensor]:
        out = layer.run(passes, values)
        return (out.detach(), *torch.autograd.grad(out, [values[n] for n in LEAVES], grad))

    return call


def step(mode: str, native: bool) -> Callable[[], object]:
    """The call that is timed."""
    passes, values = _mode(mode, native)
    if mode == "decode":
        return partial(layer.run, passes, values)
    return gradient_step(passes, values)


def train_errors(native: bool) -> dict[str, float]:
    """Of the output and of every gradient, against float64."""
    passes, values = training(CHECKED_TOKENS, native)
    found = gradient_step(passes, values)()
    doubles = {name: x.detach().double().requires_grad_() for name, x in values.items()}
    law = Pass("exact", (), ("out",), lambda: (layer.exact(SIZES, [0, CHECKED_TOKENS], doubles),))
    truth = gradient_step([law], doubles)()
    names = ("output", *LEAVES)
    return {name: errors.relative(a, b) for name, a, b in zip(names, found, truth, strict=True)}


def decode_errors(native: bool) -> dict[str, float]:
    """Of the outputs of the first rows of sequences, row by row, against float64."""
    count, steps = CHECKED_SEQUENCES, CHECKED_STEPS
    values = layer.drawn(SIZES, count * steps, "cuda")
    at = layer.fresh(SIZES, SCHEDULE, count, "cuda")
    there = layer.natively_fresh(SIZES, count, "cuda")
    if native:
        passes = layer.natively_decoded(SIZES, there, layer.native_kernels())
    else:
        passes = layer.decoded(SIZES, at, SCHEDULE)
    found = []
    for done in range(steps):
        at.context.fill_(done)
        rows = values["x"][done::steps].contiguous()
        after, _ = layer.traced(passes, values | {"x": rows})
        found.append(after["out"])
        if native:
            there.states.copy_(after["moved"])
    starts = [sequence * steps for sequence in range(count + 1)]
    truth = layer.exact(SIZES, starts, values)
    return {"output": errors.relative(torch.stack(found, 1).flatten(0, 1), truth)}


@functools.cache
def layer_errors(mode: str, native: bool) -> dict[str, float]:
    """Errors of one layer; the native one chooses its variants at the size that is timed before."""
    if native:
        step(mode, native)()
    return decode_errors(native) if mode == "decode" else train_errors(native)


def _right(mode: str, native: bool) -> bool:
    return all(error <= ERROR[mode] for error in layer_errors(mode, native).values())


def gates() -> Iterator[str]:
    """A line for each layer and mode; an error where ours is wrong."""
    yield from gpu_gdn_ahead.compiled("gdn layer", parts())
    gpu_gdn_fla.tune_briefly()
    for mode in TARGETS:
        for native in (False, True):
            text = ", ".join(f"{k} {v:.1e}" for k, v in layer_errors(mode, native).items())
            if not native and not _right(mode, native):
                raise Different(
                    "SB0440",
                    seen=f"gdn layer, {mode}: relative errors against float64: {text}",
                    required=f"at most {ERROR[mode]:.0e}",
                    hint="python -m samebits.bench.gpu --only gdn-layer",
                )
            wrong = "" if _right(mode, native) else "; wrong, so no row"
            name = NATIVE if native else "ours"
            yield f"gdn layer, {mode}, {name}, against float64: {text}{wrong}"


def rows() -> Iterator[Row]:
    """Whole layers, then their passes."""
    gpu_gdn_fla.tune_briefly()
    for mode, target in TARGETS.items():
        if _right(mode, native=True):
            theirs, ours = medians([[step(mode, native)] for native in (True, False)])
            work = f"gdn {SCHEDULE}, layer {WORKS[mode]}, {SIZES.heads} heads"
            yield row(work, ours, NATIVE, theirs, target)
    yield from pass_rows()


def pass_rows() -> Iterator[Row]:
    """Microseconds of passes, each alone in a graph, so that what fits in L2 stays there; a row for
    each direction has them all, [ours, native], None where native has no such pass."""
    for work, train, back in (
        (WORKS["decode"], False, False),
        (WORKS["train"].replace("train", "forward"), True, False),
        (WORKS["train"].replace("train", "forward and backward"), True, True),
    ):
        found = []
        for native in (False, True):
            passes, values = training(TRAINED, native) if train else decoding(native)
            values = {key: x.detach() for key, x in values.items()}
            found.append(_times(passes, values, back, repeats=1 if train else 16))
        ours, theirs = found
        times = {name: [ours.get(name), theirs.get(name)] for name in ours | theirs}
        sums = [sum(x.values()) for x in found]
        yield row(f"passes of {work}", sums[0], NATIVE, sums[1], None) | {"passes": times}


def _times(passes: Sequence[Pass], values: Values, back: bool, repeats: int) -> dict[str, float]:
    _, read = layer.traced(passes, values)
    found = {}
    for one, operands in zip(passes, read, strict=True):
        call = both_ways(one, operands) if back else partial(one.call, *operands)
        calls: Calls = [call] * repeats
        found[one.name] = medians([calls])[0]
    return found


def both_ways(one: Pass, operands: Sequence[torch.Tensor]) -> Callable[[], object]:
    """A pass and its backward into every operand, for gradients of ones."""
    leaves = [x.detach().requires_grad_() for x in operands]
    grads = [torch.ones_like(y) for y in one.call(*leaves)]

    def call() -> object:
        return torch.autograd.grad(one.call(*leaves), leaves, grads)

    return call


def parts() -> list[Part]:
    """All that is launched, long parts first."""
    found = [Part(f"layer {mode}", compile_ours, (mode,)) for mode in ("train", "decode")]
    for mode, count in SHARES.items():
        for index in range(count):
            part = Part(f"native layer {mode}, {index}", compile_native, (mode, index))
            found.append(part)
    first, last = sum(SIZES.projected[:2]), sum(SIZES.projected[2:])
    found += [Part(f"{n} rows", compile_product, (n,)) for n in (first + last, first, last)]
    return found


def compile_ours(mode: str) -> None:
    """Our layer, its check included."""
    gpu.prepare(0)
    layer_errors(mode, native=False)
    step(mode, native=False)()
    torch.cuda.synchronize()


def compile_native(mode: str, index: int) -> None:
    """A share of the variants of the native layer."""
    gpu.prepare(0)
    gpu_gdn_fla.compile_share(index, SHARES[mode])
    step(mode, native=True)()
    torch.cuda.synchronize()


def compile_product(rows: int) -> None:
    """The kernels that an input projection may use, and their admission."""
    gpu.prepare(0)
    admit(rows, SIZES.hidden, 1)
