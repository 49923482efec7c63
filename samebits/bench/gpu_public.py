"""`python -m samebits.bench.gpu --only public`: every public function of a dense model, on a GPU.

Bits: against the law or the CPU where they promise the same, in any batch, slice and graph. No
bits: gradients, against float64. Areas run side by side in processes of their own, so that one that
fails, or breaks the GPU's context, does not keep the others from running. The last lines are a
table.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from samebits.bench.gpu_attention import pages
from samebits.bench.gpu_timing import replayed
from samebits.bench.gpu_weights import check_weights
from samebits.bits import add_digests, hex_digest
from samebits.errors import Refused
from samebits.ops import (
    attention,
    embedding,
    gemm,
    logprob,
    registry,
    rms_norm,
    rotary,
    silu_mul,
)
from samebits.ops.attention import reference_sm90 as attention_law
from samebits.ops.gemm import reference_sm90, smallest_sm90
from samebits.ops.gemm import sm90 as products
from samebits.ops.gemm.operands_sm90 import KINDS, bf16, bias_for, differing, operands, source
from samebits.ops.logprob import reference_sm90 as logprob_law
from samebits.ops.logprob import triton as logprob_kernels
from samebits.ops.rms_norm import reference_sm90 as rms_law
from samebits.plan import ReductionPlan

# SmolLM2-135M, the model of the smallest real case.
HIDDEN, INNER, HEADS, KEY_HEADS, SIZE, VOCAB = 576, 1536, 9, 3, 64, 49152
WIDTH = (HEADS + 2 * KEY_HEADS) * SIZE
LEAVES, VOCAB_LEAVES = 2, 4
SCALE = SIZE**-0.5
# (N, K, leaves, dtype) of its layers, and of the planted cut of K.
SHAPES = (
    (WIDTH, HIDDEN, 1, torch.bfloat16),
    (2 * INNER, HIDDEN, 1, torch.bfloat16),
    (HIDDEN, HIDDEN, LEAVES, torch.bfloat16),
    (HIDDEN, INNER, LEAVES, torch.bfloat16),
    (VOCAB, HIDDEN, 1, torch.float32),
    (WIDTH, HIDDEN, 2, torch.bfloat16),
)
GRADIENT = 2.0**-6  # largest error of a bf16 gradient, relative to its largest entry


class Area:
    """Comparisons of one area, and what differed."""

    def __init__(self, name: str) -> None:
        self.name, self.checks, self.elements = name, 0, 0
        self.seconds = 0.0
        self.wrong: list[str] = []
        self.notes: list[str] = []

    def same(self, what: str, ours: torch.Tensor, law: torch.Tensor) -> None:
        """Every bit; a NaN equals a NaN."""
        law = law.to(ours.device)
        self.checks += 1
        self.elements += law.numel()
        if ours.shape != law.shape or ours.dtype != law.dtype or not law.numel():
            self.wrong.append(f"{what}: {list(ours.shape)} {ours.dtype}, not {list(law.shape)}")
        elif count := int(differing(ours.contiguous(), law.contiguous())):
            self.wrong.append(f"{what}: {count} of {law.numel()} elements differ")

    def close(self, what: str, ours: torch.Tensor | None, exact: torch.Tensor) -> None:
        """A gradient against float64."""
        self.checks += 1
        if ours is None or ours.shape != exact.shape:
            self.wrong.append(f"{what}: no gradient of shape {list(exact.shape)}")
            return
        self.elements += exact.numel()
        error = float((ours.double() - exact.double()).abs().max() / exact.double().abs().max())
        self.notes.append(f"{what} {error:.1e}")
        if not error <= GRADIENT:
            self.wrong.append(f"{what}: relative error {error:.2e} above {GRADIENT:.2e}")

    def true(self, what: str, holds: bool) -> None:
        """A statement."""
        self.checks += 1
        if not holds:
            self.wrong.append(what)

    def served(self, *regions: str) -> None:
        """This process computed each of `regions`."""
        counts = registry.served()
        missing = [region for region in regions if not counts.get(region)]
        self.true(f"not served: {', '.join(missing)}", not missing)

    def refuses(self, error_id: str, call: Callable[[], object]) -> None:
        """`call` is refused with this id."""
        self.checks += 1
        try:
            call()
        except Refused as error:
            if error.error_id != error_id:
                self.wrong.append(f"refused with {error.error_id}, not {error_id}")
        else:
            self.wrong.append(f"not refused with {error_id}")


def normal(*shape: int, seed: int, size: float = 1.0) -> torch.Tensor:
    """fp32 normal numbers on the GPU."""
    return torch.randn(shape, generator=source(seed), device="cuda") * size


def gradients_of(call: Callable, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of sum(call(...) * fixed numbers) in every tensor."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    y = call(*leaves)
    weight = torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape).bfloat16()
    return list(torch.autograd.grad(y, leaves, weight.to(y.dtype)))


def integers(*values: int) -> torch.Tensor:
    """A table on the GPU."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def check_rows(area: Area) -> None:
    """Embedding, norms, rotary and activation: the CPU's bits or the law's; rows alone; strides."""
    random = source(1)
    ids = torch.randint(0, 512, (33,), generator=random, device="cuda")
    table = bf16((512, HIDDEN), -20, 20, random)
    area.same("embedding", embedding.lookup(ids, table), embedding.lookup(ids.cpu(), table.cpu()))
    (ours,) = gradients_of(lambda w: embedding.lookup(ids, w), table)
    wide = table.double()
    (exact,) = gradients_of(lambda w: w[ids], wide)
    area.close("d embedding", ours, exact)
    for n in (HIDDEN, SIZE, 256):
        x = bf16((40, 2 * n), -127, 60, random)[:, :n]
        x[0], x[1], x[2, 5] = 0, -0.0, torch.nan
        w = bf16((n,), -3, 3, random)
        for centred in (False, True):
            law = rms_law.rms_norm(x, w, 1e-5, centred)
            y = rms_norm.rms_norm(x, w, 1e-5, centred)
            area.same(f"rms_norm {n} {centred}", y, law)
            one = torch.cat([rms_norm.rms_norm(row[None], w, 1e-5, centred) for row in x])
            area.same(f"rms_norm {n} {centred}, rows alone", one, y)
    x, w = (normal(*s, seed=2).bfloat16() for s in ((40, HIDDEN), (HIDDEN,)))
    for centred in (False, True):
        found = gradients_of(lambda x, w, c=centred: rms_norm.rms_norm(x, w, 1e-5, c), x, w)

        def norm(x, w, c=centred):
            return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (w + c)

        exacts = gradients_of(norm, x.double(), w.double())
        for name, a, b in zip("xw", found, exacts, strict=True):
            area.close(f"d{name} rms_norm", a, b)
    x = bf16((40, HEADS, 96), -20, 20, random)
    x = torch.where(torch.rand(x.shape, generator=random, device="cuda") < 0.3, x * 0, x)
    angles, at = rotary.table(600, SIZE, 1e5), torch.randint(0, 600, (40,))
    at[0] = 0
    y = rotary.apply(x, at.cuda(), angles.cuda())
    area.same("rotary, the CPU's bits", y, rotary.apply(x.cpu(), at, angles))
    area.same("rotary, a token alone", rotary.apply(x[:1], at[:1].cuda(), angles.cuda()), y[:1])
    (ours,) = gradients_of(lambda x: rotary.apply(x, at.cuda(), angles.cuda()), x)
    turn = angles.double().cuda()[at.cuda()][:, None]

    def turned(x):
        a, b, rest = x.split([SIZE // 2, SIZE // 2, 96 - SIZE], -1)
        c, s = turn.chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s, rest], -1)

    (exact,) = gradients_of(turned, x.double())
    area.close("dx rotary", ours, exact)
    x = bf16((40, 2 * INNER), -20, 6, random)
    area.same("silu_mul, the CPU's bits", silu_mul.silu_mul(x), silu_mul.silu_mul(x.cpu()))
    x = normal(40, 2 * INNER, seed=3).bfloat16()

    def silu(x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    area.close("dx silu_mul", *gradients_of(silu_mul.silu_mul, x), *gradients_of(silu, x.double()))


def check_admission(area: Area) -> None:
    """The live bit test of every product of the model; no admission inside of a capture."""
    for n, k, leaves, dtype in SHAPES:
        products.admit(n, k, leaves, dtype)
    for found in products.admitted():
        area.checks += 1
        area.elements += found.elements
    area.true("a shape was not listed", len(products.admitted()) >= len(SHAPES))
    x, w = (torch.ones(s, device="cuda").bfloat16() for s in ((3, 64), (72, 64)))

    def captured() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            gemm.linear(x, w)

    area.refuses("SB0454", captured)
    torch.cuda.synchronize()
    area.refuses("SB0453", lambda: gemm.linear(x[:, :60], w[:, :60].contiguous()))
    area.refuses("SB0420", lambda: gemm.linear(x, w.cpu()))
    area.refuses("SB0413", lambda: gemm.linear(x, w.t().contiguous().t()))


def _product(shape: tuple[int, int, int, torch.dtype]) -> Callable[..., torch.Tensor]:
    _, _, leaves, dtype = shape
    if dtype == torch.float32:
        return gemm.lm_head
    if leaves == 1:
        return gemm.linear
    return lambda x, w: gemm.row_parallel(x, w, ReductionPlan(leaves))


def check_gemm(area: Area) -> None:
    """Rows alone, batches, tails, strides, halves of a sum as ranks hold them; gradients."""
    for seed, shape in enumerate(SHAPES):
        n, k, leaves, dtype = shape
        call, what = _product(shape), f"{n} x {k}, {leaves} leaves"
        for kind in ("normal", "wide", "ties"):
            x, w = operands(kind, 600, n, k, source(seed))
            law = smallest_sm90.accumulate(x, w, ReductionPlan(leaves)).to(dtype)
            y = call(x, w)
            area.same(f"{what}, {kind}", y, law)
            for first, last in ((0, 1), (17, 25), (3, 90), (100, 355), (0, 599)):
                part = call(x[first:last], w)
                area.same(f"{what}, {kind}, rows {first} to {last}", part, y[first:last])
    x, w = operands("wide", 70, WIDTH, HIDDEN, source(9))
    whole, half = gemm.row_parallel(x, w, ReductionPlan(2)), HIDDEN // 2
    roots = [gemm.lm_head(x[:, a : a + half], w[:, a : a + half].contiguous()) for a in (0, half)]
    area.same("two ranks are one", (roots[0] + roots[1]).bfloat16(), whole)
    y, wide = gemm.linear(x, w), torch.nn.functional.pad(x, (8, 8))[:, 8:-8]
    area.same("a strided x", gemm.linear(wide, w), y)
    area.same("three dimensions", gemm.linear(x.view(7, 10, -1), w).view(70, -1), y)
    area.true("an empty batch has another shape", gemm.linear(x[:0], w).shape == (0, WIDTH))
    area.same("4 columns", gemm.linear(x, w[:4].contiguous()), y[:, :4])
    x, w = operands("normal", 70, WIDTH, HIDDEN, source(10))
    exact = gradients_of(lambda x, w: x @ w.t(), x.double(), w.double())
    for name, call in (
        ("linear", gemm.linear),
        ("row_parallel", lambda x, w: gemm.row_parallel(x, w, ReductionPlan(2))),
        ("lm_head", gemm.lm_head),
    ):
        for side, ours, law in zip("xw", gradients_of(call, x, w), exact, strict=True):
            area.close(f"d{side} {name}", ours, law)


# With a bias: a model's own shape, one whose tiles are pinned for speed, tails of N and K.
BIASED = ((WIDTH, HIDDEN), (6144, 4096), (20, 40), (64, 16))


def check_bias(area: Area) -> None:
    """Products with a bias: against the law, rows alone, in a graph; gradients; refusals."""
    for n, k in BIASED:
        products.admit(n, k, 1, biased=True)
    found = [one for one in products.admitted() if one.bias]
    area.checks += len(found)
    area.elements += sum(one.elements for one in found)
    area.true("a shape was not listed", len(found) == len(BIASED))
    for seed, (n, k) in enumerate(BIASED):
        for kind in KINDS:
            random = source(seed)
            (x, w), bias = operands(kind, 600, n, k, random), bias_for(kind, n, random)
            law = smallest_sm90.accumulate(x, w, ReductionPlan(1)) + bias.float()
            y, what = gemm.linear(x, w, bias), f"{n} x {k}, {kind}"
            area.same(what, y, law.bfloat16())
            for first, last in ((0, 1), (17, 25), (3, 90), (100, 355), (0, 599)):
                part = gemm.linear(x[first:last], w, bias)
                area.same(f"{what}, rows {first} to {last}", part, y[first:last])
    x, w = operands("normal", 70, WIDTH, HIDDEN, source(10))
    bias = bias_for("normal", WIDTH, source(11))
    small = reference_sm90.linear(x[:9, :48].cpu(), w[:40, :48].cpu(), bias[:40].cpu())
    ours = gemm.linear(x[:9, :48], w[:40, :48].contiguous(), bias[:40])
    area.same("the integer law", ours, small)
    y = gemm.linear(x, w, bias)
    area.true("rounded once", not torch.equal(y, gemm.linear(x, w) + bias))
    area.same("an odd address", gemm.linear(x, w[1:], bias[1:]), y[:, 1:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = gemm.linear(x, w, bias)
    bias.mul_(2)
    graph.replay()
    area.same("replayed with another bias", replayed, gemm.linear(x, w, bias))
    exact = gradients_of(lambda x, w, b: x @ w.t() + b, x.double(), w.double(), bias.double())
    for side, ours, law in zip("xwb", gradients_of(gemm.linear, x, w, bias), exact, strict=True):
        area.close(f"d{side} linear", ours, law)
    area.refuses("SB0420", lambda: gemm.linear(x, w, bias.float()))
    area.refuses("SB0421", lambda: gemm.linear(x, w, bias[1:]))
    area.refuses("SB0413", lambda: gemm.linear(x, w, w[:, 0]))
    area.served("gemm.bias")


def check_attention(area: Area) -> None:
    """Law, packed sequences, slices of a prefill, decode, page sizes, graphs; gradients."""
    length = 700
    q = normal(length, HEADS, SIZE, seed=4).bfloat16()
    k, v = (normal(length, KEY_HEADS, SIZE, seed=s).bfloat16() for s in (5, 6))
    y = attention.varlen(q, k, v, torch.tensor([0, length]), SCALE)
    at = torch.tensor([0, 5, 127, 255, 256, 511, 699], device="cuda")
    for head in (0, 4, 8):
        key = head // (HEADS // KEY_HEADS)
        exact = attention_law.attend(q[at, head], k[:, key], v[:, key], at, SCALE)
        area.same(f"law, head {head}", y[at, head], exact.bfloat16())
    packed = attention.varlen(
        torch.cat([q[:50], q]), torch.cat([k[:50], k]), torch.cat([v[:50], v]),
        integers(0, 50, 50, 50 + length), SCALE,
    )  # fmt: skip
    area.same("packed, first", packed[:50], y[:50])
    area.same("packed, second", packed[50:], y)
    cuts = [0, 1, 16, 17, 300, 556, 699, length]
    slices = list(itertools.pairwise(cuts))
    for page in (16, 32, 64):
        kc, vc, table = pages(k, v, page)
        many = table.expand(len(slices), -1).contiguous()
        tokens = torch.cat([torch.arange(a, b, device="cuda") for a, b in slices])
        starts, ends = integers(*cuts), integers(*cuts[1:])

        def sliced(kc=kc, vc=vc, many=many, tokens=tokens, starts=starts, ends=ends):
            return attention.paged(
                q[tokens], kc, vc, many, starts, ends, SCALE, most=400, longest=length
            )

        area.same(f"slices, pages of {page}", sliced(), y)
        if page == 16:
            area.same("slices, in a graph", replayed(sliced), y)
        steps = torch.tensor([0, 15, 255, 256, 400, 699], device="cuda")
        each = table.expand(len(steps) + 2, -1).contiguous()
        # A request in between that asks for nothing, and a padded one.
        starts = integers(0, 1, 2, 3, 3, 4, 5, 6, 6)
        ends = integers(1, 16, 256, 9, 257, 401, 700, 0)
        out = torch.full((7, HEADS, SIZE), 3.0, device="cuda").bfloat16()
        rows = torch.cat([q[steps], q[:1]])

        def decoded(kc=kc, vc=vc, each=each, starts=starts, ends=ends, out=out, rows=rows):
            return attention.paged(
                rows, kc, vc, each, starts, ends, SCALE, out, most=1, longest=1024
            )

        area.same(f"decode, pages of {page}", decoded()[:6], y[steps])
        area.true("decode wrote a row of no request", bool((out[6] == 3).all()))
        if page == 16:
            area.same("decode, in a graph", replayed(decoded)[:6], y[steps])
    area.refuses(
        "SB0416",
        lambda: attention.paged(q[:1], kc, vc, each, integers(0, 1), integers(1), SCALE),
    )
    lengths = (40, 40, 7, 40)
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    total = int(starts[-1])

    def softmax(q, k, v):
        parts = []
        for a, b in itertools.pairwise(starts.tolist()):
            qs = q[a:b].transpose(0, 1)
            ks, vs = (x[a:b].transpose(0, 1).repeat_interleave(3, 0) for x in (k, v))
            s = (qs @ ks.mT) * SCALE
            mask = torch.ones(b - a, b - a, dtype=torch.bool, device="cuda").triu(1)
            parts.append((s.masked_fill(mask, -torch.inf).softmax(-1) @ vs).transpose(0, 1))
        return torch.cat(parts)

    def ours(q, k, v):
        return attention.varlen(q, k, v, starts, SCALE)

    some = [x[:total] for x in (q, k, v)]
    found, again = gradients_of(ours, *some), gradients_of(ours, *some)
    law = gradients_of(softmax, *[x.double() for x in some])
    for name, a, b, c in zip("qkv", found, law, again, strict=True):
        area.close(f"d{name} attention", a, b)
        area.same(f"d{name} attention, again", c, a)


def check_logprob(area: Area) -> None:
    """Law, whole rows, selected entries, padded columns, ranks, digests, gradients."""
    plan, rows = ReductionPlan(VOCAB_LEAVES), 32
    logits = normal(rows, VOCAB, seed=7, size=4.0)
    logits[1, : VOCAB // 2] = -torch.inf
    logits[2], logits[3, 7], logits[4, 0] = -torch.inf, torch.nan, torch.inf
    targets = torch.randint(VOCAB // 2, VOCAB, (rows,), generator=source(8), device="cuda")
    law = logprob_law.selected(logits, targets, plan, VOCAB)
    y = logprob.selected(logits, targets, plan)
    whole = logprob.log_softmax(logits, plan)
    area.same("selected", y, law)
    area.same("an entry of the row", whole.gather(1, targets[:, None])[:, 0], y)
    area.same("a row alone", logprob.log_softmax(logits[9:10], plan), whole[9:10])
    area.true("rows without a distribution are NaN", bool(y[2:5].isnan().all()))
    area.true("others are not", not bool(y[5:].isnan().any()))
    wide = torch.nn.functional.pad(logits, (0, 64), value=torch.nan)
    area.same("padded", logprob.log_softmax(wide, plan, VOCAB)[:, :VOCAB], whole)
    roots, _ = logprob_kernels.roots(logits, plan, VOCAB)
    for ranks in (2, 4):
        parts = [
            logprob_kernels.roots(part.contiguous(), plan.local(ranks), VOCAB // ranks)[0]
            for part in logits.split(VOCAB // ranks, 1)
        ]
        folded = logprob_kernels.fold_ranks(torch.stack(parts, 1))
        area.same(f"{ranks} ranks", folded, roots)
    digests = logprob.row_digest(logits)
    area.true("digests are the CPU's", digests == logprob.row_digest(logits.cpu()))
    shards = [
        logprob.row_digest(part, start)
        for part, start in ((logits[:, :20000], 0), (logits[:, 20000:], 20000))
    ]
    summed = [add_digests(a, b) for a, b in zip(*shards, strict=True)]
    area.true("digests of shards add up", summed == digests)
    area.same(
        "temperature", logprob.scale(logits, 0.7, True), logprob.scale(logits.cpu(), 0.7, True)
    )
    some = logits[5:]
    (ours,) = gradients_of(lambda x: logprob.selected(x, targets[5:], plan), some)
    (exact,) = gradients_of(
        lambda x: x.log_softmax(-1).gather(1, targets[5:, None])[:, 0], some.double()
    )
    area.close("d logits", ours, exact)


def check_graphs(area: Area) -> None:
    """A layer and the output layer in a CUDA graph: other inputs, other batch, same bits."""
    random = source(11)
    weights = {
        name: normal(n, k, seed=seed, size=0.05).bfloat16()
        for seed, (name, n, k) in enumerate(
            (("qkv", WIDTH, HIDDEN), ("o", HIDDEN, HIDDEN), ("up", 2 * INNER, HIDDEN),
             ("down", HIDDEN, INNER), ("head", VOCAB, HIDDEN)), 20,
        )
    }  # fmt: skip
    norm = normal(HIDDEN, seed=30).bfloat16()
    angles, plan = rotary.table(1024, SIZE, 1e5).cuda(), ReductionPlan(LEAVES)
    kc, vc = (normal(64, 16, KEY_HEADS, SIZE, seed=s).bfloat16() for s in (31, 32))
    table = torch.randperm(64, generator=random, device="cuda").int().view(8, 8)

    def layer(ids, at, starts, lengths):
        x = embedding.lookup(ids, weights["head"])
        heads = gemm.linear(rms_norm.rms_norm(x, norm, 1e-5), weights["qkv"])
        q = rotary.apply(heads.view(-1, 15, SIZE)[:, :HEADS], at, angles)
        y = attention.paged(q, kc, vc, table, starts, lengths, SCALE, most=1, longest=1024)
        x = x + gemm.row_parallel(y.flatten(1), weights["o"], plan)
        up = silu_mul.silu_mul(gemm.linear(rms_norm.rms_norm(x, norm, 1e-5), weights["up"]))
        x = x + gemm.row_parallel(up, weights["down"], plan)
        logits = gemm.lm_head(rms_norm.rms_norm(x, norm, 1e-5), weights["head"])
        return logprob.log_softmax(logits, ReductionPlan(VOCAB_LEAVES))

    ids = torch.randint(0, VOCAB, (8,), generator=random, device="cuda")
    lengths = torch.randint(1, 128, (8,), generator=random, device="cuda").int()
    inputs = [ids, (lengths - 1).long(), integers(*range(9)), lengths]
    eager = layer(*inputs)
    area.same("in a graph", replayed(lambda: layer(*inputs)), eager)
    held = [x.clone() for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(*held)
    order = torch.randperm(8, generator=random, device="cuda")
    for x, new in zip(held[:2], inputs[:2], strict=True):
        x.copy_(new[order])
    table.copy_(table[order])
    held[3].copy_(lengths[order])
    graph.replay()
    area.same("replayed with rows in another order", y, eager[order])
    table.copy_(table[torch.argsort(order)])
    for i in (0, 5):
        one = slice(i, i + 1)
        rows = [ids[one], inputs[1][one], integers(0, 1), lengths[one]]
        whole, table = table, table[one].clone()
        area.same("a row alone", layer(*rows), eager[one])
        table = whole
    area.served(*registry.DENSE)


def check_probes(area: Area) -> None:
    """Known-answer probes of a dense model, twice; the answers are shown."""
    probe(area, registry.BIASED)


def probe(area: Area, regions: tuple[str, ...]) -> None:
    """Probes of `regions`."""
    installed = registry.implementations("sm90")
    for region in regions:
        answer = hex_digest(installed[region].probe())
        area.notes.append(f"{region} {answer[:16]}")
        again = hex_digest(installed[region].probe())
        area.true(f"{region} answered {answer}, then {again}", again == answer)


Check = Callable[[Area], None]
AREAS: tuple[Check, ...] = (
    check_rows,
    check_logprob,
    check_attention,
    check_admission,
    check_gemm,
    check_bias,
    check_graphs,
    check_probes,
    check_weights,
)


def run(check: Check) -> Area:
    """One area in this process; what it raises is counted as wrong."""
    area = Area(check.__name__.removeprefix("check_"))
    started = time.perf_counter()
    try:
        check(area)
        torch.cuda.synchronize()
    except Exception:
        area.wrong.append(traceback.format_exc(limit=-6))
    area.seconds = time.perf_counter() - started
    return area


def isolated(checks: Sequence[Check], limit: float = 300.0) -> Iterator[Area]:
    """Every area in a process of its own, side by side: a fault of the GPU ends one of them."""
    started = [(check, _start(check)) for check in checks]
    stop = time.monotonic() + limit
    for check, process in started:
        area = Area(check.__name__.removeprefix("check_"))
        try:
            out, error = process.communicate(timeout=max(1.0, stop - time.monotonic()))
            vars(area).update(json.loads(out.splitlines()[-1]))
        except subprocess.TimeoutExpired:
            process.kill()
            area.wrong.append(f"not done in {limit:.0f} s: {process.communicate()[1][-2000:]}")
        except (IndexError, ValueError):
            area.wrong.append(f"ended with code {process.returncode}: {error[-2000:]}")
        yield area


def _start(check: Check) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __name__, f"{check.__module__}:{check.__name__}"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=os.getcwd()
    )


def report(areas: Iterable[Area]) -> int:
    """Print what every area found, then the table; 0 where nothing differs, else 1."""
    done = []
    for area in areas:
        done.append(area)
        for line in (*area.wrong, "; ".join(area.notes)):
            print(f"{area.name}: {line}", flush=True)
    for area in done:
        state = "ok" if area.checks and not area.wrong else f"{len(area.wrong)} WRONG"
        print(
            f"{area.name:14} {area.checks:5} checks {area.elements:13} elements "
            f"{area.seconds:6.1f} s  {state}"
        )
    return int(any(area.wrong or not area.checks for area in done))


if __name__ == "__main__":
    module, name = sys.argv[1].split(":")
    print(json.dumps(vars(run(getattr(importlib.import_module(module), name)))))
