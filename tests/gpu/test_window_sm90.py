"""Windowed attention on Hopper: the law anywhere; the bit gates on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from test_attention_sm90 import SCALE, operands

from samebits.bench import gpu_public, gpu_window, pages
from samebits.bench.gpu_public import Area
from samebits.errors import Different
from samebits.ops.attention import reference_sm90 as whole
from samebits.ops.window_attention import reference_sm90 as law

AT = torch.tensor([0, 5, 62, 63, 127, 128, 255, 256, 299, 383, 511, 512, 599])


@pytest.fixture
def on_cpu(monkeypatch):
    """Both laws with torch's 2**x in place of the chip's instruction."""
    for module in (law, whole):
        monkeypatch.setattr(module, "ex2", torch.exp2)


@pytest.mark.parametrize("window", [1, 16, 63, 256, 257])
def test_the_law_is_windowed_attention(on_cpu, window):
    q, k, v = operands(600)
    y = law.attend(q[AT], k, v, AT, SCALE, window)
    behind = AT[:, None] - torch.arange(600)[None]
    s = (q[AT].double() @ k.double().T * SCALE).masked_fill(
        (behind < 0) | (behind >= window), -torch.inf
    )
    exact = s.softmax(-1) @ v.double()
    assert (y - exact).abs().max() < 2**-7 * exact.abs().max()
    for other in (window - 1, window + 1):
        assert not torch.equal(y[-1], law.attend(q[AT], k, v, AT, SCALE, other)[-1])


def test_a_window_that_is_long_enough_is_the_law_of_attention(on_cpu):
    q, k, v = operands(600)
    full = whole.attend(q[AT], k, v, AT, SCALE)
    assert torch.equal(law.attend(q[AT], k, v, AT, SCALE, 600), full)
    some = law.attend(q[AT], k, v, AT, SCALE, 300)
    assert torch.equal(some[AT < 300], full[AT < 300])
    assert not (some[AT >= 300] == full[AT >= 300]).all(1).any()


@pytest.mark.parametrize("window", [1, 63, 257])
def test_partitions_before_the_window_change_no_bit(on_cpu, window):
    # Beside a row at position 0 every partition is walked; alone, from the window's first one.
    q, k, v = operands(600)
    together = law.attend(q[AT], k, v, AT, SCALE, window)
    for i in (8, 11, 12):
        row = slice(i, i + 1)
        alone = law.attend(q[AT[row]], k, v, AT[row], SCALE, window)
        assert torch.equal(alone, together[row])
        dropped = max(0, int(AT[i]) - window + 1) // 256 * 256
        cut = law.attend(q[AT[row]], k[dropped:], v[dropped:], AT[row] - dropped, SCALE, window)
        assert torch.equal(cut, together[row])


def test_partitions_counted_from_the_window_have_other_bits(on_cpu):
    q, k, v = operands(600)
    at, window = torch.tensor([599]), 300
    y = law.attend(q[at], k, v, at, SCALE, window)
    first = 600 - window
    assert first % 256 and first % 128
    assert not torch.equal(y, law.attend(q[at], k[first:], v[first:], at - first, SCALE, window))


def finished(name: str, checks: int, *wrong: str) -> Area:
    area = Area(name)
    area.checks, area.elements, area.wrong, area.notes = checks, 8 * checks, list(wrong), ["a note"]
    return area


def test_what_differs_in_any_process_turns_the_gate_red(monkeypatch):
    areas = [finished("heads_of_64", 3), finished("public", 2)]
    monkeypatch.setattr(gpu_window, "isolated", lambda checks, limit: iter(areas))
    first, second = gpu_window.gates()
    assert "3 comparisons, 24 elements, 0 differ" in first and "a note" in second
    for other in (finished("gradients", 4, "dq: 1 of 32 elements differ"), finished("idle", 0)):
        areas[1:] = [other]
        with pytest.raises(Different) as caught:
            list(gpu_window.gates())
        assert other.name in caught.value.seen


def test_rows_have_a_table_of_their_own():
    assert pages.windowed([]) == "Not measured."
    row = {
        "unit": "us", "hardware": "a GPU", "date": "2026-01-02", "ratio": 1.5, "target": 1.25,
        "met": False, "work": "windowed attention decode", "ours": 3.0, "against": {"name": "FA3"},
    }  # fmt: skip
    assert "| windowed attention decode | 3.0 us | 1.25 | **1.50** |" in pages.windowed([row])
    assert "windowed" not in pages.attention([row | {"work": "attention decode"}, row])


@pytest.mark.gpu
@pytest.mark.parametrize("check", gpu_window.CHECKS)
def test_gate(check):
    area = gpu_public.run(check)
    assert area.checks and not area.wrong
