"""window_attention: bits against the reference and against attention, slicing, pages, gradients."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import HEADS, KEY_HEADS, SCALE, SIZE, Cache, inputs, ints, same

from samebits.errors import Refused
from samebits.ops import attention, registry, window_attention
from samebits.ops.attention import PARTITION
from samebits.ops.attention import cpu as whole
from samebits.ops.window_attention import cpu, reference

WINDOWS = (1, 16, 63, 256, 257, 1024)


def alone(q, k, v, window):
    return window_attention.varlen(q, k, v, ints(0, len(q)), SCALE, window)


def exact(q, k, v, window):
    """`alone` before the rounding to bf16, which hides most changes of order."""
    starts = np.array([0, len(q)])
    return window_attention._contiguous(q, k, v, starts, SCALE, window, torch.float32)


class Windowed(Cache):
    """A cache whose pages that no query token sees hold NaN, and have no place in the table."""

    def __call__(self, q, query_start, seq_lens, window, rows=None, **more):
        table = (self.table if rows is None else self.table[list(rows)]).clone()
        caches = [x.clone() for x in (self.k, self.v)]
        counts = np.diff(query_start)
        for r, (count, length) in enumerate(zip(counts, seq_lens, strict=True)):
            low = max(0, length - int(count) - window + 1)
            page, slot = divmod(low, self.k.shape[1])
            for cache in caches:
                cache[table[r, :page].long()] = torch.nan
                cache[table[r, page], :slot] = torch.nan
            table[r, :page] = -7
        return window_attention.paged(
            q, *caches, table, ints(*query_start), ints(*seq_lens), SCALE, window, **more
        )


@pytest.mark.parametrize("low,high", [(-4, 3), (-75, -60), (50, 60)])
@pytest.mark.parametrize("window", WINDOWS)
def test_bits_equal_the_reference(window, low, high):
    tokens = 2 * PARTITION + 5
    q, k, v = inputs(tokens, heads=2, key_heads=1, size=16, low=low, high=high)
    out, unrounded = alone(q, k, v, window), exact(q, k, v, window)
    for t in (0, 15, 16, 62, 63, 255, 256, 300, 319, 511, 512, tokens - 1):
        seen = q[t], k[: t + 1], v[: t + 1], SCALE, window
        assert same(unrounded[t], reference.exact(*seen)), t
        assert same(out[t], reference.token(*seen)), t


@pytest.mark.parametrize("heads,key_heads,size", [(4, 4, 64), (9, 3, 64), (8, 1, 128), (6, 2, 256)])
def test_head_geometry(heads, key_heads, size):
    tokens = PARTITION + 30
    q, k, v = inputs(tokens, heads, key_heads, size)
    for window in (1, 63, PARTITION):
        unrounded = exact(q, k, v, window)
        for t in (0, 63, PARTITION + 1, tokens - 1):
            law = reference.exact(q[t], k[: t + 1], v[: t + 1], SCALE, window)
            assert same(unrounded[t], law), (window, t)


@pytest.mark.parametrize("tokens", [40, PARTITION, 2 * PARTITION + 30])
def test_a_window_that_is_long_enough_has_the_bits_of_attention(tokens):
    q, k, v = inputs(tokens)
    full = attention.varlen(q, k, v, ints(0, tokens), SCALE)
    unrounded = attention._contiguous(q, k, v, np.array([0, tokens]), SCALE, torch.float32)
    for window in (tokens, tokens + 1, 1 << 40):
        assert same(alone(q, k, v, window), full)
    assert same(exact(q, k, v, tokens), unrounded)
    cache, whole_cache = Windowed([(k, v)], 32), Cache([(k, v)], 32)
    for a in (0, tokens - 9, tokens - 1):
        call = q[a:], (0, tokens - a), (tokens,)
        assert same(cache(*call, tokens), whole_cache(*call))
    # Of a shorter window, the tokens that could not see more: and no other.
    short = tokens // 2
    part = exact(q, k, v, short)
    assert same(part[:short], unrounded[:short])
    assert all(not same(part[t], unrounded[t]) for t in range(short, tokens))


@pytest.mark.parametrize("window", [16, 63, PARTITION + 1])
def test_a_window_of_one_key_more_or_less_differs(window):
    q, k, v = inputs(PARTITION + 90, heads=2, key_heads=1, size=16)
    t = len(q) - 1
    found = exact(q, k, v, window)[t]
    assert same(found, reference.exact(q[t], k, v, SCALE, window))
    for other in (window - 1, window + 1):
        assert not same(found, reference.exact(q[t], k, v, SCALE, other))


def test_partitions_count_from_position_zero_and_not_from_the_window():
    q, k, v = inputs(3 * PARTITION + 40, heads=2, key_heads=1, size=16, low=-1, high=2)
    t, window = len(q) - 1, PARTITION + 70
    found = exact(q, k, v, window)[t]
    # Dropping whole partitions before the window moves no key to another partition, and no bit.
    for dropped in (PARTITION, 2 * PARTITION):
        if dropped <= t - window + 1:
            assert same(found, reference.exact(q[t], k[dropped:], v[dropped:], SCALE, window))
    first = t - window + 1
    assert first > PARTITION and first % PARTITION
    assert not same(found, reference.exact(q[t], k[first:], v[first:], SCALE, window))


def test_lanes_count_from_position_zero_and_not_from_the_window():
    # One key more before the window: all lanes turn by one, and with them the order of the sum.
    q, k, v = inputs(100, heads=2, key_heads=1, size=16, low=-1, high=2)
    found = exact(q, k, v, 40)[-1]
    again = [torch.cat([x[:1], x]) for x in (q, k, v)]
    assert not same(found, exact(*again, 40)[-1])
    again = [torch.cat([x[:16], x]) for x in (q, k, v)]
    assert same(found, exact(*again, 40)[-1])


@pytest.mark.parametrize("window", [1, 20, PARTITION])
def test_keys_outside_of_the_window_are_not_multiplied(window):
    q, k, v = inputs(PARTITION + 60)
    clean = alone(q, k, v, window)
    for t in (0, 7, 100, PARTITION, PARTITION + 59):
        kk, vv = (torch.full_like(x, torch.nan) for x in (k, v))
        seen = slice(max(0, t - window + 1), t + 1)
        kk[seen], vv[seen] = k[seen], v[seen]
        assert same(alone(q, kk, vv, window)[t], clean[t]), t


def test_equal_scores_and_signed_zero_values():
    q, k, v = inputs(40)
    q.zero_()  # every score ties
    v[:, 0] = -0.0
    out = exact(q, k, v, 9)
    for t in (0, 7, 39):
        assert same(out[t], reference.exact(q[t], k[: t + 1], v[: t + 1], SCALE, 9))


@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("layout", ["separate", "side by side", "heads first"])
def test_paged_equals_packed(block_size, layout):
    lengths = (1, block_size, 37, PARTITION + 50)
    packed = [inputs(n, seed=i) for i, n in enumerate(lengths)]
    cache = Windowed([(k, v) for _, k, v in packed], block_size, layout)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    operands = [torch.cat(x) for x in zip(*packed, strict=True)]
    for window in (1, 63, PARTITION + 1):
        expected = torch.cat([alone(*sequence, window) for sequence in packed])
        assert same(cache(operands[0], starts, lengths, window), expected)
        one = window_attention.varlen(*operands, ints(*starts), SCALE, window)
        assert same(one, expected)


@pytest.mark.parametrize("window", WINDOWS)
def test_any_slicing_of_queries_and_decode_give_the_same_bits(window):
    tokens = PARTITION + 60
    q, k, v = inputs(tokens)
    expected = alone(q, k, v, window)
    cache = Windowed([(k, v)], 16)
    cuts = [0, 1, 2, 100, 131, PARTITION - 1, PARTITION, PARTITION + 1, tokens - 1, tokens]
    for a, b in itertools.pairwise(cuts):
        assert same(cache(q[a:b], (0, b - a), (b,), window), expected[a:b])
    for t in (*range(0, tokens, 37), PARTITION, tokens - 1):
        assert same(cache(q[t : t + 1], (0, 1), (t + 1,), window), expected[t : t + 1])


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    window=st.integers(1, 100),
    block_size=st.sampled_from((1, 16, 48)),
    group=st.sampled_from((1, 2, 3, 5)),
    data=st.data(),
)
def test_any_batch_equals_each_sequence_alone(lengths, window, block_size, group, data):
    packed = [inputs(n, heads=2 * group, seed=i) for i, n in enumerate(lengths)]
    expected = [alone(*sequence, window) for sequence in packed]
    cache = Windowed([(k, v) for _, k, v in packed], block_size)
    first = [data.draw(st.integers(0, n - 1)) for n in lengths]
    seen = [data.draw(st.integers(a + 1, n)) for a, n in zip(first, lengths, strict=True)]
    spans = [slice(a, b) for a, b in zip(first, seen, strict=True)]
    starts = torch.tensor([0] + [s.stop - s.start for s in spans]).cumsum(0).tolist()
    q = torch.cat([sequence[0][s] for sequence, s in zip(packed, spans, strict=True)])
    out = cache(q, starts, seen, window)
    assert same(out, torch.cat([e[s] for e, s in zip(expected, spans, strict=True)]))


def test_thread_count_and_row_tiles_do_not_matter(monkeypatch):
    q, k, v = inputs(PARTITION + 30)
    before = torch.get_num_threads()
    outs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append(exact(q, k, v, 100))
            monkeypatch.setattr(whole, "STEP_ROWS", whole.STEP_ROWS - 11)
    finally:
        torch.set_num_threads(before)
    assert same(outs[0], outs[1]) and same(outs[0], outs[2])


def test_out_argument_padding_rows_and_requests_without_queries():
    q, k, v = inputs(40)
    cache = Windowed([(k, v), (k, v)], 16)
    expected = alone(q, k, v, 9)
    out = torch.full((43, HEADS, SIZE), 7.0, dtype=torch.bfloat16)
    assert cache(torch.cat([q, q[:3]]), (0, 40), (40,), 9, rows=(0,), out=out) is out
    assert same(out[:40], expected) and (out[40:] == 7).all()
    assert cache(q[:0], (0,), (), 9, rows=()).shape == (0, HEADS, SIZE)
    assert same(cache(q[39:], (0, 0, 1), (5, 40), 9), expected[39:])


@pytest.mark.parametrize("window", [1, 5, 16, 63, 1024])
def test_gradients_against_float64(window, monkeypatch):
    monkeypatch.setattr(window_attention, "ROWS", 24)  # several blocks of the longest sequence
    starts = [0, 1, 8, 98]
    operands = [
        torch.randn(starts[-1], heads, SIZE, generator=torch.Generator().manual_seed(heads + i))
        .bfloat16()
        .requires_grad_()
        for i, heads in enumerate((HEADS, KEY_HEADS, KEY_HEADS))
    ]
    g = torch.randn(operands[0].shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    out = window_attention.varlen(*operands, ints(*starts), SCALE, window)
    out.backward(g)
    leaves = [x.detach().double().requires_grad_() for x in operands]
    parts = []
    for a, b in itertools.pairwise(starts):
        qs, ks, vs = (x[a:b].transpose(0, 1) for x in leaves)
        ks, vs = (x.repeat_interleave(HEADS // KEY_HEADS, 0) for x in (ks, vs))
        at = torch.arange(b - a)
        hidden = (at[None] > at[:, None]) | (at[None] <= at[:, None] - window)
        p = (qs @ ks.mT * SCALE).masked_fill(hidden, -torch.inf).softmax(-1)
        parts.append((p @ vs).transpose(0, 1))
    truth = torch.cat(parts)
    truth.backward(g.double())
    assert (out.double() - truth).abs().max() <= truth.abs().max() * 2.0**-8
    largest = max(x.grad.abs().max() for x in leaves)  # of one key, only dv is not zero
    for got, want in zip(operands, leaves, strict=True):
        assert got.grad.dtype == torch.bfloat16
        assert (got.grad.double() - want.grad).abs().max() <= largest * 2.0**-7


def test_every_call_is_counted_and_no_contract_can_bind_the_region():
    registry.reset_served()
    q, k, v = inputs(20)
    alone(q, k, v, 5)
    Windowed([(k, v)], 16)(q[18:], (0, 2), (20,), 5)
    assert registry.served() == {"attention.window": 22}
    assert "attention.window" not in registry.implementations("cpu")
    bound = registry.unrouted("cpu")["attention.window"]
    assert len(bound.content_hash()) == 64 and bound.probe() == bound.probe()


def test_the_probe_sees_a_window_of_one_key_more(monkeypatch):
    probe, attend = registry.unrouted("cpu")["attention.window"].probe, cpu.attend
    before = probe()
    monkeypatch.setattr(cpu, "attend", lambda *args: attend(*args[:-2], args[-2] + 1, args[-1]))
    assert probe() != before


def _paged(window=5, **changes):
    q, k, v = inputs(20)
    cache = Cache([(k, v)], 16)
    arguments = dict(
        q=q, key_cache=cache.k, value_cache=cache.v, block_table=cache.table,
        query_start=ints(0, 20), seq_lens=ints(20), scale=SCALE, window=window,
    )  # fmt: skip
    arguments.update({name: change(arguments) for name, change in changes.items()})
    return window_attention.paged(**arguments)


@pytest.mark.parametrize(
    "error_id,changes",
    [
        ("SB0417", {"window": lambda a: 0}),
        ("SB0417", {"window": lambda a: -1}),
        ("SB0417", {"window": lambda a: None}),
        ("SB0417", {"window": lambda a: 4.0}),
        ("SB0417", {"window": lambda a: True}),
        ("SB0420", {"q": lambda a: a["q"].float()}),
        ("SB0421", {"value_cache": lambda a: a["value_cache"][1:]}),
        ("SB0413", {"key_cache": lambda a: a["key_cache"].mT.contiguous().mT}),
        ("SB0413", {"out": lambda a: torch.empty(20, SIZE, HEADS).bfloat16().mT}),
        ("SB0414", {"q": lambda a: a["q"][:, :5]}),
        ("SB0414", {"scale": lambda a: 0.0}),
        ("SB0415", {"query_start": lambda a: ints(0, 21)}),
        ("SB0415", {"seq_lens": lambda a: ints(19)}),
        ("SB0415", {"seq_lens": lambda a: ints(33)}),
        ("SB0415", {"block_table": lambda a: a["block_table"] + 1000}),
        ("SB0415", {"block_table": lambda a: a["block_table"] - 1000}),
        ("SB0415", {"block_table": lambda a: a["block_table"][:0]}),
    ],
)
def test_refusals(error_id, changes):
    _paged()
    with pytest.raises(Refused) as caught:
        _paged(**changes)
    assert caught.value.error_id == error_id


@pytest.mark.parametrize(
    "error_id,size,starts,window",
    [
        ("SB0414", 24, (0, 20), 5),
        ("SB0415", 32, (0, 19), 5),
        ("SB0415", 32, (), 5),
        ("SB0417", 32, (0, 20), 0),
    ],
)
def test_packed_refusals(error_id, size, starts, window):
    with pytest.raises(Refused) as caught:
        window_attention.varlen(*inputs(20, size=size), ints(*starts), SCALE, window)
    assert caught.value.error_id == error_id
