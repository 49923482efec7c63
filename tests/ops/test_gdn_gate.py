"""gdn_gate: bits against the reference, invariance to everything but the element, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import bits
from samebits.errors import Refused
from samebits.ops import gdn_gate, registry, samples
from samebits.ops.gdn_gate import reference


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bits.compare(left, right).equal


def operands(tokens: int, heads: int, seed: int, low: int = -6, high: int = 5):
    a, b = (samples.bf16((tokens, heads), seed + i, low, high) for i in range(2))
    return (
        a,
        b,
        samples.fp32((heads,), seed + 2, -2, 2),
        samples.bf16((heads,), seed + 3, -3, 2),
    )


def truth(a, b, A_log, dt_bias):
    t = a + dt_bias
    return -A_log.exp() * torch.nn.functional.softplus(t, threshold=1000), b.sigmoid()


@pytest.mark.parametrize("low,high", [(-4, 4), (-126, -90), (-60, 8), (3, 9), (60, 126)])
def test_bits_equal_the_reference(low, high):
    inputs = operands(50, 9, 1, low, high)
    inputs[0][0, :3], inputs[1][0, :2] = torch.tensor([-0.0, 20.0, 20.125]), -0.0
    for got, want in zip(gdn_gate.gate(*inputs), reference.gate(*inputs), strict=True):
        assert got.dtype == torch.float32 and same(got, want)


def test_every_input_equals_the_reference_and_is_right():
    every = torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite() & (every.abs() < 1e30)][:, None].repeat(1, 2)
    inputs = every, every, torch.tensor([-1.5, 2.7]), torch.tensor([0.0, -4.5]).bfloat16()
    (g, beta), law = gdn_gate.gate(*inputs), reference.gate(*inputs)
    assert same(g, law[0]) and same(beta, law[1])
    # The sum of a and dt_bias is rounded to fp32 first; that is part of the schedule.
    t = (every.float() + inputs[3].float()).double()
    g64, beta64 = truth(t, every.double(), inputs[2].double(), 0 * inputs[3].double())
    fair = t > -80
    assert ((g.double() - g64).abs() <= g64.abs() * 5 * 2**-24)[fair].all()
    fair = every > -80
    assert ((beta.double() - beta64).abs() <= beta64.abs() * 3 * 2**-24)[fair].all()
    assert (g <= 0).all() and (beta >= 0).all() and (beta <= 1).all()


def test_infinite_and_nan_inputs_stay_visible():
    a = torch.tensor([[torch.inf, -torch.inf, torch.nan]]).bfloat16()
    g, beta = gdn_gate.gate(a, a, torch.zeros(3), torch.zeros(3).bfloat16())
    assert g[0, 0] == -torch.inf and g[0, 1] == 0 and g[0, 2].isnan()
    assert beta[0, :2].tolist() == [1, 0] and beta[0, 2].isnan()
    one = torch.ones(1, 3).bfloat16()
    g, _ = gdn_gate.gate(one, one, torch.tensor([torch.nan, torch.inf, -torch.inf]), one[0])
    assert g[0, 0].isnan() and g[0, 1] == -torch.inf and g[0, 2] == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_an_element_alone_equals_the_element_in_a_batch(threads):
    inputs = operands(3000, 5, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = torch.stack(gdn_gate.gate(*inputs))
    finally:
        torch.set_num_threads(before)
    a, b, A_log, dt_bias = inputs
    for i in (0, 1499, 1500, 2999):
        for h in range(5):
            at = slice(i, i + 1), slice(h, h + 1)
            alone = gdn_gate.gate(a[at], b[at], A_log[at[1]], dt_bias[at[1]])
            assert same(whole[:, i, h], torch.stack(alone)[:, 0, 0])


def test_strided_inputs_equal_contiguous_copies():
    _, _, A_log, dt_bias = operands(1, 5, 1)
    ba = samples.bf16((40, 10), 7, -6, 4)
    b, a = ba.chunk(2, dim=1)
    assert not a.is_contiguous()
    got, want = (
        gdn_gate.gate(a, b, A_log, dt_bias),
        gdn_gate.gate(a.clone(), b.clone(), A_log, dt_bias),
    )
    assert same(got[0], want[0]) and same(got[1], want[1])


def test_gradients_match_float64():
    inputs = operands(30, 5, 1)
    inputs[0][:4] = 40.0  # above the linear threshold
    dg, dbeta = samples.fp32((30, 5), 8, -2, 2), samples.fp32((30, 5), 9, -2, 2)
    for x in inputs:
        x.requires_grad_()
    out = gdn_gate.gate(*inputs)
    law = reference.gate(*(x.detach() for x in inputs))
    assert same(out[0], law[0]) and same(out[1], law[1])
    torch.autograd.backward(out, (dg, dbeta))
    wide = [x.detach().double().requires_grad_() for x in inputs]
    torch.autograd.backward(truth(*wide), (dg.double(), dbeta.double()))
    for x, x64 in zip(inputs, wide, strict=True):
        size = 2**-8 if x.dtype == torch.bfloat16 else 2**-20
        assert x.grad.dtype == x.dtype
        assert (x.grad.double() - x64.grad).abs().max() <= x64.grad.abs().max() * size


def test_one_output_alone_may_carry_the_gradient():
    inputs = operands(4, 3, 1)
    inputs[1].requires_grad_()
    gdn_gate.gate(*inputs)[1].sum().backward()
    assert inputs[1].grad.abs().min() > 0


def test_refusals():
    a, b, A_log, dt_bias = operands(4, 3, 1)
    for args, key in (
        ((a.float(), b, A_log, dt_bias), "SB0420"),
        ((a, b.float(), A_log, dt_bias), "SB0420"),
        ((a, b, A_log.bfloat16(), dt_bias), "SB0420"),
        ((a, b, A_log, dt_bias.float()), "SB0420"),
        ((a[0], b, A_log, dt_bias), "SB0421"),
        ((a, b[:3], A_log, dt_bias), "SB0421"),
        ((a, b, A_log[:2], dt_bias), "SB0421"),
        ((a, b, A_log, dt_bias[:1]), "SB0421"),
        ((a[:, :0], b[:, :0], A_log[:0], dt_bias[:0]), "SB0421"),
    ):
        with pytest.raises(Refused, match=key):
            gdn_gate.gate(*args)


def test_no_tokens_give_no_tokens():
    a, b, A_log, dt_bias = operands(4, 3, 1)
    assert [x.shape for x in gdn_gate.gate(a[:0], b[:0], A_log, dt_bias)] == [(0, 3), (0, 3)]


def test_probe_and_served_count():
    registry.reset_served()
    gdn_gate.gate(*operands(4, 3, 1))
    assert registry.served() == {"gdn.gate": 4}
    bound = registry.implementations()["gdn.gate"]
    assert bound.probe() == bound.probe() != 0 and len(bound.content_hash()) == 64


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 5),
    heads=st.integers(1, 40),
    low=st.integers(-126, 110),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_range_equals_the_reference(tokens, heads, low, seed):
    inputs = operands(tokens, heads, seed, low, low + 6)
    got, want = gdn_gate.gate(*inputs), reference.gate(*inputs)
    assert same(got[0], want[0]) and same(got[1], want[1])
