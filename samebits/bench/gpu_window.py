"""Windowed attention on Hopper: bit gates in processes side by side, then times.

Bits: the law on hostile operands; decode, slices, pages, neighbours and graphs; `ops/attention`
where the window is long enough. Whatever no row may see is NaN: keys before a window in their
pages, pages before it, other sequences. Gradients: against float64, and twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from samebits.bench import gpu_attention, gpu_fa3
from samebits.bench.gpu_attention import FINITE, KINDS, operands, pages
from samebits.bench.gpu_gates import Tally
from samebits.bench.gpu_public import Area, Check, integers, isolated, normal
from samebits.bench.gpu_timing import Calls, Row, medians, replayed, row
from samebits.bits import hex_digest
from samebits.errors import Different
from samebits.ops import registry, window_attention
from samebits.ops.attention import triton as whole
from samebits.ops.attention.sm90 import kernels
from samebits.ops.gemm.operands_sm90 import source
from samebits.ops.window_attention import reference_sm90 as law
from samebits.ops.window_attention import triton as attention
from samebits.ops.window_attention import triton_backward

WINDOWS = (1, 16, 63, 256, 257, 1024)
SEEN = (1, 63, 257)  # windows of every view
LENGTHS = (1, 64, 129, 257, 600)
LONG = 600
PAGES = {64: (16, 32), 128: (16, 64), 256: (16,)}  # by head size
GRADIENT = 2.0**-6  # largest error, as a share of the largest entry
HEADS, KEY_HEADS, SIZE, WINDOW = 32, 8, 128, 1024  # of what is timed
Named = dict[str, Callable[[], Any]]


def _starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return integers(0, *itertools.accumulate(lengths))


def _law(area: Area, size: int) -> None:
    """Packed sequences of hostile operands, every window; rows of the law alone."""
    tally = Tally("window")
    for seed, kind in enumerate(FINITE):
        q, k, v = operands(kind, sum(LENGTHS), 8, 2, size, source(seed))
        starts = _starts(LENGTHS)
        for turn, window in enumerate(WINDOWS):
            y = window_attention.varlen(q, k, v, starts, size**-0.5, window)
            head, stop = 3 * turn % 8, 0
            for length in LENGTHS:
                span = slice(stop, stop + length)
                stop += length
                at = torch.arange(length, device="cuda")
                given = q[span, head], k[span, head // 4], v[span, head // 4]
                exact = law.attend(*given, at, size**-0.5, window)
                tally.note(exact)
                what = f"law, {kind}, window {window}, {length} keys"
                area.same(what, y[span, head], exact.bfloat16())
            if kind in ("normal", "wide"):  # from the window's first partition on, not from 0
                one = slice(length - 1, length)
                alone = law.attend(given[0][one], *given[1:], at[one], size**-0.5, window)
                area.same(f"{what}, alone", alone, exact[one])
    for hazard in ("tie", "subnormal", "zero"):
        area.true(f"no {hazard} in the law", tally.hazards[hazard] > 0)


def _views(area: Area, size: int) -> None:
    """Every way to the same token, and attention without a window where that is the same."""
    scale = size**-0.5
    for seed, kind in enumerate(KINDS):
        given = operands(kind, LONG, 8, 2, size, source(seed))
        starts = integers(0, LONG)
        full = kernels(size)[0].varlen(*given, starts, LONG, scale)
        for window in (LONG, 1 << 40):
            y = window_attention.varlen(*given, starts, scale, window)
            area.same(f"{kind}, window {window}, as without", y, full)
        for page in PAGES[size]:
            _paged(area, f"{kind}, long enough", given, full, LONG, page)
        for window in SEEN:
            what = f"{kind}, window {window}"
            y = window_attention.varlen(*given, starts, scale, window)
            area.same(f"{what}, before it is full", y[:window], full[:window])
            if kind == "normal":
                area.true(f"{what}, as without a window", not torch.equal(y, full))
            area.same(f"{what}, again", window_attention.varlen(*given, starts, scale, window), y)
            padded = gpu_attention._among_nan(given)
            packed = window_attention.varlen(*padded, _starts((33, LONG, 70)), scale, window)
            area.same(f"{what}, among NaN", packed[33 : 33 + LONG], y)
            for page in PAGES[size]:
                _paged(area, what, given, y, window, page)
            if size == 64:
                rows = whole.Rows(16, 4, 1)
                other = attention.varlen(*given, starts, LONG, scale, window, rows)
                area.same(f"{what}, by 16 rows", other, y)


def _paged(area: Area, what: str, given, y: torch.Tensor, window: int, page: int) -> None:
    """Slices in one batch and decode steps, with and without a graph, through pages."""
    q, k, v = given
    scale, what = q.shape[2] ** -0.5, f"{what}, pages of {page}"
    kc, vc, table = pages(k, v, page)
    nowhere = (set(range(len(kc))) - set(table.tolist())).pop()  # a page of NaN

    def hidden(low: torch.Tensor) -> torch.Tensor:
        """The table for each of these first keys: no page before its own."""
        columns = torch.arange(len(table), device="cuda")
        return torch.where(columns < low.clamp(min=0)[:, None] // page, nowhere, table).int()

    slices = [(0, LONG), (LONG - 1, LONG), (0, 1), (1, 130), (130, 131), (131, 512), (512, LONG)]
    rows = torch.cat([torch.arange(a, b, device="cuda") for a, b in slices])
    starts = _starts(tuple(b - a for a, b in slices))
    ends, lows = integers(*(b for _, b in slices)), integers(*(a - window + 1 for a, _ in slices))
    many = hidden(lows)

    def sliced() -> torch.Tensor:
        return window_attention.paged(
            q[rows], kc, vc, many, starts, ends, scale, window, most=LONG, longest=LONG
        )

    area.same(f"{what}, slices", sliced(), y[rows])
    steps = torch.arange(0, LONG, 7, device="cuda")
    steps = torch.cat([steps, torch.tensor([255, 256, 257, 511, 512, LONG - 1], device="cuda")])
    count = len(steps)
    # Two more: one that asks for nothing, and one of padding.
    each = torch.cat([hidden(steps - window + 1), table.expand(2, -1)]).contiguous()
    of = integers(*range(count + 1), count, count)
    lengths = torch.cat([(steps + 1).int(), integers(300, 0)])
    out = torch.full((count + 1, *q.shape[1:]), 3.0, device="cuda").bfloat16()
    asked = torch.cat([q[steps], q[:1] * torch.nan])

    def decoded() -> torch.Tensor:
        return window_attention.paged(
            asked, kc, vc, each, of, lengths, scale, window, out, most=1, longest=LONG + 300
        )

    area.same(f"{what}, decode", decoded()[:count], y[steps])
    area.true(f"{what}, decode wrote a row of no request", bool((out[count] == 3).all()))
    area.same(f"{what}, slices in a graph", replayed(sliced), y[rows])
    area.same(f"{what}, decode in a graph", replayed(decoded)[:count], y[steps])
    # The last token, with NaN in what its pages hold before the window.
    low = max(0, LONG - window)
    gone = []
    for x in (k, v):
        x = x.clone()
        x[:low] = torch.nan
        gone.append(x)
    caches = pages(gone[0], gone[1], page)
    last = window_attention.paged(
        q[-1:], *caches[:2], caches[2][None], integers(0, 1), integers(LONG), scale, window,
        most=1, longest=LONG,
    )  # fmt: skip
    area.same(f"{what}, NaN before the window", last, y[-1:])


def check_heads_of_64(area: Area) -> None:
    """Law and views."""
    _law(area, 64)
    _views(area, 64)


def check_heads_of_128(area: Area) -> None:
    """Law and views."""
    _law(area, 128)
    _views(area, 128)


def check_heads_of_256(area: Area) -> None:
    """Law and views."""
    _law(area, 256)
    _views(area, 256)


def _softmax(lengths: tuple[int, ...], scale: float, window: int, q, k, v) -> torch.Tensor:
    parts = []
    for qs, ks, vs in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        a, b, c = (x.transpose(0, 1) for x in (qs, ks, vs))
        b, c = (x.repeat_interleave(len(a) // len(b), 0) for x in (b, c))
        at = torch.arange(a.shape[1], device="cuda")
        behind = at[:, None] - at[None]
        s = (a @ b.mT * scale).masked_fill((behind < 0) | (behind >= window), -torch.inf)
        parts.append((s.softmax(-1) @ c).transpose(0, 1))
    return torch.cat(parts)


def check_gradients(area: Area) -> None:
    """Every head size: against float64, twice, among NaN."""
    lengths = (1, 65, 300, 513, 700)
    for size, window in itertools.product(PAGES, (16, 257, 2000)):
        scale, starts = size**-0.5, _starts(lengths)
        q, k, v = (
            normal(sum(lengths), n, size, seed=seed).bfloat16() for seed, n in enumerate((6, 2, 2))
        )
        given = q, k, v
        dy = normal(sum(lengths), 6, size, seed=9).bfloat16()

        def gradients(given, dy, starts, window=window, scale=scale):
            q, k, v = leaves = [x.detach().requires_grad_() for x in given]
            y = window_attention.varlen(q, k, v, starts, scale, window)
            return torch.autograd.grad(y, leaves, dy)

        found = gradients(given, dy, starts)
        again = gradients(given, dy, starts)
        padded = gpu_attention._among_nan(given), gpu_attention._padded(dy)
        apart = gradients(*padded, _starts((33, *lengths, 70)))
        leaves = [x.double().requires_grad_() for x in given]
        y = _softmax(lengths, scale, window, *leaves)
        exact = torch.autograd.grad(y, leaves, dy.double())
        for i, name in enumerate("qkv"):
            what = f"d{name}, D {size}, window {window}"
            area.close(what, found[i], exact[i])
            area.same(f"{what}, again", again[i], found[i])
            area.same(f"{what}, among NaN", apart[i][33:-70], found[i])


def check_public(area: Area) -> None:
    """The probe, twice; refusals; counts."""
    probe = registry.unrouted("sm90")[window_attention.REGION].probe
    answer = hex_digest(probe())
    area.notes.append(f"probe {answer[:16]}")
    area.true("the probe answers twice", hex_digest(probe()) == answer)
    q, k, v = operands("normal", 40, 6, 2, 64, source(1))
    kc, vc, table = pages(k, v, 16)
    tables = table[None], integers(0, 40), integers(40)
    registry.reset_served()
    window_attention.varlen(q, k, v, integers(0, 40), 0.1, 9)
    window_attention.paged(q, kc, vc, *tables, 0.1, 9, most=40, longest=40)
    area.true("rows were not counted", registry.served() == {window_attention.REGION: 80})
    packed = partial(window_attention.varlen, q, k, v, integers(0, 40), 0.1)
    paged = partial(window_attention.paged, q, kc, vc, *tables)
    limits = {"most": 40, "longest": 40}
    for window in (0, -1, 9.0, True):
        area.refuses("SB0417", partial(paged, 0.1, window, **limits))
        area.refuses("SB0417", partial(packed, window))
    area.refuses("SB0416", partial(paged, 0.1, 9))
    area.refuses("SB0414", partial(paged, 0.0, 9, **limits))
    area.refuses("SB0413", partial(paged, 0.1, 9, q.mT.contiguous().mT, **limits))


CHECKS: tuple[Check, ...] = (
    check_heads_of_64,
    check_heads_of_128,
    check_heads_of_256,
    check_gradients,
    check_public,
)


def _different(seen: str, required: str) -> Different:
    hint = "python -m samebits.bench.gpu --only window"
    return Different("SB0440", seen=seen, required=required, hint=hint)


def gates() -> Iterator[str]:
    """One line for each check; SB0440 with what differs, after all of them have ended."""
    areas = list(isolated(CHECKS, limit=240.0))
    wrong = [f"{area.name}: {line}" for area in areas for line in area.wrong]
    wrong += [f"{area.name}: nothing compared" for area in areas if not area.checks]
    if wrong:
        raise _different(
            f"{len(wrong)} comparisons of windowed attention; {'; '.join(wrong[:4])}",
            "the bits of the law, in every view",
        )
    for area in areas:
        line = f"gate window {area.name}: {area.checks} comparisons, {area.elements} elements"
        notes = f"; {area.notes[0]}" if area.name == "public" else ""
        yield f"{line}, 0 differ, {area.seconds:.0f} s{notes}"


def _flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> Callable[[], torch.Tensor]:
    """torch's attention with a mask, compiled: q [T, H, D], k and v [T, G, D]."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(_batch, _head, i, j):
        return (j <= i) & (j > i - window)

    mask = create_block_mask(seen, None, None, len(q), len(k), device="cuda")
    compiled = torch.compile(flex_attention)
    qs, ks, vs = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))

    def call() -> torch.Tensor:
        y = compiled(qs, ks, vs, block_mask=mask, scale=scale, enable_gqa=True)
        return y[0].transpose(0, 1)

    return call


def _compare(ours: Named, theirs: Named, target: float) -> Iterator[Row]:
    """Rows of all of ours against all of theirs, which have to compute the same function."""
    wanted = next(iter(ours.values()))().float()
    for name, call in theirs.items():
        error = float((call().float() - wanted).abs().max() / wanted.abs().max())
        if not error <= GRADIENT:
            raise _different(
                f"{name} and windowed attention are {error:.1e} apart", f"at most {GRADIENT:.1e}"
            )
    yield from _timed(ours, theirs, target)


def _timed(ours: Named, theirs: Named, target: float | None) -> Iterator[Row]:
    sides: list[Calls] = [[call] for call in (*ours.values(), *theirs.values())]
    times = medians(sides)
    for work, time in zip(ours, times, strict=False):
        for name, their_time in zip(theirs, times[len(ours) :], strict=True):
            yield row(work, time, name, their_time, target)


def _prefill(fa3: bool) -> Iterator[Row]:
    """One sequence of 8192, packed and from pages of 16 in random order, and with gradients."""
    tokens, scale, window = 8192, SIZE**-0.5, WINDOW
    q, k, v = given = operands("normal", tokens, HEADS, KEY_HEADS, SIZE, source(1))
    kc, vc, table = pages(k, v, 16)
    starts, lengths = integers(0, tokens), integers(tokens)
    tables = table[None], starts, lengths
    shape = f"{tokens} x {HEADS}/{KEY_HEADS} x {SIZE} bf16"
    name = f"windowed attention forward {shape}, window {window}"
    packed = partial(attention.varlen, *given, starts, tokens, scale, window)
    paged = partial(attention.paged, q, kc, vc, *tables, tokens, scale, window)
    full = partial(whole.paged, q, kc, vc, *tables, tokens, scale)
    ours: Named = {f"{name}, pages of 16": paged}
    yield from _timed(ours, {"attention without a window, pages of 16": full}, None)
    dy = torch.randn_like(q)
    modules = (attention, triton_backward, (window,)), (*kernels(SIZE), ())

    def step(forward, back, more) -> object:
        norms = q.new_empty((HEADS, tokens), dtype=torch.float32)
        cut = starts, tokens, scale, *more
        y = forward.varlen(*given, *cut, norms=norms)
        return back.gradients(*given, y, norms, dy, *cut)

    mine, other = (partial(step, *x) for x in modules)
    both = f"windowed attention forward and backward {shape}, window {window}, packed"
    yield from _timed({both: mine}, {"attention without a window, packed": other}, None)
    if fa3:
        of_packed: Named = {gpu_fa3.NAME: gpu_fa3.packed(*given, starts, tokens, window - 1)}
        cut = *tables, tokens, tokens, 0, window - 1
        of_paged: Named = {gpu_fa3.NAME: gpu_fa3.paged(q, kc, vc, *cut)}
    else:
        of_packed = of_paged = {"torch flex_attention": _flex(*given, scale, window)}
    yield from _compare({f"{name}, packed": packed}, of_packed, 1.25)
    yield from _compare(ours, of_paged, 1.25)


def _decode(fa3: bool) -> Iterator[Row]:
    """256 sequences of 2048 keys; torch reads the last keys alone, one after another in memory."""
    requests, tokens, scale, window = 256, 2048, SIZE**-0.5, WINDOW
    q = normal(requests, HEADS, SIZE, seed=1).bfloat16()
    of_keys = (requests * tokens // 16, 16, KEY_HEADS, SIZE)
    kc, vc = (torch.randn(of_keys, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(len(kc), device="cuda").int().view(requests, -1)
    lengths, starts = integers(*[tokens] * requests), integers(*range(requests + 1))
    tables = table, starts, lengths
    last = table[:, -(window // 16) :].long()
    k, v = (x[last].flatten(1, 2).transpose(1, 2).contiguous() for x in (kc, vc))

    def native(backend: SDPBackend) -> torch.Tensor:
        return gpu_attention.sdpa(backend, q[:, :, None], k, v, False)[:, :, 0]

    theirs: Named = {
        "torch SDPA, flash, last keys": partial(native, SDPBackend.FLASH_ATTENTION),
        "torch SDPA, cuDNN, last keys": partial(native, SDPBackend.CUDNN_ATTENTION),
    }
    if fa3:
        cut = *tables, 1, tokens
        theirs[gpu_fa3.NAME] = gpu_fa3.paged(q, kc, vc, *cut, window=window - 1)
    name = (
        f"windowed attention decode, window {window}, {requests} sequences of {tokens}, pages of 16"
    )
    ours: Named = {name: partial(attention.decode, q, kc, vc, *tables, tokens, scale, window)}
    yield from _compare(ours, theirs, 1.10)
    full = partial(whole.decode, q, kc, vc, *tables, tokens, scale)
    yield from _timed(ours, {"attention without a window": full}, None)


def rows() -> Iterator[Row]:
    """32 query heads, 8 key heads of 128, a window of 1024, against the fastest kernels at hand."""
    fa3 = gpu_fa3.at_hand()
    yield from _decode(fa3)
    yield from _prefill(fa3)
