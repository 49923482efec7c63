"""rms_norm: bits against the reference, invariance to everything but the row, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import bits
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.rms_norm import reference, rms_norm

EPS = 1e-5


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bits.compare(left, right).equal


def hostile(rows: int, n: int, low: int, high: int, seed: int) -> torch.Tensor:
    x = samples.bf16((rows, n), seed, low, high)
    x[0, :] = -0.0
    x[-1, ::2] = torch.tensor(2.0**-130).bfloat16()  # a subnormal
    return x


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("low,high", [(-4, 4), (-60, 60), (-126, -100), (50, 63)])
@pytest.mark.parametrize("n", [1, 15, 16, 64, 83, 576])
def test_bits_equal_the_reference(n, low, high, zero_centred):
    x, w = hostile(7, n, low, high, 1), samples.bf16((n,), 2, -3, 3)
    out = rms_norm(x, w, EPS, zero_centred)
    assert same(out, reference.rms_norm(x, w, EPS, zero_centred))
    factor = bits.int_view((1 + w.float() if zero_centred else w.float()).bfloat16())
    assert (bits.int_view(out)[0] & 0x8000 != factor & 0x8000).all()  # -0 keeps its sign


@pytest.mark.parametrize("zero_centred", [False, True])
def test_enough_elements_to_show_every_fp32_rounding(zero_centred):
    # One fp32 rounding more or less reaches bf16 about once in 2**17 elements.
    x, w = samples.bf16((20000, 64), 1, -2, 2), samples.bf16((64,), 2, -2, 2)
    out = rms_norm(x, w, EPS, zero_centred)
    assert same(out, reference.rms_norm(x, w, EPS, zero_centred))


def test_values_are_right():
    x, w = samples.bf16((40, 576), 1, -4, 4), samples.bf16((576,), 2, -1, 1)
    truth = torch.nn.functional.rms_norm(x.double(), (576,), w.double(), EPS)
    assert (rms_norm(x, w, EPS).double() / truth - 1).abs().max() < 2**-8
    truth = torch.nn.functional.rms_norm(x.double(), (576,), 1 + w.double(), EPS)
    assert (rms_norm(x, w, EPS, zero_centred=True).double() / truth - 1).abs().max() < 2**-8


def test_a_small_zero_centred_weight_is_not_lost():
    # 1 + 2**-8 is no bf16 number; only a factor formed in fp32 shows it.
    x, w = samples.bf16((50, 64), 1, -2, 2), torch.full((64,), 2.0**-8).bfloat16()
    out, plain = rms_norm(x, w, EPS, zero_centred=True), rms_norm(x, torch.ones_like(w), EPS)
    assert (bits.int_view(out) != bits.int_view(plain)).mean() > 0.25


@pytest.mark.parametrize("zero_centred", [False, True])
def test_infinities_and_nan_stay_visible(zero_centred):
    x, w = torch.ones(3, 32).bfloat16(), torch.full((32,), 0.5).bfloat16()
    x[0, 3], x[1, 3] = torch.nan, torch.inf
    out = rms_norm(x, w, EPS, zero_centred)
    assert out[0].isnan().all() and out[1, 3].isnan() and out[2].isfinite().all()


def test_a_tie_at_the_final_rounding_goes_to_even():
    # The mean square is 2**14, so r = 2**-7 and x * r * w = 193.5/128, 196.5/128 exactly.
    x = torch.tensor([[129, 131, 255, 255, 255, 182, 11, 4, 2, 1, 1, 0, 0, 0, 0, 0]]).bfloat16()
    assert (x.double() ** 2).sum() == 16 * 2**14
    out = rms_norm(x, torch.full((16,), 1.5).bfloat16(), 0.0)
    assert out[0, :2].tolist() == [194 / 128, 196 / 128]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_alone_equals_the_row_in_a_batch(threads):
    x, w = samples.bf16((300, 576), 1, -9, 9), samples.bf16((576,), 2, -2, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = rms_norm(x, w, EPS)
    finally:
        torch.set_num_threads(before)
    alone = torch.cat([rms_norm(x[i : i + 1], w, EPS) for i in range(len(x))])
    assert same(whole, alone)


def test_strided_heads_equal_a_contiguous_copy():
    qkv, w = samples.bf16((9, 5 * 64 + 3), 1), samples.bf16((64,), 2, -2, 2)
    heads = qkv[:, 1 : 1 + 4 * 64].unflatten(1, (4, 64)).transpose(0, 1)
    assert not heads.is_contiguous()
    out = rms_norm(heads, w, EPS)
    rows = torch.stack([rms_norm(row.clone(), w, EPS) for row in heads.flatten(0, 1)])
    assert same(out.flatten(0, 1), rows)


@pytest.mark.parametrize("zero_centred", [False, True])
def test_gradients_match_float64(zero_centred):
    x, w = samples.bf16((6, 3, 83), 1, -2, 2), samples.bf16((83,), 2, -2, 2)
    g = samples.bf16((6, 3, 83), 3, -2, 2)
    x.requires_grad_(), w.requires_grad_()
    rms_norm(x, w, EPS, zero_centred).backward(g)
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    factor = 1 + w64 if zero_centred else w64
    torch.nn.functional.rms_norm(x64, (83,), factor, EPS).backward(g.double())
    for got, want in ((x.grad, x64.grad), (w.grad, w64.grad)):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).abs().max() <= want.abs().max() * 2**-8


def test_refusals():
    x, w = torch.ones(2, 8).bfloat16(), torch.ones(8).bfloat16()
    for args, key in (
        ((x.float(), w), "SB0420"),
        ((x, w.float()), "SB0420"),
        ((x, w[:4]), "SB0421"),
        ((x, w[None]), "SB0421"),
        ((x.new_zeros(()), w), "SB0421"),
    ):
        with pytest.raises(Refused, match=key):
            rms_norm(*args, EPS)


def test_no_rows_give_no_rows():
    w = torch.ones(8).bfloat16()
    assert rms_norm(torch.empty(0, 8).bfloat16(), w, EPS).shape == (0, 8)


def test_probe_and_served_count():
    registry.reset_served()
    rms_norm(torch.ones(3, 2, 8).bfloat16(), torch.ones(8).bfloat16(), EPS)
    rms_norm(torch.ones(4, 8).bfloat16(), torch.ones(8).bfloat16(), EPS, zero_centred=True)
    assert registry.served() == {"norm.rms": 6, "norm.rms_zero_centred": 4}
    plain, centred = (registry.implementations()[region] for region in registry.served())
    assert plain.probe() == plain.probe() != centred.probe() != 0
    assert plain.content_hash() == centred.content_hash()


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5),
    n=st.integers(1, 70),
    low=st.integers(-126, 60),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_range_equals_the_reference(rows, n, low, seed):
    x, w = samples.bf16((rows, n), seed, low, low + 3), samples.bf16((n,), seed + 1, -3, 3)
    assert same(rms_norm(x, w, 1e-6), reference.rms_norm(x, w, 1e-6))
