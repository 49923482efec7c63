"""logprob: bits against the reference, whole row against selected token, shards against whole."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import bits
from samebits.errors import Refused
from samebits.ops import logprob, registry, samples
from samebits.ops.logprob import cpu, reference
from samebits.plan import ReductionPlan

SHAPES = [(1, 1), (16, 1), (1003, 1), (40, 8), (1000, 8), (2048 + 8, 4)]  # vocabulary, leaves


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bits.compare(left, right).equal


def hostile(rows: int, vocab: int, seed: int = 1, low: int = -8, high: int = 5) -> torch.Tensor:
    """Wide logits; row 0 all equal, row 1 mostly masked, row 2 signed zeros and subnormals."""
    x = samples.fp32((rows, vocab), seed, low, high)
    x[0] = 3.0
    x[1, : vocab - 1] = -torch.inf
    x[2] = -0.0
    x[2, ::2], x[2, ::3] = 0.0, 2.0**-140
    return x


def at(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("low,high", [(-8, 5), (3, 9), (-126, -100), (90, 126)])
@pytest.mark.parametrize("vocab,leaves", SHAPES)
def test_bits_equal_the_reference(vocab, leaves, low, high):
    x, plan = hostile(5, vocab, 1, low, high), ReductionPlan(leaves)
    out = logprob.log_softmax(x, plan)
    assert same(out, reference.log_softmax(x, plan, vocab))
    for shift in range(0, vocab, -(-vocab // 7)):
        targets = (torch.arange(5) + shift) % vocab
        assert same(logprob.selected(x, targets, plan), at(out, targets))


@pytest.mark.parametrize("vocab,leaves", SHAPES)
def test_values_are_right(vocab, leaves):
    x = hostile(9, vocab)
    truth = torch.log_softmax(x.double(), dim=-1)
    out = logprob.log_softmax(x, ReductionPlan(leaves)).double()
    assert ((out - truth).abs() <= 2e-6 + truth.abs() * 2e-7)[x > -torch.inf].all()
    assert (out[x == -torch.inf] == -torch.inf).all()


def test_padded_columns_are_neither_read_nor_scored():
    x, plan = hostile(5, 1000), ReductionPlan(8)
    padded = torch.cat([x, torch.full((5, 24), torch.nan)], dim=1)
    out = logprob.log_softmax(padded, plan, vocab=1000)
    assert same(out[:, :1000], logprob.log_softmax(x, plan))
    assert (out[:, 1000:] == -torch.inf).all()
    targets = torch.arange(5) * 199
    assert same(logprob.selected(padded, targets, plan, vocab=1000), at(out, targets))
    assert logprob.row_digest(padded, vocab=1000) == logprob.row_digest(x)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_alone_equals_the_row_in_a_batch(threads):
    x, plan = hostile(40, 4096), ReductionPlan(8)
    targets = torch.arange(40) * 101
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, chosen = logprob.log_softmax(x, plan), logprob.selected(x, targets, plan)
    finally:
        torch.set_num_threads(before)
    for i in range(40):
        one, t = x[i : i + 1].clone(), targets[i : i + 1]
        assert same(whole[i : i + 1], logprob.log_softmax(one, plan))
        assert same(chosen[i : i + 1], logprob.selected(one, t, plan))


def test_strided_logits_equal_a_contiguous_copy():
    wide, plan = hostile(8, 1024), ReductionPlan(8)
    for x in (wide[::2, :1000], wide.t()[:8]):
        assert not x.is_contiguous()
        assert same(logprob.log_softmax(x, plan), logprob.log_softmax(x.clone().contiguous(), plan))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_folding_the_subtrees_of_ranks_gives_the_whole(ranks):
    x, plan = hostile(9, 1000), ReductionPlan(8)
    local = plan.local(ranks).cuts(1000 // ranks)
    shards = [s.contiguous() for s in x.chunk(ranks, dim=1)]
    parts = torch.stack([cpu.fold(cpu.leaves(s, local)) for s in shards], dim=1)
    assert same(cpu.fold(parts), cpu.fold(cpu.leaves(x, plan.cuts(1000))))
    ascending = parts[:, 0]
    for rank in range(1, ranks):  # a running merge in rank order is another sum
        ascending = cpu.fold(torch.stack([ascending, parts[:, rank]], dim=1))
    assert ranks == 2 or not same(ascending, cpu.fold(parts))


def test_the_number_of_leaves_is_part_of_the_schedule():
    x = hostile(40, 4096)
    one, eight = (logprob.log_softmax(x, ReductionPlan(n)) for n in (1, 8))
    assert not same(one, eight)


@pytest.mark.parametrize("vocab,padded", [(1000, 1000), (1000, 1024)])
def test_gradient_matches_float64(vocab, padded):
    x = samples.fp32((7, padded), 1, -4, 3).requires_grad_()
    targets, g = torch.arange(7) * 140, samples.fp32((7,), 2, -2, 2)
    logprob.selected(x, targets, ReductionPlan(8), vocab=vocab).backward(g)
    x64 = x.detach()[:, :vocab].double().requires_grad_()
    at(torch.log_softmax(x64, dim=-1), targets).backward(g.double())
    assert (x.grad[:, :vocab].double() - x64.grad).abs().max() <= x64.grad.abs().max() * 2**-20
    assert not x.grad[:, vocab:].any()


def test_rows_without_a_distribution_are_refused():
    plan, targets = ReductionPlan(4), torch.zeros(3, dtype=torch.int64)
    for column in (0, 15, 16, 37, 63):
        for value in (torch.nan, torch.inf):
            for fill in (0.5, -torch.inf):
                x = torch.full((3, 64), fill)
                x[:, 20] = 1.0
                x[1, column] = value
                with pytest.raises(Refused, match=r"SB0430[\s\S]*row 1 "):
                    logprob.log_softmax(x, plan)
                with pytest.raises(Refused, match="SB0430"):
                    logprob.selected(x, targets, plan)
    with pytest.raises(Refused, match="SB0430"):
        logprob.log_softmax(torch.full((3, 64), -torch.inf), plan)
    single = torch.full((3, 64), -torch.inf)
    single[:, 40] = -5.0
    assert logprob.log_softmax(single, plan)[:, 40].tolist() == [0.0] * 3


def test_refusals():
    x, t, plan = torch.ones(2, 16), torch.tensor([0, 15]), ReductionPlan(4)
    for args, key in (
        ((x.double(), t, plan), "SB0420"),
        ((x, t.int(), plan), "SB0420"),
        ((x[0], t, plan), "SB0421"),
        ((x, t[:1], plan), "SB0421"),
        ((x[:, :15], t - 1, plan), "SB0402"),
        ((x, t, plan, None, 0, 17), "SB0421"),
        ((x, t, plan, None, 4), "SB0431"),
        ((x, t + 1, plan), "SB0432"),
        ((x, t - 1, plan), "SB0432"),
        ((x, t, plan, None, 0, 12), "SB0432"),
    ):
        with pytest.raises(Refused, match=key):
            logprob.selected(*args)
    with pytest.raises(Refused, match="SB0434"):
        logprob.log_softmax(x.clone().requires_grad_(), plan)


def test_no_rows_give_no_rows():
    x, plan = torch.empty(0, 16), ReductionPlan(4)
    assert logprob.log_softmax(x, plan).shape == (0, 16) and logprob.row_digest(x) == []
    assert logprob.selected(x, torch.empty(0, dtype=torch.int64), plan).shape == (0,)


def test_temperature():
    x = samples.fp32((3, 50), 1)
    assert logprob.scale(x, 1.0) is x
    for temperature, processed in ((0.7, False), (0.0, True), (-1.0, True), (torch.nan, True)):
        with pytest.raises(Refused, match="SB0433"):
            logprob.scale(x, temperature, processed)
    divided = x.numpy() / np.float32(0.7)
    assert same(logprob.scale(x, 0.7, processed=True), torch.from_numpy(divided))


def test_row_digests_are_mixsum_and_add_over_shards():
    x = hostile(5, 1000)
    x[3, 5] = torch.nan
    digests = logprob.row_digest(x)
    assert digests == [bits.mixsum(row) for row in x]
    left, right = logprob.row_digest(x[:, :300]), logprob.row_digest(x[:, 300:], start=300)
    assert digests == [bits.add_digests(a, b) for a, b in zip(left, right, strict=True)]
    x[2, 1] = -x[2, 1]
    changed = logprob.row_digest(x)
    assert [a == b for a, b in zip(digests, changed, strict=True)] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert logprob.row_digest(x[:, 900:], start=900, vocab=900) == [0] * 5


def test_probe_and_served_count():
    registry.reset_served()
    logprob.log_softmax(torch.ones(3, 8), ReductionPlan(8))
    logprob.selected(torch.ones(2, 8), torch.tensor([1, 2]), ReductionPlan(8))
    assert registry.served() == {"logprob": 5}
    bound = registry.implementations()["logprob"]
    assert bound.probe() == bound.probe() != 0 and len(bound.content_hash()) == 64


@settings(max_examples=30, deadline=None)
@given(
    step=st.integers(1, 90),
    leaves=st.sampled_from([1, 2, 4, 8]),
    low=st.integers(-126, 120),
    seed=st.integers(0, 10**6),
    masked=st.floats(0, 0.9),
)
def test_any_shape_and_range_equals_the_reference(step, leaves, low, seed, masked):
    vocab, plan = step * leaves, ReductionPlan(leaves)
    x = samples.fp32((2, vocab), seed, low, low + 6)
    x[:, : int(masked * vocab)] = -torch.inf
    out = logprob.log_softmax(x, plan)
    assert same(out, reference.log_softmax(x, plan, vocab))
    targets = torch.tensor([seed % vocab, vocab - 1])
    assert same(logprob.selected(x, targets, plan), at(out, targets))


def _gloo_rank(rank, size, path, x, targets, grad, want, want_grad):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    group, plan, width = dist.group.WORLD, ReductionPlan(8), x.shape[1] // size
    part = slice(rank * width, (rank + 1) * width)
    mine = x[:, part].clone().requires_grad_()
    out = logprob.selected(mine, targets, plan, group, rank * width)
    assert same(out, want)
    out.backward(grad)
    assert same(mine.grad, want_grad[:, part])
    for args, key in (
        ((mine, targets, plan, group, 1), "SB0431"),
        ((mine, targets, plan, group, rank * width, x.shape[1] - 8), "SB0431"),
        ((mine, targets, ReductionPlan(1), group, rank * width), "SB0403"),
    ):
        with pytest.raises(Refused, match=key):
            logprob.selected(*args)
    dist.destroy_process_group()


@pytest.mark.engine
def test_two_real_processes_give_the_bits_of_one(tmp_path):
    x, targets = hostile(9, 1000).requires_grad_(), torch.arange(9) * 120 + 39
    grad = samples.fp32((9,), 2, -2, 2)
    want = logprob.selected(x, targets, ReductionPlan(8))
    want.backward(grad)
    args = (2, os.fspath(tmp_path / "rendezvous"), x.detach(), targets, grad)
    mp.start_processes(_gloo_rank, (*args, want.detach(), x.grad), nprocs=2, start_method="spawn")
