"""l2_norm: bits against the reference, invariance to everything but the row, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import bits
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.l2_norm import l2_norm, reference


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bits.compare(left, right).equal


@pytest.mark.parametrize("low,high", [(-4, 4), (-60, 55), (-126, -100), (50, 55)])
@pytest.mark.parametrize("n", [1, 15, 16, 64, 83, 128])
def test_bits_equal_the_reference(n, low, high):
    x = samples.bf16((7, n), 1, low, high)
    x[0], x[-1, ::2] = -0.0, 2.0**-130  # signed zeros; subnormals
    out = l2_norm(x)
    assert same(out, reference.l2_norm(x))
    assert (bits.int_view(out)[0] == 0x8000).all()  # -0 keeps its sign


def test_enough_elements_to_show_every_fp32_rounding():
    # One fp32 rounding more or less reaches bf16 about once in 2**17 elements.
    x = samples.bf16((10000, 128), 1, -2, 2)
    assert same(l2_norm(x), reference.l2_norm(x))


def test_values_are_right_and_eps_stands_under_the_root():
    x = samples.bf16((40, 128), 1, -14, -8)
    truth = x.double() / (x.double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    assert (l2_norm(x).double() / truth - 1).abs().max() < 2**-8
    assert (l2_norm(x, 1e-2).double() / truth - 1).abs().min() > 0.1


def test_infinities_and_nan_stay_visible():
    x = torch.ones(3, 32).bfloat16()
    x[0, 3], x[1, 3] = torch.nan, torch.inf
    out = l2_norm(x)
    assert out[0].isnan().all() and out[1, 3].isnan() and out[2].isfinite().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_alone_equals_the_row_in_a_batch(threads):
    x = samples.bf16((300, 128), 1, -9, 9)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = l2_norm(x)
    finally:
        torch.set_num_threads(before)
    assert same(whole, torch.cat([l2_norm(x[i : i + 1]) for i in range(len(x))]))


def test_strided_heads_equal_a_contiguous_copy():
    heads = samples.bf16((9, 5 * 64 + 3), 1)[:, 1 : 1 + 4 * 64].unflatten(1, (4, 64))
    assert not heads.is_contiguous()
    assert same(l2_norm(heads), l2_norm(heads.clone(memory_format=torch.contiguous_format)))


def test_gradient_matches_float64():
    x, g = samples.bf16((6, 3, 83), 1, -2, 2).requires_grad_(), samples.bf16((6, 3, 83), 3, -2, 2)
    out = l2_norm(x, 0.5)
    assert same(out, reference.l2_norm(x.detach(), 0.5))
    out.backward(g)
    x64 = x.detach().double().requires_grad_()
    (x64 / (x64.pow(2).sum(-1, keepdim=True) + 0.5).sqrt()).backward(g.double())
    assert x.grad.dtype == torch.bfloat16
    assert (x.grad.double() - x64.grad).abs().max() <= x64.grad.abs().max() * 2**-8


def test_refusals():
    for x, key in (
        (torch.ones(2, 8), "SB0420"),
        (torch.ones(()).bfloat16(), "SB0421"),
        (torch.ones(2, 0).bfloat16(), "SB0421"),
    ):
        with pytest.raises(Refused, match=key):
            l2_norm(x)


def test_no_rows_give_no_rows():
    assert l2_norm(torch.empty(0, 2, 8).bfloat16()).shape == (0, 2, 8)


def test_probe_and_served_count():
    registry.reset_served()
    l2_norm(torch.ones(3, 2, 8).bfloat16())
    assert registry.served() == {"gdn.l2_norm": 6}
    bound = registry.implementations()["gdn.l2_norm"]
    assert bound.probe() == bound.probe() != 0 and len(bound.content_hash()) == 64


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5),
    n=st.integers(1, 70),
    low=st.integers(-126, 55),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_range_equals_the_reference(rows, n, low, seed):
    x = samples.bf16((rows, n), seed, low, low + 3)
    assert same(l2_norm(x), reference.l2_norm(x))


@pytest.mark.parametrize("n", [15, 83, 128])
def test_wide_rows_are_used_as_they_are(n):
    x = samples.fp32((64, n), 4, -3, 3).requires_grad_()
    out = l2_norm(x, wide=True)
    assert out.dtype == torch.bfloat16 and same(out, reference.l2_norm(x.detach()))
    narrow = x.detach().bfloat16()
    assert not same(out, l2_norm(narrow))
    assert same(l2_norm(narrow.float(), wide=True), l2_norm(narrow))
    for wrong in (narrow, x.double()):
        with pytest.raises(Refused, match="SB0420"):
            l2_norm(wrong, wide=True)
    grad = samples.bf16((64, n), 5, -3, 3)
    out.backward(grad)
    x64 = x.detach().double().requires_grad_()
    (x64 / (x64.square().sum(-1, keepdim=True) + 1e-6).sqrt()).backward(grad.double())
    assert x.grad.dtype == torch.float32
    assert (x.grad - x64.grad).abs().max() <= x64.grad.abs().max() * 1e-5
