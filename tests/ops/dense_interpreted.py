"""Runs the Hopper kernels of dense models under Triton's interpreter: prints their errors.

A program of its own because TRITON_INTERPRET counts when a kernel is defined. The interpreter
multiplies bf16 wrongly, so all operands are fp32 and nothing is rounded: what is left is control
flow, held against float64. Digests are integers, so they must be those of the CPU.
"""

from __future__ import annotations

import json
import math
import sys

import torch
import triton
import triton.language as tl

from samebits.bits import add_digests, mixsum
from samebits.ops import gpu
from samebits.ops.attention import triton as attention
from samebits.ops.attention import triton_backward
from samebits.ops.gemm import admission_sm90 as admission
from samebits.ops.gemm import triton as gemm
from samebits.ops.logprob import triton as logprob
from samebits.ops.output_gate import triton as output_gate
from samebits.ops.rms_norm import triton as rms_norm
from samebits.ops.rotary import triton as rotary
from samebits.ops.silu_mul import triton as silu_mul
from samebits.plan import ReductionPlan

Errors = dict[str, float]


@triton.jit
def _reciprocal(x):
    return 1.0 / x


@triton.jit
def _exp2(x):
    return tl.exp2(x)


def prepare() -> None:
    """CPU tensors of fp32 pass, and what the interpreter lacks is replaced."""
    gpu.prepare = lambda index: 4
    gpu.require_dtype = lambda name, x, dtype: None
    attention.exp2 = triton_backward.exp2 = _exp2
    rms_norm.reciprocal = silu_mul.reciprocal = _reciprocal


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest element; infinite for a NaN."""
    worst = float((found.double() - wanted.double()).abs().max() / wanted.abs().max())
    return math.inf if math.isnan(worst) else worst


def same(left: torch.Tensor, right: torch.Tensor) -> float:
    """0 where both are equal, NaN where the other has one; else infinite."""
    return 0.0 if torch.equal(left.nan_to_num(7e7), right.nan_to_num(7e7)) else math.inf


def products() -> Errors:
    """Every tile of shapes with tails in M, N and K, and leaves that are no whole steps."""
    found = {}
    for n, k, leaves in ((40, 72, 1), (24, 2 * 48, 2), (72, 4 * 32, 4), (8, 8 * 16, 8)):
        torch.manual_seed(n)
        for tile in admission.tiles_of((n, k, leaves, torch.bfloat16)):
            for m in (1, min(tile.rows, tile.bm + 3)):
                x, w = torch.randn(m, k), torch.randn(n - 3, k)
                y = torch.full((m, n), torch.nan)
                gemm.launch(tile, x, w, y, leaves)
                what = f"{m} x {n} x {k}, {leaves} leaves, {tile.bm} x {tile.bn} x {tile.bk}"
                found[what] = error(y[:, :-3], x.double() @ w.double().T)
                assert not y[:, -3:].any()
    return found


def biased() -> Errors:
    """Every tile with a bias that ends inside of a tile; columns beyond it stay zero."""
    found = {}
    n, k = 40, 72
    torch.manual_seed(n)
    for tile in admission.tiles_of((n, k, 1, torch.bfloat16)):
        for m in (1, min(tile.rows, tile.bm + 3)):
            x, w, bias = torch.randn(m, k), torch.randn(n - 3, k), 10 * torch.randn(n - 3)
            y = torch.full((m, n), torch.nan)
            gemm.launch(tile, x, w, y, 1, bias)
            found[f"{m} by {tile.bm} x {tile.bn} x {tile.bk}"] = error(
                y[:, :-3], x.double() @ w.double().T + bias
            )
            assert not y[:, -3:].any()
    return found


def rows() -> Errors:
    """Norms, rotary (there and back), the activation and the gate."""
    torch.manual_seed(3)
    x, weight = torch.randn(5, 40), torch.randn(40)
    normed = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-3).sqrt()
    found = {}
    for centred in (False, True):
        y = rms_norm.rms_norm(x, weight, 1e-3, centred)
        found[f"norm {centred}"] = error(y, normed * (weight.double() + centred))
    q, at = torch.randn(3, 2, 24), torch.tensor([5, 0, 7])
    angles = torch.randn(8, 10)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    turned = rotary.apply(q, at, table)
    c, s = table[at][:, None].double().split(10, dim=-1)
    a, b = q[..., :10].double(), q[..., 10:20].double()
    wanted = torch.cat([a * c - b * s, b * c + a * s, q[..., 20:].double()], -1)
    found["turned"] = error(turned, wanted)
    found["turned back"] = error(rotary.apply(turned, at, table, inverse=True), q)
    gate, up = torch.randn(3, 9).double(), torch.randn(3, 9).double()
    y = silu_mul.silu_mul(torch.cat([gate, up], 1).float())
    found["silu_mul"] = error(y, torch.nn.functional.silu(gate) * up)
    y = output_gate.output_gate(up.float(), gate.float())
    found["output gate"] = error(y, up * gate.sigmoid())
    return found


def log_probabilities() -> Errors:
    """Whole rows, selected entries, ranks, gradients, rows without a distribution."""
    found = {}
    for leaves, vocab in ((1, 300), (4, 1200), (8, 2400)):
        torch.manual_seed(leaves)
        logits = 3 * torch.randn(6, vocab + 5)
        logits[1, : vocab // 2] = -torch.inf
        logits[2], logits[3, 7], logits[4, 9] = -torch.inf, torch.nan, torch.inf
        targets = torch.randint(vocab // 2, vocab, (6,))
        plan = ReductionPlan(leaves)
        roots, y = logprob.roots(logits, plan, vocab, targets)
        whole = logprob.log_probs(logits, roots, vocab)
        assert (whole[:, vocab:] == -torch.inf).all()
        chosen = whole.gather(1, targets[:, None])[:, 0]
        assert chosen[2:5].isnan().all() and not chosen[[0, 1, 5]].isnan().any()
        found[f"selected is an entry, {leaves}"] = same(y, chosen)
        good = [0, 1, 5]
        exact = logits[good, :vocab].double().log_softmax(1)
        wanted = exact.gather(1, targets[good, None])[:, 0]
        found[f"selected {leaves}"] = error(y[good], wanted)
        grad = torch.randn(6)
        d = logprob.gradient(logits, roots, targets, grad, 0, vocab)
        assert not d[:, vocab:].any()
        onehot = torch.nn.functional.one_hot(targets[good], vocab)
        found[f"gradient {leaves}"] = error(
            d[good, :vocab], grad[good, None].double() * (onehot - exact.exp())
        )
        for ranks in (2, 4, 8):
            if ranks <= leaves:
                width = vocab // ranks
                parts = [
                    logprob.roots(part.contiguous(), plan.local(ranks), width)[0]
                    for part in logits[:, :vocab].split(width, 1)
                ]
                folded = logprob.fold_ranks(torch.stack(parts, 1))
                found[f"{ranks} ranks, {leaves} leaves"] = same(folded, roots)
    return found


def digests() -> Errors:
    """Rows longer than a block, shards, padded columns: the CPU's digests."""
    torch.manual_seed(5)
    logits = torch.randn(3, 5000)
    logits[0, 3], logits[1, 7] = -0.0, torch.nan
    whole = logprob.row_digests(logits, 0, 4990)
    parts = [
        logprob.row_digests(logits[:, a:b].contiguous(), a, min(b, 4990) - a)
        for a, b in ((0, 2100), (2100, 5000))
    ]
    law = [mixsum(row[:4990]) for row in logits]
    summed = [add_digests(a, b) for a, b in zip(*parts, strict=True)]
    return {"rows": float(whole != law), "shards": float(summed != law)}


def attended() -> Errors:
    """Packed sequences, slices over pages, decode beside requests that ask for nothing."""
    torch.manual_seed(6)
    lengths, heads, key_heads, size, page = (300, 1, 40), 3, 1, 64, 16
    total, scale = sum(lengths), 0.3
    q = torch.randn(total, heads, size)
    k, v = (torch.randn(total, key_heads, size) for _ in range(2))
    wanted, first = [], 0
    for n in lengths:
        a, b, c = (x[first : first + n].double().transpose(0, 1) for x in (q, k, v))
        s = (a @ b.mT) * scale
        s.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        wanted.append((s.softmax(-1) @ c).transpose(0, 1))
        first += n
    law = torch.cat(wanted)

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts = integers([0, 300, 301, 341])
    found = {"packed": error(attention.varlen(q, k, v, starts, 300, scale), law)}
    pages, table = [], torch.zeros(4, 19, dtype=torch.int32)
    numbers = torch.randperm(30).int()
    for x in (k, v):
        cache, used, first = torch.full((30, page, key_heads, size), torch.nan), 0, 0
        for request, n in enumerate(lengths):
            padded = torch.nn.functional.pad(x[first : first + n], (0, 0, 0, 0, 0, -n % page))
            count = len(padded) // page
            mine = numbers[used : used + count]
            cache[mine.long()] = padded.view(count, page, key_heads, size)
            table[request, :count] = mine
            first, used = first + n, used + count
        pages.append(cache)
    # Request 1 asks for nothing in between, and a padded request 3 has no keys either.
    at = torch.tensor([299, 340])
    out = torch.full((5, heads, size), 7.0)
    row = torch.cat([q[at], torch.full((3, heads, size), torch.nan)])
    of, keys = integers([0, 1, 1, 2, 2]), integers([300, 1, 40, 0])
    attention.decode(row, *pages, table, of, keys, 512, scale, out)
    found["decode"] = error(out[:2], law[at])
    assert (out[2:] == 7).all()
    at = torch.tensor([*range(250, 300), *range(301, 341)])
    of, row = integers([0, 50, 50, 90, 90]), q[at]
    y = attention.paged(row, *pages, table, of, keys, 50, scale)
    found["slices"] = error(y, law[at])
    return found


def gradients() -> Errors:
    """Packed sequences with tails among NaN, tiles on and off the diagonal, two heads of a key."""
    torch.manual_seed(7)
    lengths, heads, key_heads, size, scale = (100, 1, 140), 4, 2, 64, 0.2
    total, longest = sum(lengths), max(lengths)
    q, dy = torch.randn(total, heads, size), torch.randn(total, heads, size)
    k, v = (torch.randn(total, key_heads, size) for _ in range(2))
    # Before and after them, a sequence that is not theirs.
    padded = [
        torch.nn.functional.pad(x, (0, 0, 0, 0, 9, 8), value=torch.nan) for x in (q, k, v, dy)
    ]
    starts = torch.tensor([0, 9, 109, 110, 110, 250, 258], dtype=torch.int32)
    norms = torch.full((heads, total + 17), torch.nan)
    y = attention.varlen(*padded[:3], starts, longest, scale, norms=norms)
    wanted, first = [], 0
    for n in lengths:
        leaves = [x[first : first + n].double().requires_grad_() for x in (q, k, v)]
        a, b, c = (x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1) for x in leaves)
        s = (a @ b.mT) * scale
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        out = (s.softmax(-1) @ c).transpose(0, 1)
        wanted.append(torch.autograd.grad(out, leaves, dy[first : first + n].double()))
        first += n
    tile = triton_backward.Tile
    found = {}
    for chosen in ((), (tile(128, 64, 4, 2), tile(128, 64, 4, 2))):
        given = (*padded[:3], y, norms, padded[3], starts, longest, scale, *chosen)
        ours = triton_backward.gradients(*given)
        for name, x, law in zip("qkv", ours, zip(*wanted, strict=True), strict=True):
            found[f"d{name} {chosen[:1]}"] = error(x[9:-8], torch.cat(law))
    return found


def main() -> None:
    prepare()
    parts = (products, biased, rows, log_probabilities, digests, attended, gradients)
    json.dump({part.__name__: part() for part in parts}, sys.stdout)


if __name__ == "__main__":
    main()
