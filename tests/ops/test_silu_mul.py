"""silu_mul: bits against the reference, invariance to everything but the element, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import bits
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.silu_mul import reference, silu_mul


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bits.compare(left, right).equal


@pytest.mark.parametrize("low,high", [(-4, 4), (-126, -90), (-60, 8), (3, 9), (60, 127)])
def test_bits_equal_the_reference(low, high):
    x = samples.bf16((9, 2 * 301), 1, low, high)
    x[0, :4] = torch.tensor([0.0, -0.0, torch.inf, 2.0**-130])
    x[0, 301:305] = torch.tensor([-1.0, 1.0, 2.0, 4.0])
    assert same(silu_mul(x), reference.silu_mul(x))


def test_enough_elements_to_show_every_fp32_rounding():
    # One fp32 rounding more or less reaches bf16 about once in 2**17 elements.
    x = samples.bf16((1000, 2 * 1000), 1, -3, 3)
    assert same(silu_mul(x), reference.silu_mul(x))


def test_every_gate_value_equals_the_reference_and_is_right():
    gate = torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite()]
    up = torch.full_like(gate, 1.5)
    out = silu_mul(torch.cat([gate, up]))
    assert same(out, reference.silu_mul(torch.cat([gate, up])))
    truth = torch.nn.functional.silu(gate.double()) * 1.5
    normal = (truth.abs() > 2.0**-126) & (truth < 3e38) & (gate > -87)
    assert ((out.double() - truth).abs() <= truth.abs() * 2**-8)[normal].all()
    assert out[gate < -89].abs().max() == 0
    zero = silu_mul(torch.tensor([-0.0, 0.0, 1.0, 1.0]).bfloat16())
    assert bits.int_view(zero).tolist() == [0x8000, 0]


def test_infinite_and_nan_gates_stay_visible():
    out = silu_mul(torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0, 1.0, 1.0]).bfloat16())
    assert out[0] == torch.inf and out[1:].isnan().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_an_element_alone_equals_the_element_in_a_batch(threads):
    x = samples.bf16((64, 2 * 1000), 1, -9, 6)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = silu_mul(x)
    finally:
        torch.set_num_threads(before)
    gate, up = x.chunk(2, dim=1)
    for row in (0, 31, 63):
        alone = [silu_mul(torch.stack([gate[row, j], up[row, j]])) for j in range(1000)]
        assert same(whole[row], torch.cat(alone))
    assert same(whole[7:9], silu_mul(x[7:9]))


def test_strided_input_equals_a_contiguous_copy():
    x = samples.bf16((40, 7), 1).t()
    assert not x.is_contiguous()
    assert same(silu_mul(x), silu_mul(x.clone(memory_format=torch.contiguous_format)))


def test_gradient_matches_float64():
    x, g = samples.bf16((5, 2 * 83), 1, -5, 4).requires_grad_(), samples.bf16((5, 83), 2, -3, 3)
    silu_mul(x).backward(g)
    x64 = x.detach().double().requires_grad_()
    gate, up = x64.chunk(2, dim=-1)
    (torch.nn.functional.silu(gate) * up).backward(g.double())
    error = (x.grad.double() - x64.grad).abs()
    assert x.grad.dtype == torch.bfloat16
    assert (error <= x64.grad.abs() * 2**-8 + g.abs().max().item() * 2**-20).all()


def test_refusals():
    for x, key in (
        (torch.ones(2, 8), "SB0420"),
        (torch.ones(2, 7).bfloat16(), "SB0421"),
        (torch.ones(()).bfloat16(), "SB0421"),
    ):
        with pytest.raises(Refused, match=key):
            silu_mul(x)


def test_probe_and_served_count():
    registry.reset_served()
    silu_mul(torch.ones(3, 2, 8).bfloat16())
    assert registry.served() == {"act.silu_mul": 6}
    bound = registry.implementations()["act.silu_mul"]
    assert bound.probe() == bound.probe() != 0 and len(bound.content_hash()) == 64


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 70),
    low=st.integers(-126, 120),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_range_equals_the_reference(rows, width, low, seed):
    x = samples.bf16((rows, 2 * width), seed, low, low + 6)
    assert same(silu_mul(x), reference.silu_mul(x))
