"""embedding: row copies that keep every bit, on one rank and over several."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import bits
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.embedding import cpu, lookup, reference


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bits.compare(left, right).equal


def table(rows: int, width: int) -> torch.Tensor:
    weight = samples.bf16((rows, width), 1, -126, 127)
    weight[0] = -0.0
    weight[-1] = torch.tensor(-(2.0**-133)).bfloat16()  # the least subnormal
    return weight


def test_bits_equal_the_reference():
    weight, ids = table(13, 7), torch.tensor([[0, 12, 3], [3, 0, 7]])
    out = lookup(ids, weight)
    assert out.shape == (2, 3, 7) and same(out, reference.lookup(ids, [weight]))
    assert (bits.int_view(out)[0, 0] == 0x8000).all()
    assert lookup(ids[0, 0], weight).shape == (7,)
    assert lookup(ids[:0], weight).shape == (0, 3, 7)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_combined_by_bytes_equal_the_whole(ranks):
    weight, ids = table(12, 5), torch.arange(12).flip(0)
    shards = list(weight.chunk(ranks))
    rows = 12 // ranks
    parts = [cpu.local_rows(ids, s, r * rows).view(torch.uint8) for r, s in enumerate(shards)]
    combined = torch.stack(parts).sum(0, dtype=torch.uint8).view(torch.bfloat16)
    assert same(combined, reference.lookup(ids, shards)) and same(combined, lookup(ids, weight))
    floats = torch.stack([p.view(torch.bfloat16) for p in parts]).sum(0)
    assert not same(floats, combined)  # what adding masked values would have done to -0


def test_gradient_matches_float64():
    weight, ids = samples.bf16((9, 5), 1).requires_grad_(), torch.tensor([[1, 1, 8], [0, 1, 3]])
    g = samples.bf16((2, 3, 5), 2, -3, 3)
    lookup(ids, weight).backward(g)
    wide = weight.detach().double().requires_grad_()
    torch.nn.functional.embedding(ids, wide).backward(g.double())
    assert weight.grad.dtype == torch.bfloat16
    assert (weight.grad.double() - wide.grad).abs().max() <= wide.grad.abs().max() * 2**-8
    local = cpu.weight_grad(ids, g, 3, 3)  # the second of three ranks
    assert same(local, weight.grad[3:6])


def test_many_equal_ids_are_added_in_fp32():
    weight = torch.zeros(2, 3).bfloat16().requires_grad_()
    lookup(torch.zeros(1000, dtype=torch.int64), weight).sum().backward()
    assert weight.grad[0].tolist() == [1000.0] * 3 and not weight.grad[1].any()


def test_refusals():
    weight, ids = torch.ones(4, 2).bfloat16(), torch.tensor([0, 3])
    for args, key in (
        ((ids.int(), weight), "SB0420"),
        ((ids, weight.float()), "SB0420"),
        ((ids, weight[0]), "SB0421"),
        ((torch.tensor([4]), weight), "SB0422"),
        ((torch.tensor([-1]), weight), "SB0422"),
        ((ids, weight, 4), "SB0423"),
    ):
        with pytest.raises(Refused, match=key):
            lookup(*args)


def test_probe_and_served_count():
    registry.reset_served()
    lookup(torch.zeros(3, 2, dtype=torch.int64), torch.ones(4, 2).bfloat16())
    assert registry.served() == {"embedding": 6}
    bound = registry.implementations()["embedding"]
    assert bound.probe() == bound.probe() != 0 and len(bound.content_hash()) == 64


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 9),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_shard_equals_the_reference(rows, width, ranks, seed):
    weight = samples.bf16((rows * ranks, width), seed, -126, 127)
    ids = torch.arange(11) * (seed + 1) % (rows * ranks)
    parts = [
        cpu.local_rows(ids, s, r * rows).view(torch.uint8) for r, s in enumerate(weight.split(rows))
    ]
    combined = torch.stack(parts).sum(0, dtype=torch.uint8).view(torch.bfloat16)
    assert same(combined, reference.lookup(ids, list(weight.split(rows))))


def _gloo_rank(rank, size, path, weight, ids, grad, want, want_grad):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    rows = weight.shape[0] // size
    mine = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    group = dist.group.WORLD
    out = lookup(ids, mine, rank * rows, group)
    assert same(out, want)
    out.backward(grad)
    assert same(mine.grad, want_grad[rank * rows : (rank + 1) * rows])
    for bad_ids, start, key in ((ids + 12, rank * rows, "SB0422"), (ids, 1, "SB0423")):
        with pytest.raises(Refused, match=key):
            lookup(bad_ids, mine, start, group)
    dist.destroy_process_group()


@pytest.mark.engine
def test_two_real_processes_give_the_bits_of_one(tmp_path):
    weight, ids = table(12, 5).requires_grad_(), torch.arange(24).reshape(4, 6) * 5 % 12
    grad = samples.bf16((4, 6, 5), 2, -3, 3)
    want = lookup(ids, weight)
    want.backward(grad)
    args = (2, os.fspath(tmp_path / "rendezvous"), weight.detach(), ids, grad)
    mp.start_processes(
        _gloo_rank, (*args, want.detach(), weight.grad), nprocs=2, start_method="spawn"
    )
