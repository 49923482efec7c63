"""`python -m samebits.bench.gpu --only hybrid`: what gated delta nets add to `gpu_public`."""

from __future__ import annotations

import itertools

import torch

from samebits.bench.gpu_attention import pages
from samebits.bench.gpu_gdn import poisoned
from samebits.bench.gpu_public import Area, Check, gradients_of, integers, normal, probe
from samebits.bench.gpu_timing import replayed
from samebits.ops import (
    attention,
    conv1d,
    gated_rms_norm,
    gdn,
    gdn_gate,
    l2_norm,
    output_gate,
    registry,
)
from samebits.ops.attention import reference_sm90 as attention_law
from samebits.ops.gated_rms_norm import reference_sm90 as gated_law
from samebits.ops.gdn import oracle
from samebits.ops.gemm.operands_sm90 import bf16, source
from samebits.ops.l2_norm import reference_sm90 as l2_law

KEY_HEADS, HEADS, SIZE, TAPS = 2, 4, 128, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * SIZE
EXACT = 2 * KEY_HEADS * SIZE


def _fresh(*shape: int, slots: int = 3) -> torch.Tensor:
    """A window of NaN: what a fresh sequence must not read."""
    return torch.full((slots, *shape), torch.nan, device="cuda").bfloat16()


def _inside(x: torch.Tensor) -> torch.Tensor:
    """Rows [40, SIZE] as [20, 2, SIZE] inside wider rows of NaN."""
    wider = x.new_full((20, 4 * SIZE), torch.nan)
    return wider[:, SIZE : 3 * SIZE].copy_(x.view(20, -1)).unflatten(1, (2, SIZE))


def check_elements(area: Area) -> None:
    """Norms against their law, gates against the CPU's bits; rows alone; gradients."""
    random = source(1)
    for wide in (False, True):
        x = bf16((40, SIZE), -30, 30, random)
        x[0], x[1] = 0, bf16((SIZE,), -127, -120, random)
        x = x.float() * 1.01 if wide else x
        z, w = bf16((40, SIZE), -20, 6, random), bf16((SIZE,), -3, 3, random)
        y = l2_norm.l2_norm(x, wide=wide)
        area.same(f"l2_norm {wide}", y, l2_law.l2_norm(x, 1e-6))
        heads = l2_norm.l2_norm(_inside(x), wide=wide)
        area.same(f"l2_norm {wide}, heads inside rows", heads.view_as(y), y)
        area.same(f"l2_norm {wide}, a row alone", l2_norm.l2_norm(x[7:8], wide=wide), y[7:8])
        y = gated_rms_norm.gated_rms_norm(x, z, w, 1e-6, wide=wide)
        area.same(f"gated {wide}", y, gated_law.gated_rms_norm(x.cpu(), z.cpu(), w.cpu(), 1e-6))
        heads = gated_rms_norm.gated_rms_norm(x.view(20, 2, SIZE), _inside(z), w, 1e-6, wide=wide)
        area.same(f"gated {wide}, heads inside rows", heads.view_as(y), y)
        alone = gated_rms_norm.gated_rms_norm(x[7:8], z[7:8], w, 1e-6, wide=wide)
        area.same(f"gated {wide}, a row alone", alone, y[7:8])
    a, b = bf16((50, HEADS), -9, 6, random), bf16((50, HEADS), -9, 6, random)
    A_log, bias = normal(HEADS, seed=2), normal(HEADS, seed=3).bfloat16()
    ours = gdn_gate.gate(a, b, A_log, bias)
    law = gdn_gate.gate(a.cpu(), b.cpu(), A_log.cpu(), bias.cpu())
    for name, found, wanted in zip(("g", "beta"), ours, law, strict=True):
        area.same(f"{name}, the CPU's bits", found, wanted)
    x, gate = bf16((40, 300), -60, 60, random), bf16((40, 300), -20, 8, random)
    same = output_gate.output_gate(x.cpu(), gate.cpu())
    area.same("output gate, the CPU's bits", output_gate.output_gate(x, gate), same)

    x, z = (normal(40, SIZE, seed=s).bfloat16() for s in (4, 5))
    w = normal(SIZE, seed=6).bfloat16()

    def unit(x):
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    def gated(x, z, w):
        normed = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w
        return normed * torch.nn.functional.silu(z)

    def gates(a, b, A_log, bias):
        g = -A_log.exp() * torch.nn.functional.softplus(a + bias)
        return torch.cat([g, b.sigmoid()])

    def gated_wide(x, z, w):
        return gated_rms_norm.gated_rms_norm(x, z, w, 1e-6, wide=True)

    def gated_inside(x, z, w):
        return gated_wide(x.view(20, 2, SIZE), _inside(z), w).view_as(x)

    # Rows of several blocks, the last one cut.
    many, gates_of = (normal(5, 133, SIZE, seed=s).bfloat16() for s in (7, 8))
    some = (a.clamp(-4, 4), b.clamp(-4, 4), A_log, bias)
    for name, ours_of, exact, operands in (
        ("l2_norm", l2_norm.l2_norm, unit, (x,)),
        ("l2_norm wide", lambda x: l2_norm.l2_norm(x, wide=True), unit, (many.float(),)),
        ("gated", lambda x, z, w: gated_rms_norm.gated_rms_norm(x, z, w, 1e-6), gated, (x, z, w)),
        ("gated wide", gated_wide, gated, (many.float(), gates_of, w)),
        ("gated wide, heads inside rows", gated_inside, gated, (x.float(), z, w)),
        ("gate", lambda *t: torch.cat(gdn_gate.gate(*t)), gates, some),
        ("output gate", output_gate.output_gate, lambda x, z: x * z.sigmoid(), (x, z)),
    ):
        grads = gradients_of(ours_of, *operands)
        again = gradients_of(ours_of, *operands)
        truth = gradients_of(exact, *(t.double() for t in operands))
        for i, (one, same, true) in enumerate(zip(grads, again, truth, strict=True)):
            area.close(f"d{i} {name}", one, true)
            area.same(f"d{i} {name}, again", one, same)
    area.served("gdn.l2_norm", "gdn.gate", "norm.gated", "attention.gate")


def check_conv(area: Area) -> None:
    """The CPU's bits, packed and in slices; windows; a graph; gradients."""
    tokens = 70
    x, w = (normal(*s, seed=n).bfloat16() for n, s in ((1, (tokens, 96)), (2, (96, TAPS))))
    starts = torch.tensor([0, 3, 3, 40, tokens])
    law = conv1d.varlen(x.cpu(), w.cpu(), starts, exact=32)
    for where in (starts, starts.cuda()):
        ours = conv1d.varlen(x, w, where, exact=32)
        for name, a, b in zip(("exact", "rounded"), ours, law, strict=True):
            area.same(f"packed, {name}", a, b)
    window, done, parts = _fresh(TAPS - 1, 96), 0, []
    for count in (1, 2, 30, 1, 3):  # of the third sequence, which has 37 rows
        rows = torch.cat([x[3 + done : 3 + done + count], x[:1], x[-2:]])
        tables = integers(2, 0), integers(0, count, count + 1), integers(done, 0)
        y = conv1d.advance(rows, w, window, *tables, exact=32)
        parts.append(torch.cat([y[0][:count], y[1][:count].float()], 1))
        area.true("rows past the last sequence are not zero", not bool(y[1][count + 1 :].any()))
        done += count
    whole = torch.cat([law[0], law[1].float()], 1)[3:40]
    area.same("slices", torch.cat(parts), whole)
    area.same("window", window[2], x[3 + 34 : 40])
    area.true("another slot was written", bool(window[1].isnan().all()))

    _check_conv_long(area)
    _check_conv_steps(area)
    _check_conv_gradients(area)
    area.served("gdn.conv")


def _check_conv_long(area: Area) -> None:
    """The CPU's bits: of many rows, of a strided x, of every finite activation."""
    channels, cuts = 320, (0, 1, 700, 703, 2100, 2100, 2400)
    w, starts = normal(channels, TAPS, seed=2).bfloat16(), integers(*cuts)
    wider = bf16((cuts[-1], channels + 48), -30, 6, source(3))
    x = wider[:, 16 : 16 + channels]
    for exact in (0, 128, 200):
        law = conv1d.varlen(x.cpu(), w.cpu(), starts.cpu(), exact=exact)
        for name, rows in (("strided", x), ("contiguous", x.contiguous())):
            ours = conv1d.varlen(rows, w, starts, exact=exact)
            for part, a, b in zip(("exact", "rounded"), ours, law, strict=True):
                if b.numel():
                    area.same(f"long, {name}, {exact} exact, {part}", a, b)
        window = _fresh(TAPS - 1, channels, slots=6)
        slots, context = integers(5, 3, 0, 1, 2, 4), integers(0, 0, 0, 0, 9, 0)
        ours = conv1d.advance(x, w, window, slots, starts, context, exact=exact)
        for part, a, b in zip(("exact", "rounded"), ours, law, strict=True):
            if b.numel():
                area.same(f"long, advanced, {exact} exact, {part}", a, b)
        area.same("long, window", window[4], x[-3:])
        area.true("an empty sequence's window was written", bool(window[2].isnan().all()))
    every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16)
    every = torch.where(every.isfinite(), every, 0).view(128, 512)
    last = torch.zeros(512, TAPS, device="cuda").bfloat16()
    for factor in (1.0, 1.0078125, -0.0037384033203125):
        last[:, -1] = factor
        for exact in (0, 512):
            law = conv1d.varlen(every.cpu(), last.cpu(), torch.tensor([0, 128]), exact=exact)
            ours = conv1d.varlen(every, last, integers(0, 128), exact=exact)
            at = int(not exact)
            area.same(f"every activation by {factor}, {exact} exact", ours[at], law[at])


def _check_conv_steps(area: Area) -> None:
    """As many rows as sequences, in a graph: the bits of whole sequences, and their windows."""
    count, channels, steps, exact = 33, 320, 6, 200
    x = normal(steps * count, channels + 16, seed=4).bfloat16()[:, :channels]
    w = normal(channels, TAPS, seed=5).bfloat16()
    whole = x.view(steps, count, channels).transpose(0, 1).flatten(0, 1)
    pair = conv1d.varlen(whole.cpu(), w.cpu(), torch.arange(count + 1) * steps, exact=exact)
    law = [part.unflatten(0, (count, steps)) for part in pair]
    rows, context = x[:count].clone(), integers(*[0] * count)
    window, slots = _fresh(TAPS - 1, channels, slots=count + 2), torch.arange(count).cuda() + 1
    starts = torch.arange(count + 1).cuda()
    starts[-2:] = count - 2  # the last two sequences have no rows

    def step() -> torch.Tensor:
        wide, y = conv1d.advance(rows, w, window, slots, starts, context, exact=exact)
        return torch.cat([wide, y.float()], 1)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    window.fill_(torch.nan)
    for i in range(steps):
        rows.copy_(x[i * count : (i + 1) * count])
        context.fill_(i)
        graph.replay()
        wanted = torch.cat([law[0][:, i], law[1][:, i].float()], 1)
        area.same(f"step {i}", y[: count - 2], wanted[: count - 2])
        area.true(f"step {i}: rows of no sequence are not zero", not bool(y[count - 2 :].any()))
    last = x.view(steps, count, channels)[-(TAPS - 1) :, : count - 2].transpose(0, 1)
    area.same("windows of steps", window[1 : count - 1], last)
    untouched = window[[0, count - 1, count, count + 1]]
    area.true("another slot was written", bool(untouched.isnan().all()))


def _check_conv_gradients(area: Area) -> None:
    """Against float64, and twice the same: over blocks of rows, of a strided x, in a graph."""
    channels = 320  # two blocks of channels, the second one cut
    w = normal(channels, TAPS, seed=2).bfloat16()
    for cuts in ((0, 3, 3, 40, 70), (0, 64, 65, 127, 128, 131, 300)):
        tokens, starts = cuts[-1], integers(*cuts)
        x = normal(tokens, channels + 16, seed=1).bfloat16()[:, :channels]

        def convolved(x, w, cuts=cuts):
            parts = []
            for a, b in itertools.pairwise(cuts):
                if a < b:
                    padded = torch.nn.functional.pad(x[a:b].T[None], (TAPS - 1, 0))
                    parts.append(torch.nn.functional.conv1d(padded, w[:, None], groups=channels))
            return torch.nn.functional.silu(torch.cat(parts, 2)[0].T)

        truth = gradients_of(convolved, x.double(), w.double())
        for exact in (0, 100, channels):

            def ours(x, w, starts=starts, exact=exact):
                wide, y = conv1d.varlen(x, w, starts, exact=exact)
                return torch.cat([wide, y.float()], 1)

            def strided(ours=ours, x=x):
                return torch.cat([part.float().flatten() for part in _strided(ours, x, w)])

            found = gradients_of(ours, x, w)
            again = gradients_of(ours, x, w)
            for name, a, b, true in zip("xw", found, again, truth, strict=True):
                area.close(f"d{name} conv, {tokens} rows, {exact} exact", a, true)
                area.same(f"d{name} conv, {tokens} rows, {exact} exact, again", a, b)
            flat = torch.cat([part.float().flatten() for part in found])
            area.same(f"conv, {tokens} rows, {exact} exact, strided", strided(), flat)
            area.same(f"conv, {tokens} rows, {exact} exact, in a graph", replayed(strided), flat)


def _strided(call, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """`gradients_of` for an x that keeps its strides."""
    leaves = [t.detach().requires_grad_() for t in (x, w)]
    y = call(*leaves)
    weight = torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape).bfloat16()
    return list(torch.autograd.grad(y, leaves, weight.to(y.dtype)))


def _advance(rows, state, count, context, scale, schedule, slots=None, starts=None):
    """`gdn.advance` of one sequence in slot 2; single rows by the kernels that decode."""
    q, k, v, g, beta = rows
    slots = integers(2) if slots is None else slots
    starts = integers(0, count) if starts is None else starts
    most = 1 if count == 1 else None
    return gdn.advance(q, k, v, g, beta, state, slots, starts, context, scale, schedule, most=most)


def check_gdn(area: Area) -> None:
    """Whole, sliced, and row by row in a graph: one set of bits; gradients; both schedules."""
    tokens, scale = 200, SIZE**-0.5
    q, k = (normal(tokens, KEY_HEADS, SIZE, seed=s) for s in (1, 2))
    q, k = (torch.nn.functional.normalize(x, dim=-1).bfloat16() for x in (q, k))
    v = normal(tokens, HEADS, SIZE, seed=3).bfloat16()
    g, beta = -normal(tokens, HEADS, seed=4).abs() * 0.3, normal(tokens, HEADS, seed=5).sigmoid()
    rows = (q, k, v, g, beta)
    for schedule in gdn.SCHEDULES:
        starts = torch.tensor([0, tokens])
        law = gdn.varlen(q, k, v, g, beta, starts, scale, schedule)
        exact, _ = oracle.recurrence([x.cpu() for x in rows], [0, tokens], scale)
        area.close(f"{schedule} o", law, exact.cuda())
        state = poisoned(schedule, KEY_HEADS, HEADS, 3)
        fresh = [x[1].clone() for x in state]  # of NaN or a pattern
        done, parts = 0, []
        for count in (70, 1, 57, 42):
            part = [x[done : done + count] for x in rows]
            parts.append(_advance(part, state, count, integers(done), scale, schedule))
            done += count
        area.same(f"{schedule}, slices", torch.cat(parts), law[:done])
        # One row, beside a row of no sequence; the graph is replayed to the end, over a boundary.
        held = [torch.cat([x[done : done + 1], x[:1]]) for x in rows]
        context, slots, of = integers(done), integers(2), integers(0, 1)
        kept = [x.clone() for x in state]

        def step(held=held, state=state, slots=slots, of=of, context=context, schedule=schedule):
            return _advance(held, state, 1, context, scale, schedule, slots=slots, starts=of)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step()
        for x, before in zip(state, kept, strict=True):
            x.copy_(before)
        parts = []
        for i in range(done, tokens):
            for x, source_rows in zip(held, rows, strict=True):
                x[0].copy_(source_rows[i])
            context.fill_(i)
            graph.replay()
            parts.append(y[:1].clone())
        area.true("a row of no sequence is not zero", not bool(y[1].any()))
        area.same(f"{schedule}, decoded in a graph", torch.cat(parts), law[done:])
        untouched = all(
            torch.equal(x[1].view(torch.uint8), y.view(torch.uint8))
            for x, y in zip(state, fresh, strict=True)
        )
        area.true("another slot was written", untouched)

    def ours(q, k, v, g, beta):
        return gdn.varlen(q, k, v, g, beta, starts, scale, "chunk_row")

    found = gradients_of(ours, *rows)

    def recurrence(*t):
        return oracle.recurrence([x.cpu() for x in t], [0, tokens], scale)[0].cuda()

    wanted = gradients_of(recurrence, *(x.double() for x in rows))
    for name, a, b in zip(("q", "k", "v", "g", "beta"), found, wanted, strict=True):
        area.close(f"d{name} gdn", a, b)
    area.served("gdn.core")


def check_wide_attention(area: Area) -> None:
    """Heads of 256: law, slices, decode, gradients' existence."""
    length, scale = 300, 256**-0.5
    q = normal(length, 4, 256, seed=1).bfloat16()
    k, v = (normal(length, 2, 256, seed=s).bfloat16() for s in (2, 3))
    y = attention.varlen(q, k, v, torch.tensor([0, length]), scale)
    at = torch.tensor([0, 127, 128, 255, 256, 299], device="cuda")
    for head in (0, 3):
        exact = attention_law.attend(q[at, head], k[:, head // 2], v[:, head // 2], at, scale)
        area.same(f"law, head {head}", y[at, head], exact.bfloat16())
    kc, vc, table = pages(k, v, 64)
    cuts = (0, 100, 101, length)
    many = table.expand(3, -1).contiguous()
    sliced = attention.paged(
        q, kc, vc, many, integers(*cuts), integers(*cuts[1:]), scale, most=199, longest=length
    )
    area.same("slices", sliced, y)
    each = table.expand(len(at), -1).contiguous()
    of, ends = integers(*range(len(at) + 1)), (at + 1).int()

    def decoded() -> torch.Tensor:
        return attention.paged(q[at], kc, vc, each, of, ends, scale, most=1, longest=512)

    area.same("decode", decoded(), y[at])
    area.same("decode, in a graph", replayed(decoded), y[at])
    found = gradients_of(
        lambda q, k, v: attention.varlen(q, k, v, torch.tensor([0, length]), scale), q, k, v
    )

    def softmax(q, k, v):
        qs, ks, vs = (x.transpose(0, 1) for x in (q, k, v))
        ks, vs = (x.repeat_interleave(2, 0) for x in (ks, vs))
        mask = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
        s = ((qs @ ks.mT) * scale).masked_fill(mask, -torch.inf).softmax(-1)
        return (s @ vs).transpose(0, 1)

    wanted = gradients_of(softmax, q.double(), k.double(), v.double())
    for name, a, b in zip("qkv", found, wanted, strict=True):
        area.close(f"d{name} attention", a, b)


def check_probes(area: Area) -> None:
    """Known-answer probes of what a hybrid model adds."""
    probe(
        area, tuple(r for r in registry.HYBRID if r.startswith(("gdn.", "norm.g", "attention.g")))
    )


AREAS: tuple[Check, ...] = (
    check_elements,
    check_conv,
    check_wide_attention,
    check_gdn,
    check_probes,
)
