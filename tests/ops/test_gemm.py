"""gemm: bits against the reference, invariance to everything but the row, gradients, refusals."""

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
from samebits.ops import gemm, registry, samples
from samebits.ops.gemm import cpu, reference
from samebits.plan import ReductionPlan

WHOLE = ReductionPlan(1)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bits.compare(left, right).equal


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# Exponent ranges of x and w: ordinary, wide, products that underflow to subnormals, huge.
RANGES = ((-3, 3), (-60, 60), (-75, -66), (40, 62))


@pytest.mark.parametrize("low,high", RANGES)
@pytest.mark.parametrize("shape", [(1, 7, 64), (5, 10, 83), (7, 4, 16), (3, 3, 1), (66, 5, 40)])
def test_bits_equal_the_reference(shape, low, high):
    rows, width, length = shape
    x, w = samples.bf16((rows, length), 1, low, high), samples.bf16((width, length), 2, low, high)
    x[0, 0], w[0, 0] = -0.0, 0.0
    assert same(gemm.linear(x, w), reference.matmul(x, w, WHOLE))
    assert same(gemm.lm_head(x, w), reference.accumulate(x, w, WHOLE))


def test_subnormal_products_are_kept():
    x, w = samples.bf16((4, 64), 1, -70, -66), samples.bf16((6, 64), 2, -70, -66)
    out = gemm.lm_head(x, w)
    tiny = torch.finfo(torch.float32).tiny
    assert (out != 0).all() and (out.abs() < tiny).any()
    assert same(out, reference.accumulate(x, w, WHOLE))


@pytest.mark.parametrize("length,sign_bit", [(16, True), (32, True), (17, False), (31, False)])
def test_padding_adds_plus_zero(length, sign_bit):
    # Every term rounds to -0, and so does every lane, unless a padded term adds +0 to it.
    x = torch.full((1, length), 2.0**-100).bfloat16()
    out = gemm.lm_head(x, -x)
    assert (out == 0).all() and torch.signbit(out).item() == sign_bit
    assert same(out, reference.accumulate(x, -x, WHOLE))


def test_ties_round_to_even():
    # 1 + 2**-8 lies halfway between two bf16 values, 1 and 1 + 2**-7; 1 + 3 * 2**-8 likewise.
    x = torch.tensor([[1.0, 2.0**-8], [1.0, 3 * 2.0**-8], [-1.0, -(2.0**-8)]]).bfloat16()
    w = torch.ones(1, 2).bfloat16()
    assert gemm.linear(x, w).flatten().tolist() == [1.0, 1.0 + 2.0**-6, -1.0]


def test_infinities_pass_and_nan_stays_nan():
    x, w = normal(3, 32), normal(4, 32, seed=1)
    x[0, 3], x[1, 5], x[1, 6] = torch.inf, torch.inf, -torch.inf
    w[:, 3], w[:, 5], w[:, 6] = 1.0, 1.0, 1.0
    out = gemm.linear(x, w)
    assert (out[0] == torch.inf).all() and out[1].isnan().all()
    assert same(out[2], reference.matmul(x[2:], w, WHOLE)[0])
    assert same(out[0], reference.matmul(x[:1], w, WHOLE)[0])


@pytest.mark.parametrize("width,length", [(960, 576), (55, 1536), (31, 100)])
def test_a_row_does_not_see_its_batch(width, length):
    w, row = normal(width, length, seed=1), normal(1, length)
    alone = gemm.lm_head(row, w)[0]
    for rows, at in ((2, 1), (3, 0), (4, 3), (5, 4), (17, 16), (64, 33), (65, 64), (130, 127)):
        x = normal(rows, length, seed=rows) * 100
        x[at] = row
        assert same(gemm.lm_head(x, w)[at], alone), (rows, at)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_columns_may_be_split_anywhere(rows):
    x, w = normal(rows, 96), normal(200, 96, seed=1)
    whole = gemm.linear(x, w)
    for cut in (1, 2, 3, 64, 97, 199):
        parts = gemm.linear(x, w[:cut]), gemm.linear(x, w[cut:])
        assert same(torch.cat(parts, -1), whole), cut


def test_torch_differs_between_one_row_and_many():
    """The hazard is real here: torch's own fp32 product of one row depends on the batch."""
    x, w = normal(64, 576).float(), normal(960, 576, seed=1).float()
    alone = torch.cat([torch.nn.functional.linear(x[i : i + 1], w) for i in range(4)])
    assert not same(torch.nn.functional.linear(x, w)[:4], alone)


@pytest.mark.parametrize("rows", [1, 2, 70])
def test_thread_count_and_block_cut_do_not_matter(rows, monkeypatch):
    x, w = normal(rows, 160), normal(500, 160, seed=1)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs += [gemm.lm_head(x, w), gemm.row_parallel(x, w, ReductionPlan(2))]
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(cpu, "DIRECT_ROWS", 0)
    monkeypatch.setattr(cpu, "X_FLOATS", 700)
    monkeypatch.setattr(cpu, "W_FLOATS", 1700)
    outs += [gemm.lm_head(x, w), gemm.row_parallel(x, w, ReductionPlan(2))]
    assert all(same(out, outs[i % 2]) for i, out in enumerate(outs))


@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
@pytest.mark.parametrize("rows,length", [(1, 128), (6, 8 * 5)])
def test_leaf_tree_equals_the_reference(leaves, rows, length):
    x, w = normal(rows, length), normal(9, length, seed=1)
    plan = ReductionPlan(leaves)
    assert same(gemm.row_parallel(x, w, plan), reference.matmul(x, w, plan))
    # Before rounding too: bf16 hides most changes of order.
    assert same(cpu.matmul(x, w, leaves, torch.float32), reference.accumulate(x, w, plan))


def test_leaves_change_bits_so_the_plan_matters():
    x, w = normal(64, 512), normal(64, 512, seed=1)
    one = gemm.row_parallel(x, w, ReductionPlan(1))
    eight = gemm.row_parallel(x, w, ReductionPlan(8))
    assert same(one, gemm.linear(x, w)) and not same(one, eight)


def _ranks(monkeypatch, x, w, plan, size):
    """row_parallel of every rank of a group, with the gather replaced by the ranks in turn."""
    k = x.shape[1] // size
    shards = [
        (x[:, r * k : (r + 1) * k].contiguous(), w[:, r * k : (r + 1) * k].contiguous())
        for r in range(size)
    ]
    leaves = plan.local(size).leaves
    roots = [cpu.matmul(*shard, leaves, torch.float32) for shard in shards]

    def gather(out, mine, group):
        assert any(same(mine, root) for root in roots)
        for target, root in zip(out, roots, strict=True):
            target.copy_(root)

    monkeypatch.setattr(dist, "get_world_size", lambda group: size)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "all_gather", gather)
    return [gemm.row_parallel(*shard, plan, group=object()) for shard in shards]


@pytest.mark.parametrize("leaves", [2, 4, 8])
def test_every_group_size_gives_the_bits_of_one_rank(leaves, monkeypatch):
    x, w = normal(5, 384), normal(40, 384, seed=1)
    plan = ReductionPlan(leaves)
    whole = gemm.row_parallel(x, w, plan)
    for size in (s for s in (2, 4, 8) if s <= leaves):
        with monkeypatch.context() as patch:
            assert all(same(out, whole) for out in _ranks(patch, x, w, plan, size))


def test_rank_order_sum_of_rounded_partials_differs():
    x, w = normal(32, 384), normal(40, 384, seed=1)
    native = gemm.linear(x[:, :192], w[:, :192].contiguous()) + gemm.linear(
        x[:, 192:], w[:, 192:].contiguous()
    )
    assert not same(native, gemm.row_parallel(x, w, ReductionPlan(2)))


def _gloo_rank(rank: int, size: int, path: str, x, w, expected) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    k = x.shape[1] // size
    part = slice(rank * k, (rank + 1) * k)
    mine = x[:, part].clone().requires_grad_(), w[:, part].contiguous().requires_grad_()
    out = gemm.row_parallel(*mine, ReductionPlan(4), dist.group.WORLD)
    assert same(out, expected)
    out.float().sum().backward()
    assert mine[0].grad.shape == mine[0].shape and mine[1].grad.shape == mine[1].shape
    dist.destroy_process_group()


@pytest.mark.engine
def test_two_real_processes_give_the_bits_of_one(tmp_path):
    x, w = normal(9, 256), normal(48, 256, seed=1)
    expected = gemm.row_parallel(x, w, ReductionPlan(4))
    path = os.fspath(tmp_path / "rendezvous")
    mp.start_processes(_gloo_rank, (2, path, x, w, expected), nprocs=2, start_method="spawn")


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 20),
    leaf=st.integers(1, 40),
    leaves=st.sampled_from((1, 2, 4)),
    low=st.integers(-74, 40),
    spread=st.integers(1, 30),
    seed=st.integers(0, 2**31),
)
def test_any_shape_equals_the_reference(rows, width, leaf, leaves, low, spread, seed):
    x = samples.bf16((rows, leaf * leaves), seed, low, low + spread)
    w = samples.bf16((width, leaf * leaves), seed + 1, low, min(low + spread, 60))
    expected = reference.matmul(x, w, ReductionPlan(leaves))
    out = gemm.row_parallel(x, w, ReductionPlan(leaves))
    nan = expected.isnan()
    assert (nan == out.isnan()).all()
    assert same(torch.where(nan, 0, out), torch.where(nan, 0, expected))


def test_weights_are_read_afresh_after_an_update_in_place():
    x, w = normal(2, 64), normal(8, 64, seed=1)
    gemm.linear(x, w)
    w.copy_(normal(8, 64, seed=2))
    assert same(gemm.linear(x, w), reference.matmul(x, w, WHOLE))


def test_leading_dimensions_strides_and_empty_batches():
    x, w = normal(2, 3, 64), normal(8, 64, seed=1)
    out = gemm.linear(x, w)
    assert out.shape == (2, 3, 8)
    assert same(gemm.linear(x.transpose(0, 1), w), out.transpose(0, 1))
    assert same(gemm.linear(x[0, 0], w), out[0, 0])
    assert gemm.linear(x[:0], w).shape == (0, 3, 8)


@pytest.mark.parametrize("low,high", RANGES)
@pytest.mark.parametrize("shape", [(1, 7, 64), (5, 10, 83), (3, 3, 1), (66, 5, 40)])
def test_bits_with_a_bias_equal_the_reference(shape, low, high):
    rows, width, length = shape
    x, w = samples.bf16((rows, length), 1, low, high), samples.bf16((width, length), 2, low, high)
    # Of the size of the products, where bf16 reaches that far.
    least = max(2 * low, -126)
    bias = samples.bf16((width,), 3, least, max(2 * high, least + 4))
    bias[:2] = torch.tensor([0.0, -0.0])
    ours, law = gemm.linear(x, w, bias), reference.linear(x, w, bias)
    assert same(ours, law)
    assert not same(ours, gemm.linear(x, w))


def test_a_bias_is_added_before_the_only_rounding():
    x, w, bias = normal(64, 64), normal(80, 64, seed=1), normal(80, seed=2)
    once = (gemm.lm_head(x, w) + bias.float()).bfloat16()
    twice = (gemm.linear(x, w).float() + bias.float()).bfloat16()
    assert same(gemm.linear(x, w, bias), once) and not same(once, twice)


def test_ties_with_a_bias_round_to_even():
    x, w = torch.tensor([[2.0**-8], [3 * 2.0**-8], [-(2.0**-8)]]).bfloat16(), torch.ones(2, 1)
    bias = torch.tensor([1.0, -1.0]).bfloat16()
    out = gemm.linear(x, w.bfloat16(), bias)
    # 1 - 2**-8 is a bf16 value: below 1 they lie twice as close.
    assert out[:, 0].tolist() == [1.0, 1.0 + 2.0**-6, 1 - 2.0**-8]
    assert out[:, 1].tolist() == [-1 + 2.0**-8, -1 + 3 * 2.0**-8, -1.0]


def test_a_bias_of_zero_keeps_the_sign_that_ieee_gives():
    # The sum is -0 where every lane is; only -0 + -0 is -0.
    x, w = torch.full((1, 16), 2.0**-100).bfloat16(), torch.full((2, 16), -(2.0**-100)).bfloat16()
    bias = torch.tensor([-0.0, 0.0]).bfloat16()
    out = gemm.linear(x, w, bias)
    assert torch.signbit(out).tolist() == [[True, False]] and (out == 0).all()
    assert same(out, reference.linear(x, w, bias))


def test_subnormal_biases_and_sums_are_kept():
    x, w = samples.bf16((4, 64), 1, -70, -66), samples.bf16((6, 64), 2, -70, -66)
    bias = torch.tensor([2.0**-133, -(2.0**-130), 2.0**-127, 0.0, -0.0, 2.0**-126]).bfloat16()
    out = gemm.linear(x, w, bias)
    assert (out[:, 1:3] != 0).all() and (out.abs() < torch.finfo(torch.float32).tiny).any()
    assert same(out, reference.linear(x, w, bias))


def test_infinities_and_nan_of_a_bias_pass():
    x, w = normal(3, 32), normal(4, 32, seed=1)
    bias = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0]).bfloat16()
    x[1, 3], w[:, 3] = torch.inf, 1.0
    out = gemm.linear(x, w, bias)
    assert (out[0, 0], out[0, 1]) == (torch.inf, -torch.inf) and out[:, 2].isnan().all()
    assert out[1].isnan().tolist() == [False, True, True, False]  # inf - inf
    assert same(out[2, 3], reference.linear(x, w, bias)[2, 3])


@pytest.mark.parametrize("width,length", [(960, 576), (55, 1536)])
def test_with_a_bias_a_row_does_not_see_its_batch_nor_a_column_its_shard(width, length):
    w, row, bias = normal(width, length, seed=1), normal(1, length), normal(width, seed=2)
    alone = gemm.linear(row, w, bias)[0]
    for rows, at in ((2, 1), (3, 0), (5, 4), (17, 16), (65, 64), (130, 127)):
        x = normal(rows, length, seed=rows) * 100
        x[at] = row
        assert same(gemm.linear(x, w, bias)[at], alone), (rows, at)
    for cut in (1, 3, width // 2):
        parts = gemm.linear(row, w[:cut], bias[:cut]), gemm.linear(row, w[cut:], bias[cut:])
        assert same(torch.cat(parts, -1)[0], alone), cut


@pytest.mark.parametrize("rows", [1, 2, 70])
def test_with_a_bias_threads_and_blocks_do_not_matter(rows, monkeypatch):
    x, w, bias = normal(rows, 160), normal(500, 160, seed=1), normal(500, seed=2)
    before, outs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append(gemm.linear(x, w, bias))
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(cpu, "DIRECT_ROWS", 0)
    monkeypatch.setattr(cpu, "X_FLOATS", 700)
    monkeypatch.setattr(cpu, "W_FLOATS", 1700)
    outs.append(gemm.linear(x, w, bias))
    assert all(same(out, outs[0]) for out in outs)


@pytest.mark.parametrize("rows", [1, 6, 700])
def test_the_gradient_of_a_bias_is_the_fp32_sum_over_rows_in_one_order(rows):
    x, w, g = normal(rows, 64), normal(130, 64, seed=1), normal(rows, 130, seed=3)
    g[0] = 300.0  # so that an order of additions shows
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            bias = normal(130, seed=2).requires_grad_()
            gemm.linear(x, w, bias).backward(g)  # of the three operands it alone wants one
            found.append(bias.grad)
    finally:
        torch.set_num_threads(before)
    exact = g.double().sum(0)
    assert found[0].dtype == torch.bfloat16 and all(same(grad, found[0]) for grad in found)
    assert (found[0].double() - exact).abs().max() <= exact.abs().max() * 2.0**-8


@pytest.mark.parametrize("call", ["linear", "biased", "lm_head", "row"])
def test_gradients_against_float64(call):
    x, w = normal(6, 64).requires_grad_(), normal(10, 64, seed=1).requires_grad_()
    bias = normal(10, seed=2).requires_grad_()
    out = {
        "linear": gemm.linear,
        "biased": lambda x, w: gemm.linear(x, w, bias),
        "lm_head": gemm.lm_head,
        "row": lambda x, w: gemm.row_parallel(x, w, ReductionPlan(4)),
    }[call](x, w)
    g = normal(6, 10, seed=3).to(out.dtype)
    out.backward(g)
    for got, exact in (
        (x.grad, g.double() @ w.detach().double()),
        (w.grad, g.double().t() @ x.detach().double()),
        *([(bias.grad, g.double().sum(0))] if call == "biased" else []),
    ):
        assert got.dtype == torch.bfloat16
        assert (got.double() - exact).abs().max() <= exact.abs().max() * 2.0**-8


def test_bf16_rounding_of_the_gathered_root():
    x = samples.fp32((4096,), 5, -126, 127)
    assert same(cpu.to_bf16(x), x.bfloat16())


def test_every_call_is_counted():
    registry.reset_served()
    x, w = normal(2, 3, 64), normal(8, 64)
    gemm.linear(x, w), gemm.lm_head(x, w), gemm.row_parallel(x, w, WHOLE)
    gemm.linear(x[0], w, w[:, 0].contiguous())
    assert registry.served() == {
        "gemm.column": 6,
        "gemm.lm_head": 6,
        "gemm.row": 6,
        "gemm.bias": 3,
    }


def test_probes_repeat_and_tell_regions_and_flushed_subnormals_apart():
    found = registry.implementations("cpu")
    regions = ("gemm.column", "gemm.row", "gemm.lm_head", "gemm.bias")
    probes = {r: found[r].probe for r in regions}
    answers = {region: probe() for region, probe in probes.items()}
    assert len(set(answers.values())) == 4
    assert answers == {region: probe() for region, probe in probes.items()}
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # flushing is a setting of the calling thread
    torch.set_flush_denormal(True)
    try:
        flushed = {region: probe() for region, probe in probes.items()}
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
    assert all(flushed[region] != answers[region] for region in answers)


@pytest.mark.parametrize(
    "error_id,call",
    [
        ("SB0420", lambda x, w: gemm.linear(x.float(), w)),
        ("SB0420", lambda x, w: gemm.lm_head(x, w.half())),
        ("SB0420", lambda x, w: gemm.linear(x, w, torch.zeros(8))),
        ("SB0421", lambda x, w: gemm.linear(x[:, :32], w)),
        ("SB0421", lambda x, w: gemm.linear(x, w[0])),
        ("SB0421", lambda x, w: gemm.linear(x, w, w[0])),
        ("SB0413", lambda x, w: gemm.linear(x, w, w[:, 0])),
        ("SB0413", lambda x, w: gemm.linear(x[:, :32], w[:, :32])),
        ("SB0413", lambda x, w: gemm.linear(x[:, :8], w.t()[:8].t()[:, :8])),
        ("SB0402", lambda x, w: gemm.row_parallel(x[:, :60], w[:, :60].contiguous(), PLAN8)),
    ],
)
def test_refusals(error_id, call):
    with pytest.raises(Refused) as caught:
        call(normal(2, 64), normal(8, 64))
    assert caught.value.error_id == error_id


def test_a_group_that_does_not_divide_the_plan_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    with pytest.raises(Refused) as caught:
        gemm.row_parallel(normal(2, 64), normal(8, 64), ReductionPlan(2), group=object())
    assert caught.value.error_id == "SB0403"


PLAN8 = ReductionPlan(8)
