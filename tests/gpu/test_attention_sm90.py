"""Attention on Hopper: the law and the refusals anywhere; the bit gates on a GPU."""

from __future__ import annotations

import pytest
import torch

from samebits.errors import Refused
from samebits.ops import samples

pytest.importorskip("triton")

from samebits.bench import gpu, gpu_attention
from samebits.ops.attention import reference_sm90 as law
from samebits.ops.attention import triton as attention

SCALE = 64**-0.5


@pytest.fixture
def on_cpu(monkeypatch):
    """The law with torch's 2**x in place of the chip's instruction."""
    monkeypatch.setattr(law, "ex2", torch.exp2)


def operands(keys: int):
    return tuple(samples.bf16((keys, 64), seed, -4, 2) for seed in (1, 2, 3))


def softmax(q, k, v, position):
    s = (q.double() @ k.double().T) * SCALE
    s.masked_fill_(torch.arange(len(k))[None] > position[:, None], -torch.inf)
    return s.softmax(-1) @ v.double()


def test_the_law_is_causal_attention(on_cpu):
    q, k, v = operands(300)
    at = torch.tensor([0, 5, 127, 128, 255, 256, 299])
    y = law.attend(q[at], k, v, at, SCALE)
    exact = softmax(q[at], k, v, at)
    assert (y - exact).abs().max() < 2**-7 * exact.abs().max()
    assert not torch.equal(y[-1], law.attend(q[at], k, v, at - (at > 0) * 1, SCALE)[-1])


def test_a_row_of_the_law_sees_neither_rows_nor_keys_after_it(on_cpu):
    q, k, v = operands(300)
    at = torch.tensor([3, 130, 299])
    whole = law.attend(q[at], k, v, at, SCALE)
    alone = law.attend(q[130:131], k[:131], v[:131], at[1:2], SCALE)
    assert torch.equal(whole[1:2], alone)


def test_no_negative_zero_comes_out(on_cpu):
    # The second partition's negative sum, scaled to the first one's maximum, rounds to -0.
    early = (torch.arange(300) < 256)[:, None]
    k = torch.where(early, 2.0, -2.0).expand(300, 64).bfloat16()
    v = torch.where(early, 0.0, -(2.0**-133)).expand(300, 64).bfloat16()
    y = law.attend(k[:1] / 2, k, v, torch.tensor([299]), SCALE)
    assert (y == 0).all() and not y.signbit().any()


@pytest.mark.parametrize(
    "change",
    [{"size": 96}, {"heads": 5}, {"key_heads": 0}, {"page": 24}, {"scale": 0.0}, {"heads": 130}],
)
def test_geometry_that_no_gate_covers_is_refused(change):
    fits = {"heads": 32, "key_heads": 2, "size": 128, "page": 16, "scale": SCALE}
    attention.require_geometry(**fits)
    with pytest.raises(Refused, match="SB0414"):
        attention.require_geometry(**(fits | change))


def test_rows_measured_again_replace_old_ones_and_no_others():
    def row(work: str, name: str, ours: int):
        return {"work": work, "against": {"name": name}, "ours": ours}

    old = [row("a", "x", 1), row("a", "y", 2), row("b", "x", 3)]
    assert gpu.merged(old, [row("a", "x", 9)]) == [*old[1:], row("a", "x", 9)]


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["law", "views", "lengths"])
def test_gate(gate):
    assert "0 differ" in getattr(gpu_attention, f"gate_{gate}")()
