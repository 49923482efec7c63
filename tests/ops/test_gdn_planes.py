"""Planes of a boundary state on sm90: fp32 values come back bit by bit, exact ties too.

The kernels that split and join are gated on a GPU (`samebits.bench.gpu_gdn`, which counts ties);
here is the definition that the gate reads states by.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from samebits.ops import gdn
from samebits.ops.gdn import triton as kernels

HEADS, K, V = 2, 32, 64


def planes(h: torch.Tensor) -> list[torch.Tensor]:
    """[slots, HV, K, V] fp32 in the planes of `state_spec`, one element at a time in integers."""
    high = h.bfloat16()
    rest = h.view(torch.int32).long() - (high.view(torch.int16).long() << 16)
    ties = (rest == 1 << 15).int().unflatten(3, (-1, 8)) << torch.arange(8)
    wrapped = (rest + (1 << 15)) % (1 << 16) - (1 << 15)
    return [high, wrapped.short(), ties.sum(3 + 1).to(torch.uint8).view(torch.int8)]


def hostile() -> torch.Tensor:
    """Every sign and exponent with low halves around a tie, on even and odd high halves."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    high = torch.arange(0, 1 << 16, 31)
    high = high[(high & 0x7F80) != 0x7F80]  # finite
    bits = ((high[:, None] << 16) + low).flatten()
    bits = torch.cat([bits, torch.tensor([0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x80000000])])
    count = HEADS * K * V
    bits = torch.cat([bits, torch.zeros(-len(bits) % count, dtype=torch.int64)])
    return bits.int().view(torch.float32).reshape(-1, HEADS, K, V)


def test_every_value_comes_back():
    h = hostile()
    state = planes(h)
    spec = gdn.state_spec("chunk_row", 1, HEADS, K, V, "sm90")[:3]
    assert [(tuple(x.shape[1:]), x.dtype) for x in state] == [s[1:] for s in spec]
    assert torch.equal(kernels.boundary(state).view(torch.int32), h.view(torch.int32))
    assert torch.equal(state[0].view(torch.int16), h.bfloat16().view(torch.int16))


def test_ties_need_their_bit():
    h = hostile()
    high, rest, ties = planes(h)
    assert ties.any()
    without = kernels.boundary([high, rest, torch.zeros_like(ties)])
    wrong = without.view(torch.int32) != h.view(torch.int32)
    even = (h.view(torch.int32) & 0x1FFFF) == 0x8000  # rounded down to an even high half
    assert torch.equal(wrong, even) and even.sum() > 100


def test_a_nan_stays_one():
    h = torch.full((1, HEADS, K, V), torch.nan)
    h.view(torch.int32)[0, 0, 0, :4] = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001]).int()
    assert kernels.boundary(planes(h)).isnan().all()
