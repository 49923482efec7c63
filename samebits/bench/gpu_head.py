"""The output layer and log-probabilities by blocks, on a GPU: bits, gradients, time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from samebits.bench.gpu_gates import Tally
from samebits.bench.gpu_timing import Row, medians, row
from samebits.errors import Different
from samebits.ops import gemm, head, logprob
from samebits.ops.gemm.operands_sm90 import source
from samebits.plan import ReductionPlan

# Rows, width of a row, vocabulary, leaves, rows of logits alive at once: odd sizes in several
# blocks with a short last one; a long batch in blocks as they are.
SIZES = (
    (67, 264, 1000, 4, 16),
    (301, 576, 49152, 8, 128),
    (1025, 4096, 151936, 8, 512),
    (9001, 576, 49152, 4, None),
)
GRADIENT = 2.0**-7  # largest error of a bf16 gradient, as a share of the norm

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _operands(rows: int, width: int, vocab: int, seed: int) -> Operands:
    """Hidden rows, weight, targets: the first and the last entry among them."""
    random = source(seed)
    x = torch.randn(rows, width, generator=random, device="cuda").bfloat16()
    w = torch.randn(vocab, width, generator=random, device="cuda").mul_(3 * width**-0.5).bfloat16()
    t = torch.randint(0, vocab, (rows,), generator=random, device="cuda")
    t[0], t[-1] = 0, vocab - 1
    return x, w, t


def _unstreamed(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, plan: ReductionPlan):
    return logprob.selected(gemm.lm_head(x, w), t, plan)


def _gradients(call: Callable, x: torch.Tensor, w: torch.Tensor, slope: torch.Tensor):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = call(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), slope)


def _exact(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, slope: torch.Tensor):
    """Gradients in float64 of hidden rows, some at a time, and of the weight."""
    wide = w.double()
    of_weight, parts = torch.zeros_like(wide), []
    for a in range(0, len(x), 512):
        xs, ts, gs = (z[a : a + 512] for z in (x.double(), t, slope.double()))
        g = torch.softmax(xs @ wide.T, 1).mul_(-gs[:, None])
        g[torch.arange(len(ts), device=g.device), ts] += gs
        parts.append(g @ wide)
        of_weight += g.T @ xs
    return torch.cat(parts), of_weight


def gate_head() -> str:
    """By blocks as whole, bit for bit, with gradients and without; those against float64, twice."""
    tally, usual, worst = Tally("head"), head.LOGITS, 0.0
    for seed, (tokens, width, vocab, leaves, alive) in enumerate(SIZES):
        x, w, t = _operands(tokens, width, vocab, seed)
        plan = ReductionPlan(leaves)
        slope = torch.randn(tokens, generator=source(seed), device="cuda")
        what = f"{tokens} x {width} x {vocab}, {leaves} leaves"
        law = _unstreamed(x, w, t, plan)
        try:
            head.LOGITS = usual if alive is None else 4 * vocab * alive
            call = partial(head.selected, targets=t, plan=plan)
            tally.require(what, call(x, w), law)
            first, second = (_gradients(call, x, w, slope) for _ in range(2))
        finally:
            head.LOGITS = usual
        for name, ours, again, right in zip(
            ("values", "of hidden", "of the weight"),
            first,
            second,
            (law, *_exact(x, w, t, slope)),
            strict=True,
        ):
            tally.require(f"{what}, {name} again", again, ours)
            if name == "values":
                tally.require(f"{what}, {name}", ours, right)
                continue
            error = float((ours.double() - right).norm() / right.norm())
            worst = max(worst, error)
            if not error <= GRADIENT:
                raise Different(
                    "SB0440",
                    seen=f"head, {what}: gradient {name} is {error:.1e} of its norm off",
                    required=f"at most {GRADIENT:.1e}",
                    hint="python -m samebits.bench.gpu --only head",
                )
        del x, w, first, second
    return f"{tally.close()}; gradients within {worst:.1e} of float64"


def gates() -> Iterator[str]:
    """One line, or an error."""
    yield gate_head()


def _eager(call: Callable[[], object]) -> tuple[float, float]:
    """Median microseconds of three calls, and GiB that the last held at most beyond its operands"""
    call()
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e6)
    return sorted(found)[1], (torch.cuda.max_memory_allocated() - before) / 2**30


def rows() -> Iterator[Row]:
    """Forward against cuBLAS's product alone; forward and backward against whole logits."""
    tokens, width, vocab = 8192, 4096, 151936
    x, w, t = _operands(tokens, width, vocab, 0)
    plan = ReductionPlan(8)
    work = f"lm_head + logprob {tokens} x {width} x {vocab}, streamed"
    ours = partial(head.selected, x, w, t, plan)
    theirs, mine = medians([[partial(torch.mm, x, w.t())], [ours]])
    torch.cuda.empty_cache()
    yield row(work, mine, "cuBLAS, bf16 output", theirs, 1.15) | {
        "peak_gib": round(_eager(ours)[1], 2)
    }
    slope, found = torch.ones(tokens, device="cuda"), []
    for call in (
        partial(head.selected, targets=t, plan=plan),
        partial(_unstreamed, t=t, plan=plan),
    ):
        torch.cuda.empty_cache()
        found.append(_eager(partial(_gradients, call, x, w, slope)))
    (mine, peak), (theirs, whole) = found
    memory = {"peak_gib": round(peak, 2), "against_peak_gib": round(whole, 2)}
    yield row(f"{work}, forward and backward", mine, "whole logits", theirs, None) | memory
