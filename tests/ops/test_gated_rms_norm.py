"""gated_rms_norm: bits against the reference, invariance to everything but the row, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import bits
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.gated_rms_norm import gated_rms_norm, reference

EPS = 1e-6


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bits.compare(left, right).equal


def operands(rows: int, n: int, seed: int, low: int = -3, high: int = 3):
    return (
        samples.bf16((rows, n), seed, low, high),
        samples.bf16((rows, n), seed + 1, -6, 4),
        samples.bf16((n,), seed + 2, -2, 2),
    )


def truth(x, z, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS) * z * z.sigmoid()


@pytest.mark.parametrize("low,high", [(-4, 4), (-60, 60), (-126, -100), (50, 58)])
@pytest.mark.parametrize("n", [1, 15, 16, 64, 83, 128])
def test_bits_equal_the_reference(n, low, high):
    x, z, w = operands(7, n, 1, low, high)
    x[0], x[-1, ::2], z[1], z[2, ::2] = -0.0, 2.0**-130, -0.0, 2.0**-130
    out = gated_rms_norm(x, z, w, EPS)
    assert same(out, reference.gated_rms_norm(x, z, w, EPS))


def test_enough_elements_to_show_every_fp32_rounding():
    # One fp32 rounding more or less reaches bf16 about once in 2**17 elements.
    x, z, w = operands(10000, 128, 1)
    assert same(gated_rms_norm(x, z, w, EPS), reference.gated_rms_norm(x, z, w, EPS))


def test_every_gate_value_equals_the_reference():
    gate = torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16)
    z = torch.where(gate.isfinite(), gate, 0.0).reshape(512, 128)
    x, _, w = operands(512, 128, 1)
    assert same(gated_rms_norm(x, z, w, EPS), reference.gated_rms_norm(x, z, w, EPS))


def test_values_are_right_and_the_norm_is_not_rounded_before_the_gate():
    x, z, w = operands(200, 128, 1)
    want = truth(x.double(), z.double(), w.double())
    out = gated_rms_norm(x, z, w, EPS).double()
    assert (out / want - 1).abs().max() < 2**-8 * 1.01
    rounded = torch.nn.functional.rms_norm(x.double(), (128,), w.double(), EPS).bfloat16().double()
    twice = (rounded * z.double() * z.double().sigmoid()).bfloat16().double()
    assert (out - want).abs().mean() < 0.9 * (twice - want).abs().mean()


def test_infinities_and_nan_stay_visible():
    x, z, w = torch.ones(4, 32).bfloat16(), torch.ones(4, 32).bfloat16(), torch.ones(32).bfloat16()
    x[0, 3], x[1, 3], z[2, 3] = torch.nan, torch.inf, torch.nan
    out = gated_rms_norm(x, z, w, EPS)
    assert out[0].isnan().all() and out[1, 3].isnan() and out[2].isnan().sum() == 1
    assert out[3].isfinite().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_alone_equals_the_row_in_a_batch(threads):
    x, z, w = operands(300, 128, 1, -9, 9)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = gated_rms_norm(x, z, w, EPS)
    finally:
        torch.set_num_threads(before)
    alone = [gated_rms_norm(x[i : i + 1], z[i : i + 1], w, EPS) for i in range(len(x))]
    assert same(whole, torch.cat(alone))


def test_strided_heads_equal_contiguous_copies():
    x, z = (samples.bf16((9, 300), seed)[:, 1:257].unflatten(1, (4, 64)) for seed in (1, 2))
    w = samples.bf16((64,), 3, -2, 2)
    assert not x.is_contiguous() and not z.is_contiguous()
    assert same(gated_rms_norm(x, z, w, EPS), gated_rms_norm(x.clone(), z.clone(), w, EPS))


def test_gradients_match_float64():
    inputs = [t.unflatten(0, (6, 3)) if t.dim() == 2 else t for t in operands(18, 83, 1, -2, 2)]
    g = samples.bf16((6, 3, 83), 7, -2, 2)
    for t in inputs:
        t.requires_grad_()
    out = gated_rms_norm(*inputs, EPS)
    assert same(out, reference.gated_rms_norm(*(t.detach() for t in inputs), EPS))
    out.backward(g)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    truth(*wide).backward(g.double())
    for t, t64 in zip(inputs, wide, strict=True):
        assert t.grad.dtype == torch.bfloat16
        assert (t.grad.double() - t64.grad).abs().max() <= t64.grad.abs().max() * 2**-8


def test_refusals():
    x, z, w = operands(2, 8, 1)
    for args, key in (
        ((x.float(), z, w), "SB0420"),
        ((x, z.float(), w), "SB0420"),
        ((x, z, w.float()), "SB0420"),
        ((x, z, w[:4]), "SB0421"),
        ((x, z, w[None]), "SB0421"),
        ((x, z[:1], w), "SB0421"),
        ((x, z.flatten(), w), "SB0421"),
        ((x.new_zeros(()), z, w), "SB0421"),
    ):
        with pytest.raises(Refused, match=key):
            gated_rms_norm(*args, EPS)


def test_no_rows_give_no_rows():
    x, z, w = operands(2, 8, 1)
    assert gated_rms_norm(x[:0], z[:0], w, EPS).shape == (0, 8)


def test_probe_and_served_count():
    registry.reset_served()
    gated_rms_norm(*operands(6, 8, 1), EPS)
    assert registry.served() == {"norm.gated": 6}
    bound = registry.implementations()["norm.gated"]
    assert bound.probe() == bound.probe() != 0 and len(bound.content_hash()) == 64


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5),
    n=st.integers(1, 70),
    low=st.integers(-126, 55),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_range_equals_the_reference(rows, n, low, seed):
    x, z, w = operands(rows, n, seed, low, low + 3)
    assert same(gated_rms_norm(x, z, w, EPS), reference.gated_rms_norm(x, z, w, EPS))


@pytest.mark.parametrize("n", [15, 83, 128])
def test_wide_rows_are_used_as_they_are(n):
    _, z, w = operands(64, n, 1)
    x = samples.fp32((64, n), 4, -3, 3)
    out = gated_rms_norm(x, z, w, EPS, wide=True)
    assert same(out, reference.gated_rms_norm(x, z, w, EPS))
    narrow = x.bfloat16()
    assert not same(out, gated_rms_norm(narrow, z, w, EPS))
    assert same(
        gated_rms_norm(narrow.float(), z, w, EPS, wide=True), gated_rms_norm(narrow, z, w, EPS)
    )


def test_wide_rows_have_wide_gradients_and_no_other_dtype_is_taken():
    _, z, w = operands(9, 64, 1)
    x = samples.fp32((9, 64), 4, -3, 3).requires_grad_()
    grad = samples.bf16((9, 64), 5, -3, 3)
    gated_rms_norm(x, z, w, EPS, wide=True).backward(grad)
    x64 = x.detach().double().requires_grad_()
    truth(x64, z.double(), w.double()).backward(grad.double())
    assert x.grad.dtype == torch.float32
    assert (x.grad - x64.grad).abs().max() <= x64.grad.abs().max() * 1e-5
    for wrong in (x.bfloat16(), x.double()):
        with pytest.raises(Refused, match="SB0420"):
            gated_rms_norm(wrong, z, w, EPS, wide=True)
