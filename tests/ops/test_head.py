"""head: the streamed output layer has the bits of the unstreamed one, and right gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from samebits import bits
from samebits.errors import Refused
from samebits.ops import gemm, head, logprob, registry, samples
from samebits.plan import ReductionPlan

# Rows, width of a row, vocabulary, leaves: odd sizes, and blocks that do not divide them.
SIZES = [(1, 16, 8, 1), (13, 24, 40, 8), (29, 40, 8 * 13, 8), (65, 33, 1003, 1), (7, 8, 12, 4)]


def operands(rows, length, vocab, seed=1):
    hidden = samples.bf16((rows, length), seed, -2, 2)
    weight = samples.bf16((vocab, length), seed + 1, -3, 1)
    targets = (torch.arange(rows) * 7919 + 3) % vocab
    return hidden, weight, targets


def unstreamed(hidden, weight, targets, plan):
    return logprob.selected(gemm.lm_head(hidden, weight), targets, plan)


@pytest.fixture(params=[1, 3, 10])
def rows_alive(request, monkeypatch):
    """Sets how many rows of logits of `vocab` columns may be alive."""

    def limit(vocab: int) -> None:
        monkeypatch.setattr(head, "LOGITS", 4 * vocab * request.param)

    return limit


@pytest.mark.parametrize("rows,length,vocab,leaves", SIZES)
def test_streamed_has_the_bits_of_unstreamed(rows_alive, rows, length, vocab, leaves):
    rows_alive(vocab)
    plan = ReductionPlan(leaves)
    hidden, weight, targets = operands(rows, length, vocab)
    law = unstreamed(hidden, weight, targets, plan)
    for weight.requires_grad in (False, True):
        found = head.selected(hidden, weight, targets, plan).detach()
        assert bits.compare(found, law.detach()).equal and found.shape == law.shape


def test_padded_rows_of_the_weight_are_not_scored(rows_alive):
    rows_alive(56)
    hidden, weight, targets = operands(9, 16, 40)
    padded = torch.cat([weight, torch.full((16, 16), torch.nan, dtype=torch.bfloat16)])
    plan = ReductionPlan(8)
    law = unstreamed(hidden, weight, targets, plan)
    assert bits.compare(head.selected(hidden, padded, targets, plan, vocab=40), law).equal


@pytest.mark.parametrize("rows,length,vocab,leaves", SIZES)
def test_gradients_against_float64(rows_alive, rows, length, vocab, leaves):
    rows_alive(vocab)
    hidden, weight, targets = operands(rows, length, vocab)
    hidden.requires_grad_(), weight.requires_grad_()
    slope = samples.fp32((rows,), 5, -1, 1)
    y = head.selected(hidden, weight, targets, ReductionPlan(leaves))
    found = torch.autograd.grad(y, (hidden, weight), slope)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    y = torch.log_softmax(exact[0] @ exact[1].T, 1)
    y = y.gather(1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad(y, exact, slope.double())
    for ours, true in zip(found, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - true).norm() <= 3e-3 * true.norm()


def test_gradients_come_out_the_same_twice_and_one_at_a_time(rows_alive):
    rows_alive(104)
    hidden, weight, targets = operands(29, 40, 104)
    plan = ReductionPlan(8)

    def gradients(of_hidden, of_weight):
        x, w = hidden.clone(), weight.clone()
        x.requires_grad_(of_hidden), w.requires_grad_(of_weight)
        head.selected(x, w, targets, plan).sum().backward()
        return x.grad, w.grad

    both = gradients(True, True)
    assert all(bits.compare(a, b).equal for a, b in zip(both, gradients(True, True), strict=True))
    only = gradients(True, False)
    assert bits.compare(only[0], both[0]).equal and only[1] is None
    only = gradients(False, True)
    assert bits.compare(only[1], both[1]).equal and only[0] is None


def test_no_more_logits_than_said_are_alive(rows_alive, monkeypatch):
    rows_alive(104)
    seen = []
    product = gemm.lm_head
    monkeypatch.setattr(gemm, "lm_head", lambda x, w: seen.append(len(x) * len(w)) or product(x, w))
    hidden, weight, targets = operands(29, 40, 104)
    registry.reset_served()
    head.selected(hidden, weight, targets, ReductionPlan(8))
    assert max(seen) * 4 <= head.LOGITS and len(seen) > 2
    served = registry.served()
    assert served["gemm.lm_head"] == served["logprob"] == 29


@pytest.mark.parametrize(
    "error_id,change",
    [
        ("SB0432", {"targets": torch.full((29,), 104)}),
        ("SB0421", {"targets": torch.zeros(28, dtype=torch.int64)}),
        ("SB0420", {"targets": torch.zeros(29)}),
        ("SB0420", {"hidden": torch.zeros(29, 40)}),
        ("SB0421", {"hidden": torch.zeros(29, 39, dtype=torch.bfloat16)}),
        ("SB0402", {"vocab": 103}),
        ("SB0431", {"start": 8}),
    ],
)
def test_refusals(rows_alive, error_id, change):
    rows_alive(104)
    hidden, weight, targets = operands(29, 40, 104)
    given = {"hidden": hidden, "weight": weight, "targets": targets, "plan": ReductionPlan(8)}
    with pytest.raises(Refused) as caught:
        head.selected(**(given | change))
    assert caught.value.error_id == error_id


def _rank(rank, store, results):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    head.LOGITS = 4 * 52 * 5
    hidden, weight, targets = operands(29, 40, 104)
    mine = weight[52 * rank : 52 * rank + 52].clone().requires_grad_()
    hidden.requires_grad_()
    y = head.selected(hidden, mine, targets, ReductionPlan(8), dist.group.WORLD, 52 * rank)
    y.sum().backward()
    torch.save((y.detach(), hidden.grad, mine.grad), f"{results}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_have_the_bits_of_one(tmp_path):
    mp.spawn(_rank, (tmp_path / "store", tmp_path), nprocs=2)
    hidden, weight, targets = operands(29, 40, 104)
    hidden.requires_grad_(), weight.requires_grad_()
    law = unstreamed(hidden, weight, targets, ReductionPlan(8))
    law.sum().backward()
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for y, _, _ in parts:
        assert bits.compare(y, law.detach()).equal
    of_weight = torch.cat([w for _, _, w in parts]).double()
    assert (of_weight - weight.grad.double()).norm() <= 6e-3 * weight.grad.double().norm()
    of_hidden = parts[0][1].double() + parts[1][1].double()
    assert (of_hidden - hidden.grad.double()).norm() <= 6e-3 * hidden.grad.double().norm()
