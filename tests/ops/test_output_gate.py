"""output_gate: bits against the reference, invariance to everything but the element, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import bits
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.output_gate import output_gate, reference


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bits.compare(left, right).equal


@pytest.mark.parametrize("low,high", [(-4, 4), (-126, -90), (-60, 8), (3, 9), (60, 127)])
def test_bits_equal_the_reference(low, high):
    x, gate = samples.bf16((9, 301), 1, low, high), samples.bf16((9, 301), 2, -9, 8)
    x[0, :3] = torch.tensor([-0.0, 0.0, 2.0**-130])
    assert same(output_gate(x, gate), reference.output_gate(x, gate))


def test_enough_elements_to_show_every_fp32_rounding():
    # One fp32 rounding more or less reaches bf16 about once in 2**17 elements.
    x, gate = samples.bf16((1000, 1000), 1, -3, 3), samples.bf16((1000, 1000), 2, -5, 4)
    assert same(output_gate(x, gate), reference.output_gate(x, gate))


def test_every_gate_value_equals_the_reference_and_is_right():
    gate = torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite()]
    x = torch.full_like(gate, -1.5)
    out = output_gate(x, gate)
    assert same(out, reference.output_gate(x, gate))
    truth = -1.5 * gate.double().sigmoid()
    fair = gate > -87
    assert ((out.double() - truth).abs() <= truth.abs() * 2**-8)[fair].all()
    assert (bits.int_view(out)[(gate < -89).numpy()] == 0x8000).all()


def test_infinite_and_nan_gates_stay_visible():
    gate = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0]).bfloat16()
    out = output_gate(torch.tensor([2.0, 2.0, 2.0, torch.nan]).bfloat16(), gate)
    assert out[:2].tolist() == [2, 0] and out[2:].isnan().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_an_element_alone_equals_the_element_in_a_batch(threads):
    x, gate = samples.bf16((64, 1000), 1, -9, 6), samples.bf16((64, 1000), 2, -9, 6)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = output_gate(x, gate)
    finally:
        torch.set_num_threads(before)
    for row in (0, 31, 63):
        alone = [output_gate(x[row, j : j + 1], gate[row, j : j + 1]) for j in range(1000)]
        assert same(whole[row], torch.cat(alone))
    assert same(whole[7:9], output_gate(x[7:9], gate[7:9]))


def test_strided_inputs_equal_contiguous_copies():
    x, gate = samples.bf16((40, 14), 1).chunk(2, dim=1)
    assert not x.is_contiguous() and not gate.is_contiguous()
    assert same(output_gate(x, gate), output_gate(x.clone(), gate.clone()))


def test_gradients_match_float64():
    x, gate = samples.bf16((5, 83), 1, -3, 3), samples.bf16((5, 83), 2, -5, 4)
    g = samples.bf16((5, 83), 3, -3, 3)
    x.requires_grad_(), gate.requires_grad_()
    out = output_gate(x, gate)
    assert same(out, reference.output_gate(x.detach(), gate.detach()))
    out.backward(g)
    x64, gate64 = (t.detach().double().requires_grad_() for t in (x, gate))
    (x64 * gate64.sigmoid()).backward(g.double())
    for got, want in ((x.grad, x64.grad), (gate.grad, gate64.grad)):
        assert got.dtype == torch.bfloat16
        assert ((got.double() - want).abs() <= want.abs() * 2**-8 + 2**-18).all()


def test_refusals():
    x = torch.ones(2, 8).bfloat16()
    for args, key in (
        ((x.float(), x), "SB0420"),
        ((x, x.float()), "SB0420"),
        ((x, x[:1]), "SB0421"),
        ((x, x[:, :4]), "SB0421"),
        ((x[0, 0], x[0, 0]), "SB0421"),
    ):
        with pytest.raises(Refused, match=key):
            output_gate(*args)


def test_no_rows_give_no_rows():
    empty = torch.empty(0, 8).bfloat16()
    assert output_gate(empty, empty).shape == (0, 8)


def test_probe_and_served_count():
    registry.reset_served()
    output_gate(torch.ones(3, 8).bfloat16(), torch.ones(3, 8).bfloat16())
    assert registry.served() == {"attention.gate": 3}
    bound = registry.implementations()["attention.gate"]
    assert bound.probe() == bound.probe() != 0 and len(bound.content_hash()) == 64


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 70),
    low=st.integers(-126, 120),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_range_equals_the_reference(rows, width, low, seed):
    x = samples.bf16((rows, width), seed, low, low + 6)
    gate = samples.bf16((rows, width), seed + 1, -9, 7)
    assert same(output_gate(x, gate), reference.output_gate(x, gate))
