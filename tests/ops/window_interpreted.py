"""Runs the Hopper kernels of windowed attention under Triton's interpreter: prints their errors.

In fp32, against float64, as `dense_interpreted.py`, whose helpers it uses. Where the window is at
least as long as the sequences, everything has to be what the kernels without a window give.
"""

from __future__ import annotations

import json
import sys

import dense_interpreted as dense
import torch

from samebits.ops.attention import triton as whole
from samebits.ops.attention import triton_backward as whole_backward
from samebits.ops.window_attention import triton as attention
from samebits.ops.window_attention import triton_backward

WINDOWS = (1, 63, 130, 257)
LENGTHS, HEADS, KEY_HEADS, SIZE, PAGE, SCALE = (300, 1, 40), 4, 2, 64, 16, 0.3
TOTAL, LONGEST = sum(LENGTHS), max(LENGTHS)
STARTS = torch.tensor([0, 300, 301, 341], dtype=torch.int32)


def integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """All sequences by float64, differentiable."""
    parts = []
    for qs, ks, vs in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        a, b, c = (
            x.repeat_interleave(HEADS // x.shape[1], 1).transpose(0, 1) for x in (qs, ks, vs)
        )
        at = torch.arange(len(qs))
        behind = at[:, None] - at[None]
        s = (a @ b.mT * SCALE).masked_fill((behind < 0) | (behind >= window), -torch.inf)
        parts.append((s.softmax(-1) @ c).transpose(0, 1))
    return torch.cat(parts)


def drawn(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(TOTAL, n, SIZE) for n in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]


def paged_out(k: torch.Tensor, v: torch.Tensor, low: list[int]):
    """Caches and table; what lies before key `low` of a sequence is NaN or nowhere."""
    numbers = torch.randperm(30).int()
    table = torch.zeros(4, 19, dtype=torch.int32)
    caches = []
    for x in (k, v):
        cache, used = torch.full((30, PAGE, KEY_HEADS, SIZE), torch.nan), 0
        for request, (part, first) in enumerate(zip(x.split(LENGTHS), low, strict=True)):
            part = part.clone()
            part[:first] = torch.nan
            padded = torch.nn.functional.pad(part, (0, 0, 0, 0, 0, -len(part) % PAGE))
            count = len(padded) // PAGE
            mine = numbers[used : used + count]
            cache[mine.long()] = padded.view(count, PAGE, KEY_HEADS, SIZE)
            table[request, :count] = mine
            table[request, : first // PAGE] = 1 << 20  # a read there is far outside
            used += count
        caches.append(cache)
    return *caches, table


def attended() -> dense.Errors:
    """Packed, slices over pages, decode beside requests that ask for nothing; two geometries."""
    found = {}
    q, k, v, _ = drawn(6)
    full = whole.varlen(q, k, v, STARTS, LONGEST, SCALE)
    for window in WINDOWS:
        law = softmax(*(x.double() for x in (q, k, v)), window)
        norms = torch.full((HEADS, TOTAL), torch.nan)
        y = attention.varlen(q, k, v, STARTS, LONGEST, SCALE, window, norms=norms)
        found[f"packed {window}"] = dense.error(y, law)
        assert not norms.isnan().any()
        if window == 63:
            small = whole.Rows(32, 4, 1)
            y = attention.varlen(q, k, v, STARTS, LONGEST, SCALE, window, small)
            found[f"packed by 32 rows {window}"] = dense.error(y, law)
        # Request 1 asks for nothing in between, and a padded request 3 has no keys either.
        *caches, table = paged_out(k, v, [max(0, 300 - window), 0, max(0, 40 - window)])
        at, of, keys = [299, 340], integers([0, 1, 1, 2, 2]), integers([300, 1, 40, 0])
        rows = torch.cat([q[at], torch.full((3, HEADS, SIZE), torch.nan)])
        out = torch.full((5, HEADS, SIZE), 7.0)
        attention.decode(rows, *caches, table, of, keys, 512, SCALE, window, out)
        found[f"decode {window}"] = dense.error(out[:2], law[at])
        assert (out[2:] == 7).all()
        *caches, table = paged_out(k, v, [max(0, 251 - window), 0, 0])
        at, of = [*range(250, 300), *range(301, 341)], integers([0, 50, 50, 90, 90])
        y = attention.paged(q[at], *caches, table, of, keys, 50, SCALE, window)
        found[f"slices {window}"] = dense.error(y, law[at])
    found["long enough"] = dense.same(
        attention.varlen(q, k, v, STARTS, LONGEST, SCALE, LONGEST), full
    )
    return found


def gradients() -> dense.Errors:
    """Tails among NaN, tiles inside and on both edges of the window, two heads of a key."""
    found = {}
    q, k, v, dy = drawn(7)
    padded = [
        torch.nn.functional.pad(x, (0, 0, 0, 0, 9, 8), value=torch.nan) for x in (q, k, v, dy)
    ]
    starts = torch.cat([integers([0]), STARTS + 9, integers([TOTAL + 17])])
    small = whole_backward.Tile(64, 32, 4, 2)
    for window, tiles in ((1, None), (63, (small, small)), (130, None), (257, None)):
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        law = torch.autograd.grad(softmax(*leaves, window), leaves, dy.double())
        norms = torch.full((HEADS, TOTAL + 17), torch.nan)
        y = attention.varlen(*padded[:3], starts, LONGEST, SCALE, window, norms=norms)
        given = *padded[:3], y, norms, padded[3], starts, LONGEST, SCALE, window
        ours = triton_backward.gradients(*given, tiles)
        largest = max(float(x.abs().max()) for x in law)  # of one key, only dv is not zero
        for name, x, wanted in zip("qkv", ours, law, strict=True):
            error = (x[9:-8].double() - wanted).abs().max() / largest
            found[f"d{name} {window}"] = float(error.nan_to_num(torch.inf))
    return found


def main() -> None:
    dense.prepare()
    triton_backward.exp2 = dense._exp2
    json.dump({part.__name__: part() for part in (attended, gradients)}, sys.stdout)


if __name__ == "__main__":
    main()
