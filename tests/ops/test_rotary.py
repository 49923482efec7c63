"""rotary: table entries, bits against the reference, invariance to everything but the token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import bits
from samebits.errors import Refused
from samebits.ops import registry, rotary, samples
from samebits.ops.rotary import reference


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bits.compare(left, right).equal


def test_table_entries_are_scalar_float64_rounded_once():
    table = rotary.table(4100, 20, 10000.0)
    assert table.shape == (4100, 20) and table.dtype == torch.float32
    for p in (0, 1, 17, 4095, 4099):
        for i in range(10):
            want = torch.tensor(reference.entry(p, i, 20, 10000.0), dtype=torch.float64).float()
            assert same(table[p, [i, 10 + i]], want)
    assert rotary.table(4100, 20, 10000) is table
    assert same(table[:64], rotary.table(64, 20, 10000.0))  # its length does not move an entry


@pytest.mark.parametrize("low,high", [(-4, 4), (-126, -100), (-60, 60), (100, 126)])
@pytest.mark.parametrize("width,turned", [(64, 64), (26, 20), (7, 2)])
def test_bits_equal_the_reference(width, turned, low, high):
    x, positions = samples.bf16((33, 3, width), 1, low, high), torch.arange(33) * 29 % 500
    x[0], x[1, :, ::2] = -0.0, torch.tensor(2.0**-130).bfloat16()
    out = rotary.apply(x, positions, rotary.table(500, turned, 1e4))
    assert same(out, reference.apply(x, positions, turned, 1e4))


def test_enough_elements_to_show_every_fp32_rounding():
    # One fp32 rounding more or less reaches bf16 about once in 2**17 elements.
    x, positions = samples.bf16((20, 1000, 64), 1, -2, 2), torch.arange(20) * 97
    out = rotary.apply(x, positions, rotary.table(2000, 64, 1e4))
    assert same(out, reference.apply(x, positions, 64, 1e4))


def test_values_are_right_and_only_the_turned_dimensions_move():
    x, positions = samples.bf16((50, 2, 26), 1, -4, 4), torch.arange(50) * 40
    out = rotary.apply(x, positions, rotary.table(2000, 20, 1e4))
    for t in (1, 49):
        for i in range(10):
            angle = positions[t].item() * 1e4 ** (-i / 10)
            z = complex(x[t, 1, i], x[t, 1, 10 + i]) * complex(math.cos(angle), math.sin(angle))
            got = complex(out[t, 1, i], out[t, 1, 10 + i])
            assert abs(got - z) <= abs(z) * 2**-8
    assert same(out[..., 20:], x[..., 20:]) and same(out[0], x[0])
    assert (out[1:, :, :20] != x[1:, :, :20]).any(dim=(0, 1)).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_alone_equals_the_token_in_a_batch(threads):
    table = rotary.table(600, 64, 1e4)
    x, positions = samples.bf16((200, 9, 64), 1), torch.arange(200) * 37 % 600
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = rotary.apply(x, positions, table)
    finally:
        torch.set_num_threads(before)
    rows = [rotary.apply(x[i : i + 1], positions[i : i + 1], table) for i in range(200)]
    assert same(whole, torch.cat(rows))
    assert same(whole[:, 4:5], rotary.apply(x[:, 4:5].contiguous(), positions, table))


def test_strided_views_equal_contiguous_copies():
    table, qkv = rotary.table(64, 16, 1e4), samples.bf16((20, 100), 1)
    x, positions = qkv[:, 4:68].unflatten(1, (4, 16)), torch.arange(40)[::2]
    assert not x.is_contiguous() and not positions.is_contiguous()
    assert same(
        rotary.apply(x, positions, table), rotary.apply(x.clone(), positions.clone(), table)
    )


def test_gradient_matches_float64():
    table, positions = rotary.table(64, 20, 1e4), torch.arange(9) * 7
    x, g = samples.bf16((9, 3, 26), 1, -2, 2).requires_grad_(), samples.bf16((9, 3, 26), 2, -2, 2)
    rotary.apply(x, positions, table).backward(g)
    x64 = x.detach().double().requires_grad_()
    cos, sin = table[positions].double()[:, None].chunk(2, dim=-1)
    x1, x2, rest = x64.split([10, 10, 6], dim=-1)
    torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], -1).backward(g.double())
    assert x.grad.dtype == torch.bfloat16
    assert (x.grad.double() - x64.grad).abs().max() <= x64.grad.abs().max() * 2**-8


@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "linear", "factor": 2.0}, {"type": "yarn"}, {"factor": 2.0}, {"mystery": 1}],
)
def test_unknown_scaling_is_refused(scaling):
    with pytest.raises(Refused, match="SB0424"):
        rotary.table(64, 16, 1e4, scaling)


def test_default_scaling_is_no_scaling():
    plain = rotary.table(64, 16, 1e4)
    assert rotary.table(64, 16, 1e4, {"rope_type": "default", "rope_theta": 1e4}) is plain


def test_refusals():
    table = rotary.table(64, 16, 1e4)
    x, p = torch.ones(2, 1, 16).bfloat16(), torch.tensor([0, 1])
    for args, key in (
        ((x.float(), p, table), "SB0420"),
        ((x, p.int(), table), "SB0420"),
        ((x, p, table.double()), "SB0420"),
        ((x[0], p, table), "SB0421"),
        ((x[..., :8], p, table), "SB0421"),
        ((x, p[:1], table), "SB0421"),
        ((x, torch.tensor([0, 64]), table), "SB0425"),
        ((x, torch.tensor([-1, 0]), table), "SB0425"),
    ):
        with pytest.raises(Refused, match=key):
            rotary.apply(*args)
    with pytest.raises(Refused, match="SB0421"):
        rotary.table(64, 15, 1e4)
    with pytest.raises(Refused, match="SB0424"):
        rotary.table(64, 16, 1e4, {"rope_type": "default", "rope_theta": 5e5})


def test_no_tokens_give_no_tokens():
    table = rotary.table(64, 16, 1e4)
    empty = torch.empty(0, 2, 16).bfloat16()
    assert rotary.apply(empty, torch.empty(0, dtype=torch.int64), table).shape == (0, 2, 16)


def test_probe_and_served_count():
    registry.reset_served()
    table = rotary.table(64, 16, 1e4)
    rotary.apply(torch.ones(3, 2, 16).bfloat16(), torch.arange(3), table)
    assert registry.served() == {"rope": 3}
    bound = registry.implementations()["rope"]
    assert bound.probe() == bound.probe() != 0 and len(bound.content_hash()) == 64


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 5),
    half=st.integers(1, 20),
    rest=st.integers(0, 5),
    low=st.integers(-126, 110),
    seed=st.integers(0, 10**6),
)
def test_any_shape_and_range_equals_the_reference(tokens, half, rest, low, seed):
    x = samples.bf16((tokens, 2, 2 * half + rest), seed, low, low + 6)
    positions = torch.arange(tokens) * 61 % 300
    out = rotary.apply(x, positions, rotary.table(300, 2 * half, 5e5))
    assert same(out, reference.apply(x, positions, 2 * half, 5e5))
