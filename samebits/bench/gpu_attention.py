"""Bit gates of attention on Hopper: the law on hostile operands; decode, slices, pages, batches.

One row's bits are its own: the same token must come out of packed sequences, every slice of a
prefill, every page size and a decode step. Memory that no row may read is filled with NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from samebits.bench.gpu_gates import Tally
from samebits.bench.gpu_timing import replayed
from samebits.errors import Different
from samebits.ops.attention import gluon_parts, gluon_rows
from samebits.ops.attention import reference_sm90 as law
from samebits.ops.attention import triton as attention
from samebits.ops.attention.sm90 import kernels
from samebits.ops.gemm.operands_sm90 import bf16

FINITE = ("normal", "wide", "equal", "zeros", "subnormal", "cancel")
KINDS = (*FINITE, "overflow", "nan", "underflow")
LENGTHS = (1, 17, 64, 65, 128, 129, 256, 257, 600)
_SMALL = (attention.Rows(64, 4, 2), attention.Rows(16, 4, 2), attention.Rows(128, 8, 1))
# By head size; none is the pinned one.
GEOMETRIES = {
    64: _SMALL,
    128: _SMALL,
    256: (attention.Rows(64, 4, 1), attention.Rows(16, 4, 1), attention.Rows(32, 4, 1)),
}
PAGES = (16, 32, 64)
# Largest norm of a gradient's error to the gradient's norm: rounding weights and the output to
# bf16 makes 2.8e-3 of it.
GRADIENT = 4e-3
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(
    kind: str, tokens: int, heads: int, key_heads: int, size: int, source: torch.Generator
) -> Operands:
    """q [T, H, D], k and v [T, G, D] bf16 on the GPU."""
    of_q, of_k = (tokens, heads, size), (tokens, key_heads, size)
    if kind in ("normal", "nan"):
        q, k, v = (
            torch.randn(s, generator=source, device="cuda").bfloat16() for s in (of_q, of_k, of_k)
        )
        if kind == "nan":  # one key: rows before it keep their numbers, later ones have NaN
            k[tokens * 2 // 3, :, 5] = torch.nan
        return q, k, v
    if kind == "underflow":  # a later partition's negative sum, scaled below every subnormal
        sign = torch.where(torch.arange(tokens, device="cuda") < 256, 1.0, -1.0)[:, None, None]
        ones = torch.ones(of_k, device="cuda")
        v = torch.where(sign > 0, 0.0, -bf16(of_k, -127, -126, source).abs())
        return ones.new_ones(of_q).bfloat16(), (ones * sign * 2).bfloat16(), v
    low, high, value_low, value_high = {
        "wide": (-6, 3, -40, 40),
        "equal": (-6, 3, 0, 5),
        "zeros": (-4, 2, -2, 2),
        "subnormal": (-72, -62, -127, -122),
        "cancel": (-6, 1, -8, 8),
        "overflow": (50, 66, -8, 8),
    }[kind]
    q, k = bf16(of_q, low, high, source), bf16(of_k, low, high, source)
    v = bf16(of_k, value_low, value_high, source)
    if kind == "equal":  # every weight is one: small integers over a count, many halfway
        q, v = q * 0, v.float().round().bfloat16()
    if kind == "zeros":
        keep = torch.rand(of_k, generator=source, device="cuda") < 0.05
        v = torch.where(keep, v, v * 0)
    if kind == "cancel":  # neighbouring keys take each other back
        k[1::2], v[1::2] = k[: 2 * (tokens // 2) : 2], -v[: 2 * (tokens // 2) : 2]
    return q, k, v


def pages(k: torch.Tensor, v: torch.Tensor, page: int) -> Operands:
    """Caches that hold one sequence in pages of random order, and its table; the rest is NaN."""
    count = -(-k.shape[0] // page)
    table = torch.randperm(count + 3, device="cuda")[:count]
    caches = []
    for x in (k, v):
        cache = x.new_full((count + 3, page, *x.shape[1:]), torch.nan)
        padded = x.new_full((count * page, *x.shape[1:]), torch.nan)
        padded[: x.shape[0]] = x
        cache[table] = padded.view(count, page, *x.shape[1:])
        caches.append(cache)
    return caches[0], caches[1], table.int()


def sdpa(
    backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> torch.Tensor:
    """torch's own attention by one of its kernels: q [B, H, T, D], k and v [B, G, S, D]."""
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=True
        )


def _integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _starts(lengths: list[int]) -> torch.Tensor:
    return _integers([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def _source(seed: int) -> torch.Generator:
    torch.manual_seed(seed)  # for the order of pages
    return torch.Generator("cuda").manual_seed(seed)


def gate_law() -> str:
    """Packed sequences have the integer law's bits; so have rows of a long one, sampled."""
    tally = Tally("attention law")
    for size in GEOMETRIES:
        for seed, kind in enumerate(FINITE):
            q, k, v = operands(kind, sum(LENGTHS), 2, 1, size, _source(seed))
            starts = _starts(list(LENGTHS))
            modules = {attention, kernels(size)[0]}
            found = [x.varlen(q, k, v, starts, max(LENGTHS), size**-0.5) for x in modules]
            first = 0
            for length in LENGTHS:
                span = slice(first, first + length)
                first += length
                for head in range(2):
                    at = torch.arange(length, device="cuda")
                    rows, keys, values = q[span, head], k[span, 0], v[span, 0]
                    exact = law.attend(rows, keys, values, at, size**-0.5)
                    tally.note(exact)
                    what = f"{kind}, D {size}, {length} keys"
                    for y in found:
                        tally.require(what, y[span, head], exact.bfloat16())
                    for t in {0, 127, 128, 300} & set(range(length)) if head else ():
                        one = slice(t, t + 1)  # the law of a row that has no later key
                        alone = law.attend(
                            rows[one], keys[: t + 1], values[: t + 1], at[one], size**-0.5
                        )
                        tally.require(f"{what}, row {t} alone", alone, exact[one])
    for kind in ("normal", "wide"):
        q, k, v = operands(kind, 32768, 2, 1, 128, _source(7))
        at = torch.tensor([0, 255, 256, 9999, 20000, 32766, 32767], device="cuda")
        exact = law.attend(q[at, 1], k[:, 0], v[:, 0], at, 128**-0.5)
        for module in (attention, gluon_rows):
            y = module.varlen(q, k, v, _starts([32768]), 32768, 128**-0.5)
            tally.require(f"{kind}, 32768 keys", y[at, 1], exact.bfloat16())
    return tally.close(("tie", "subnormal", "zero"))


def _views(tally: Tally, kind: str, q, k, v, y, source: torch.Generator) -> None:
    """Decode, slices in one batch, the whole, for every page size; with and without a graph."""
    length, scale = q.shape[0], q.shape[2] ** -0.5
    draws = torch.randint(1, length, (5,), generator=source, device="cuda").tolist()
    cuts = sorted({0, length, *draws})
    slices = list(itertools.pairwise(cuts))
    order = torch.randperm(len(slices), generator=source, device="cuda").tolist()
    slices = [slices[i] for i in order] + [(0, length), (length - 1, length)]
    tokens = torch.cat([torch.arange(a, b, device="cuda") for a, b in slices])
    starts, ends = _starts([b - a for a, b in slices]), _integers([b for _, b in slices])
    steps = torch.arange(length, device="cuda")
    if length > 600:
        steps = torch.cat([steps[-64:], torch.randint(0, length, (64,), device="cuda")])
    for page in PAGES:
        kc, vc, table = pages(k, v, page)
        many = table.expand(len(slices), -1).contiguous()
        each = table.expand(len(steps), -1).contiguous()
        what = f"{kind}, D {q.shape[2]}, {length} keys, pages of {page}"

        def sliced(kc=kc, vc=vc, many=many) -> torch.Tensor:
            return attention.paged(q[tokens], kc, vc, many, starts, ends, length, scale)

        def decoded(kc=kc, vc=vc, each=each) -> torch.Tensor:
            ends = (steps + 1).int()
            of = torch.arange(len(steps) + 1, device="cuda").int()
            return attention.decode(q[steps], kc, vc, each, of, ends, length + 300, scale)

        for run in (sliced, lambda sliced=sliced: replayed(sliced)):
            tally.require(what + ", slices", run(), y[tokens])
        for run in (decoded, lambda decoded=decoded: replayed(decoded)):
            tally.require(what + ", decode", run(), y[steps])


def gate_views() -> str:
    """A token's bits do not see decode, slices, pages, neighbours, geometry or graphs."""
    tally = Tally("attention views")
    for size in GEOMETRIES:
        for seed, kind in enumerate(KINDS):
            source = _source(seed)
            q, k, v = operands(kind, 600, 8, 2, size, source)
            scale = size**-0.5
            y = attention.varlen(q, k, v, _starts([600]), 600, scale)
            tally.note(y.float())
            tally.require(
                f"{kind}, again", attention.varlen(q, k, v, _starts([600]), 600, scale), y
            )
            _views(tally, kind, q, k, v, y, source)
            for geometry in GEOMETRIES[size]:
                other = attention.varlen(q, k, v, _starts([600]), 600, scale, geometry)
                tally.require(f"{kind}, {geometry}", other, y)
            # Between two sequences of NaN, which end inside of its tiles.
            qs, ks, vs = _among_nan((q, k, v))
            packed = attention.varlen(qs, ks, vs, _starts([33, 600, 70]), 600, scale)
            tally.require(f"{kind}, among NaN", packed[33:633], y)
    return tally.close(("zero", "nan"))


def gate_lengths() -> str:
    """Every length from 1 to 600 in one batch of packed sequences; a long sequence."""
    tally = Tally("attention lengths")
    q, k, v = operands("wide", 600, 4, 1, 128, _source(1))
    y = attention.varlen(q, k, v, _starts([600]), 600, 128**-0.5)
    lengths = torch.randperm(600, device="cuda") + 1
    tokens = torch.cat([torch.arange(n, device="cuda") for n in lengths.tolist()])
    batch = attention.varlen(
        q[tokens], k[tokens], v[tokens], _starts(lengths.tolist()), 600, 128**-0.5
    )
    tally.require("1 to 600", batch, y[tokens])
    for length in (5000, 32768):
        source = _source(length)
        q, k, v = operands("normal", length, 8, 2, 128, source)
        y = attention.varlen(q, k, v, _starts([length]), length, 128**-0.5)
        _views(tally, "normal", q, k, v, y, source)
    return tally.close()


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Rows between 33 and 70 rows of NaN."""
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 33, 70), value=torch.nan)


def _split(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with other heads in between."""
    return torch.stack([x, torch.full_like(x, torch.nan)], 2)[:, :, 0]


def _among_nan(given: Operands) -> Operands:
    q, k, v = given
    return _padded(q), _padded(k), _padded(v)


def _heads_apart(given: Operands) -> Operands:
    q, k, v = given
    return _split(q), _split(k), _split(v)


def _fused(given: Operands) -> Operands:
    """The same operands as views of one tensor, as a projection leaves them."""
    sizes = [x[0].numel() for x in given]
    whole = torch.cat([x.flatten(1) for x in given], 1).split(sizes, 1)
    q, k, v = (x.view(y.shape) for x, y in zip(whole, given, strict=True))
    return q, k, v


def gate_packed() -> str:
    """The kernel of packed sequences has the bits of the one that reads pages, and its norms."""
    tally = Tally("attention packed")
    short = [1, 1, 17, 0, 64, 65, 128, 129, 256, 257, 600, 383, 1]
    many = [1 + 7 * i % 150 for i in range(200)]

    def compare(what: str, given: Operands, lengths: list[int]) -> None:
        q, k, v = given
        starts, longest, scale = _starts(lengths), max(lengths), q.shape[2] ** -0.5
        norms = [q.new_full((q.shape[1], len(q)), 7, dtype=torch.float32) for _ in range(2)]
        want = attention.varlen(q, k, v, starts, longest, scale)
        tally.note(want.float())
        first = attention.varlen(q, k, v, starts, longest, scale, norms=norms[0])
        tally.require(f"{what}, pages and norms", first, want)
        call = partial(gluon_rows.varlen, q, k, v, starts, longest, scale)
        tally.require(what, call(), want)
        tally.require(f"{what}, with norms", call(norms[1]), want)
        tally.require(f"{what}, in a graph", replayed(call), want)
        if not torch.allclose(norms[0], norms[1], rtol=1e-5, atol=1e-4, equal_nan=True):
            raise _different(f"{tally.name}, {what}: the norms of both kernels", "equal to 1e-5")

    for size in gluon_parts.SIZES:
        for seed, kind in enumerate(KINDS):
            given = operands(kind, sum(short), 8, 2, size, _source(seed))
            what = f"{kind}, D {size}"
            compare(what, given, short)
            compare(f"{what}, among NaN", _among_nan(given), [33, *short, 70])
        for heads, key_heads in ((9, 3), (3, 1)):
            given = operands("wide", sum(many), heads, key_heads, size, _source(heads))
            what = f"D {size}, {heads} heads of {key_heads}"
            compare(f"{what}, views", _fused(given), many)
            compare(f"{what}, heads apart", _heads_apart(given), many)
            q, k, v = given
            compare(f"{what}, one token", (q[:1], k[:1], v[:1]), [1])
        for length in (5000, 8192):
            given = operands("normal", length, 8, 2, size, _source(length))
            compare(f"D {size}, {length} keys", given, [length])
    return tally.close(("zero", "nan"))


def _exact_gradients(q, k, v, dy, lengths: list[int], scale: float) -> list[torch.Tensor]:
    """By float64."""
    group, parts = q.shape[1] // k.shape[1], []
    for qs, ks, vs, grad in zip(*(x.double().split(lengths) for x in (q, k, v, dy)), strict=True):
        leaves = [x.detach().requires_grad_() for x in (qs, ks, vs)]
        a, b, c = (x.transpose(0, 1) for x in leaves)
        s = (a @ b.repeat_interleave(group, 0).mT) * scale
        hidden = torch.ones(s.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        y = s.masked_fill(hidden, -torch.inf).softmax(-1) @ c.repeat_interleave(group, 0)
        parts.append(torch.autograd.grad(y.transpose(0, 1), leaves, grad))
    return [torch.cat(x) for x in zip(*parts, strict=True)]


def _one(call: Callable[[], Operands], i: int) -> torch.Tensor:
    return call()[i]


def _different(seen: str, required: str) -> Different:
    return Different(
        "SB0440",
        seen=seen,
        required=required,
        hint="python -m samebits.bench.gpu --only attention",
    )


def gate_gradients() -> str:
    """Gradients against float64; the same twice, among NaN, from views, in a graph."""
    tally, worst = Tally("attention gradients"), 0.0
    mixed = [1, 17, 64, 65, 0, 129, 300, 513, 1100, 1]
    many = [1 + 7 * i % 150 for i in range(60)]
    cases = ((mixed, 9, 3), (many, 9, 3), (many, 2, 2), ([1], 3, 1), ([641], 3, 1))
    for size, (lengths, heads, key_heads) in itertools.product(GEOMETRIES, cases):
        rows, back = kernels(size)
        given, scale = (
            operands("normal", sum(lengths), heads, key_heads, size, _source(size)),
            size**-0.5,
        )
        dy = torch.randn_like(given[0])

        def run(given: Operands, dy, lengths: list[int], rows=rows, back=back, scale=scale):
            q, k, v = given
            starts, longest = _starts(lengths), max(lengths)
            norms = q.new_full((q.shape[1], len(q)), torch.nan, dtype=torch.float32)
            y = rows.varlen(q, k, v, starts, longest, scale, norms=norms)
            return partial(back.gradients, q, k, v, y, norms, dy, starts, longest, scale)

        call = run(given, dy, lengths)
        found = call()
        exact = _exact_gradients(*given, dy, lengths, scale)
        padded = run(_among_nan(given), _padded(dy), [33, *lengths, 70])()
        others = {
            "again": call(),
            "among NaN": [x[33:-70] for x in padded],
            "views": run(_fused(given), _split(dy), lengths)(),
            "heads apart": run(_heads_apart(given), dy, lengths)(),
        }
        for i, (name, ours, want) in enumerate(zip("qkv", found, exact, strict=True)):
            what = f"D {size}, {len(lengths)} sequences, {heads} heads of {key_heads}, d{name}"
            scales = want.norm()
            if len(lengths) == 1 and lengths[0] == 1 and name != "v":
                scales = exact[2].norm()  # one key: no score has a gradient
            error = float((ours.double() - want).norm() / scales)
            worst = max(worst, error)
            if not error <= GRADIENT:
                raise _different(
                    f"{tally.name}, {what}: relative error {error:.2e} against float64",
                    f"at most {GRADIENT:.0e}",
                )
            for how, other in others.items():
                tally.require(f"{what}, {how}", other[i], ours)
            graph = replayed(partial(_one, call, i))
            tally.require(f"{what}, in a graph", graph, ours)
    return f"{tally.close()}; largest error against float64 {worst:.1e}"


def gates() -> Iterator[str]:
    """One line for each gate that is green, an error at the first that is red."""
    for gate in (gate_law, gate_views, gate_lengths, gate_packed, gate_gradients):
        yield gate()
