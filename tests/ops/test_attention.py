"""attention: bits against the reference, paged = packed = any slicing, gradients, refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import bits
from samebits.errors import Refused
from samebits.ops import attention, registry, samples
from samebits.ops.attention import PARTITION, cpu, reference

HEADS, KEY_HEADS, SIZE = 6, 2, 32
SCALE = SIZE**-0.5


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bits.compare(left, right).equal


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def inputs(tokens, heads=HEADS, key_heads=KEY_HEADS, size=SIZE, seed=0, low=-4, high=3):
    return (
        samples.bf16((tokens, heads, size), 3 * seed, low, high),
        samples.bf16((tokens, key_heads, size), 3 * seed + 1, low, high),
        samples.bf16((tokens, key_heads, size), 3 * seed + 2, low, high),
    )


def alone(q, k, v):
    return attention.varlen(q, k, v, ints(0, len(q)), SCALE)


def exact(q, k, v):
    """`alone` before the rounding to bf16, which hides most changes of order."""
    return attention._contiguous(q, k, v, np.array([0, len(q)]), SCALE, torch.float32)


class Cache:
    """A paged cache with blocks in scrambled order; unused slots hold NaN, so that a read shows."""

    def __init__(self, sequences, block_size, layout="separate", seed=0):
        pages = [-(-len(k) // block_size) for k, _ in sequences]
        order = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(seed))
        _, key_heads, size = sequences[0][0].shape
        shape = (len(order), block_size, key_heads, size)
        nan = torch.full((*shape[:-1], 2 * size), torch.nan, dtype=torch.bfloat16)
        if layout == "separate":
            self.k, self.v = nan[..., :size].clone(), nan[..., :size].clone()
        elif layout == "side by side":  # keys and values share a row
            self.k, self.v = nan[..., :size], nan[..., size:]
        else:  # heads before slots, seen through a transposed view
            self.k, self.v = (
                nan[..., :size].clone().transpose(1, 2).contiguous().transpose(1, 2)
                for _ in range(2)
            )
        self.table = torch.zeros(len(sequences), max(pages), dtype=torch.int32)
        taken = 0
        for r, (k, v) in enumerate(sequences):
            blocks = order[taken : taken + pages[r]]
            self.table[r, : pages[r]] = blocks.int()
            taken += pages[r]
            for j in range(len(k)):
                self.k[blocks[j // block_size], j % block_size] = k[j]
                self.v[blocks[j // block_size], j % block_size] = v[j]

    def __call__(self, q, query_start, seq_lens, rows=None, **more):
        table = self.table if rows is None else self.table[list(rows)]
        return attention.paged(
            q, self.k, self.v, table, ints(*query_start), ints(*seq_lens), SCALE, **more
        )


@pytest.mark.parametrize("low,high", [(-4, 3), (-40, -30), (4, 8), (-75, -60), (50, 60)])
def test_bits_equal_the_reference(low, high):
    tokens = 2 * PARTITION + 5
    q, k, v = inputs(tokens, heads=2, key_heads=1, size=16, low=low, high=high)
    out = attention.varlen(q, k, v, ints(0, tokens), SCALE)
    unrounded = exact(q, k, v)
    for t in (0, 1, 2, 15, 16, 17, PARTITION - 1, PARTITION, 2 * PARTITION, tokens - 1):
        seen = q[t], k[: t + 1], v[: t + 1], SCALE
        assert same(unrounded[t], reference.exact(*seen)), t
        assert same(out[t], reference.token(*seen)), t


def test_merges_of_several_partitions_equal_the_reference():
    q, k, v = inputs(3 * PARTITION + 1, heads=8, key_heads=4, size=16, low=-3, high=2)
    out = exact(q, k, v)
    for t in (2 * PARTITION + 3, 3 * PARTITION):
        assert same(out[t], reference.exact(q[t], k[: t + 1], v[: t + 1], SCALE)), t


def test_partitions_change_bits_so_they_are_a_constant(monkeypatch):
    q, k, v = inputs(PARTITION + 40, heads=2, key_heads=1, size=16, low=-1, high=2)
    t = len(q) - 1
    expected = reference.exact(q[t], k, v, SCALE)
    monkeypatch.setattr(reference, "PARTITION", 64)
    assert not same(reference.exact(q[t], k, v, SCALE), expected)


def test_equal_scores_zeros_and_signed_zero_values():
    q, k, v = inputs(40)
    q.zero_()  # every score ties
    v[:, 0] = -0.0
    out = alone(q, k, v)
    for t in (0, 7, 39):
        assert same(out[t], reference.token(q[t], k[: t + 1], v[: t + 1], SCALE))


def test_later_keys_are_not_visited():
    q, k, v = inputs(PARTITION + 20)
    clean = alone(q, k, v)
    for t in (0, 5, PARTITION - 1, PARTITION + 3):
        kk, vv = k.clone(), v.clone()
        kk[t + 1 :], vv[t + 1 :] = torch.nan, torch.inf
        assert same(alone(q, kk, vv)[: t + 1], clean[: t + 1])


def test_an_infinite_score_is_nan_and_stays_in_its_row():
    q, k, v = inputs(20)
    clean = alone(q, k, v)
    q[7, 0] = torch.inf
    out = alone(q, k, v)
    assert out[7, 0].isnan().all()
    out[7, 0] = clean[7, 0]
    assert same(out, clean)


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("layout", ["separate", "side by side", "heads first"])
def test_paged_equals_packed(block_size, layout):
    lengths = (1, block_size, 37, PARTITION + 50)
    packed = [inputs(n, seed=i) for i, n in enumerate(lengths)]
    expected = [alone(*sequence) for sequence in packed]
    cache = Cache([(k, v) for _, k, v in packed], block_size, layout)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    out = cache(torch.cat([q for q, _, _ in packed]), starts, lengths)
    assert same(out, torch.cat(expected))
    one = attention.varlen(*(torch.cat(x) for x in zip(*packed, strict=True)), ints(*starts), SCALE)
    assert same(one, out)


def test_any_slicing_of_queries_and_decode_give_the_same_bits():
    tokens = PARTITION + 60
    q, k, v = inputs(tokens)
    expected = alone(q, k, v)
    cache = Cache([(k, v)], 16)
    cuts = [0, 1, 2, 100, 131, PARTITION - 1, PARTITION, PARTITION + 1, tokens - 1, tokens]
    for a, b in itertools.pairwise(cuts):
        assert same(cache(q[a:b], (0, b - a), (b,)), expected[a:b])
    for t in (0, 15, 16, PARTITION, tokens - 1):
        assert same(cache(q[t : t + 1], (0, 1), (t + 1,)), expected[t : t + 1])


def test_a_mixed_batch_of_decode_and_prefill_rows():
    packed = [inputs(n, seed=i) for i, n in enumerate((300, 45, 290))]
    expected = [alone(*sequence) for sequence in packed]
    cache = Cache([(k, v) for _, k, v in packed], 32)
    first = (299, 5, 200)
    pieces = [q[a:] for (q, _, _), a in zip(packed, first, strict=True)]
    wanted = [out[a:] for out, a in zip(expected, first, strict=True)]
    for order in ((0, 1, 2), (2, 0, 1), (1,)):
        counts = torch.tensor([0] + [len(pieces[i]) for i in order]).cumsum(0).tolist()
        lens = [(300, 45, 290)[i] for i in order]
        out = cache(torch.cat([pieces[i] for i in order]), counts, lens, rows=order)
        assert same(out, torch.cat([wanted[i] for i in order]))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    block_size=st.sampled_from((1, 16, 48)),
    group=st.sampled_from((1, 2, 3, 5)),
    data=st.data(),
)
def test_any_batch_equals_each_sequence_alone(lengths, block_size, group, data):
    packed = [inputs(n, heads=2 * group, seed=i) for i, n in enumerate(lengths)]
    expected = [alone(*sequence) for sequence in packed]
    cache = Cache([(k, v) for _, k, v in packed], block_size)
    first = [data.draw(st.integers(0, n - 1)) for n in lengths]
    seen = [data.draw(st.integers(a + 1, n)) for a, n in zip(first, lengths, strict=True)]
    spans = [slice(a, b) for a, b in zip(first, seen, strict=True)]
    starts = torch.tensor([0] + [s.stop - s.start for s in spans]).cumsum(0).tolist()
    q = torch.cat([sequence[0][s] for sequence, s in zip(packed, spans, strict=True)])
    out = cache(q, starts, seen)
    assert same(out, torch.cat([e[s] for e, s in zip(expected, spans, strict=True)]))


@pytest.mark.parametrize("heads,key_heads,size", [(4, 4, 16), (9, 3, 64), (8, 1, 48), (14, 2, 128)])
def test_head_geometry(heads, key_heads, size):
    q, k, v = inputs(50, heads, key_heads, size)
    out = attention.varlen(q, k, v, ints(0, 50), SCALE)
    for t in (0, 33, 49):
        assert same(out[t], reference.token(q[t], k[: t + 1], v[: t + 1], SCALE))


def test_thread_count_and_row_tiles_do_not_matter(monkeypatch):
    q, k, v = inputs(PARTITION + 30)
    before = torch.get_num_threads()
    outs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append(exact(q, k, v))
            monkeypatch.setattr(cpu, "STEP_ROWS", cpu.STEP_ROWS - 11)
    finally:
        torch.set_num_threads(before)
    assert same(outs[0], outs[1]) and same(outs[0], outs[2])


def test_strided_queries_out_argument_and_padding_rows():
    tokens = 40
    q, k, v = inputs(tokens)
    wide = torch.zeros(tokens, 3 * HEADS * SIZE, dtype=torch.bfloat16)
    wide[:, : HEADS * SIZE] = q.flatten(1)
    view = wide[:, : HEADS * SIZE].view(tokens, HEADS, SIZE)
    cache = Cache([(k, v)], 16)
    expected = alone(q, k, v)
    assert same(cache(view, (0, tokens), (tokens,)), expected)
    out = torch.full((tokens + 3, HEADS, SIZE), 7.0, dtype=torch.bfloat16)
    padded = torch.cat([q, q[:3]])
    assert cache(padded, (0, tokens), (tokens,), out=out) is out
    assert same(out[:tokens], expected) and (out[tokens:] == 7).all()


def test_an_empty_batch_and_a_request_without_queries():
    q, k, v = inputs(20)
    cache = Cache([(k, v), (k, v)], 16)
    assert cache(q[:0], (0,), (), rows=()).shape == (0, HEADS, SIZE)
    out = cache(q[19:], (0, 0, 1), (5, 20))
    assert same(out, alone(q, k, v)[19:])


def test_gradients_against_float64():
    lengths = (1, 7, 40)
    q, k, v = (
        torch.randn(sum(lengths), heads, SIZE, generator=torch.Generator().manual_seed(heads + i))
        .bfloat16()
        .requires_grad_()
        for i, heads in enumerate((HEADS, KEY_HEADS, KEY_HEADS))
    )
    starts = [0, 1, 8, 48]
    g = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    out = attention.varlen(q, k, v, ints(*starts), SCALE)
    out.backward(g)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    parts = []
    for a, b in itertools.pairwise(starts):
        qs, ks, vs = (x[a:b].transpose(0, 1) for x in exact)
        ks, vs = (x.repeat_interleave(HEADS // KEY_HEADS, 0) for x in (ks, vs))
        mask = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
        p = (qs @ ks.mT * SCALE).masked_fill(mask, -torch.inf).softmax(-1)
        parts.append((p @ vs).transpose(0, 1))
    truth = torch.cat(parts)
    truth.backward(g.double())
    assert (out.double() - truth).abs().max() <= truth.abs().max() * 2.0**-8
    for got, want in zip((q, k, v), exact, strict=True):
        assert got.grad.dtype == torch.bfloat16
        assert (got.grad.double() - want.grad).abs().max() <= want.grad.abs().max() * 2.0**-7


def test_every_call_is_counted_and_the_probe_repeats():
    registry.reset_served()
    q, k, v = inputs(20)
    alone(q, k, v)
    Cache([(k, v)], 16)(q[18:], (0, 2), (20,))
    assert registry.served() == {"attention": 22}
    probe = registry.implementations("cpu")["attention"].probe
    assert probe() == probe()


def test_the_probe_sees_a_changed_partition_merge(monkeypatch):
    probe = registry.implementations("cpu")["attention"].probe
    before = probe()
    monkeypatch.setattr(attention, "PARTITION", PARTITION // 2)  # the probe's longest sequence
    assert probe() != before


def _paged(**changes):
    q, k, v = inputs(20)
    cache = Cache([(k, v)], 16)
    arguments = dict(
        q=q, key_cache=cache.k, value_cache=cache.v, block_table=cache.table,
        query_start=ints(0, 20), seq_lens=ints(20), scale=SCALE,
    )  # fmt: skip
    arguments.update({name: change(arguments) for name, change in changes.items()})
    return attention.paged(**arguments)


@pytest.mark.parametrize(
    "error_id,changes",
    [
        ("SB0420", {"q": lambda a: a["q"].float()}),
        ("SB0420", {"key_cache": lambda a: a["key_cache"].half()}),
        ("SB0421", {"q": lambda a: a["q"][..., :16]}),
        ("SB0421", {"value_cache": lambda a: a["value_cache"][1:]}),
        ("SB0413", {"key_cache": lambda a: a["key_cache"].mT.contiguous().mT}),
        ("SB0413", {"out": lambda a: torch.empty(20, SIZE, HEADS).bfloat16().mT}),
        ("SB0414", {"q": lambda a: a["q"][:, :5]}),
        ("SB0414", {"scale": lambda a: 0.0}),
        ("SB0414", {"scale": lambda a: float("nan")}),
        ("SB0415", {"query_start": lambda a: ints(0, 21)}),
        ("SB0415", {"query_start": lambda a: ints(1, 20)}),
        ("SB0415", {"query_start": lambda a: ints(0)}),
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
    "error_id,size,starts",
    [("SB0414", 24, (0, 20)), ("SB0415", 32, (0, 19)), ("SB0415", 32, (0, 21)), ("SB0415", 32, ())],
)
def test_packed_refusals(error_id, size, starts):
    with pytest.raises(Refused) as caught:
        attention.varlen(*inputs(20, size=size), ints(*starts), SCALE)
    assert caught.value.error_id == error_id
