"""Hopper kernels: the law's own arithmetic and the refusals anywhere; the bit gates on a GPU."""

from __future__ import annotations

import math
import re
import stat
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from samebits.errors import Different, NotObserved, Refused
from samebits.ops import gpu, samples
from samebits.ops.gemm import reference_sm90
from samebits.plan import ReductionPlan

pytest.importorskip("triton")

from samebits.bench import gpu_gates
from samebits.ops.gemm import admission_sm90 as admission
from samebits.ops.gemm import triton as gemm


def cut(value: Fraction, last: int) -> Fraction:
    """`value` toward zero to a multiple of 2**last."""
    unit = Fraction(2) ** last
    return math.trunc(value / unit) * unit


def exponent(value: Fraction) -> int:
    """floor(log2 |value|)."""
    found = abs(value).numerator.bit_length() - abs(value).denominator.bit_length()
    return found if abs(value) >= Fraction(2) ** found else found - 1


def exact_step(x: list[float], w: list[float], c: float) -> float:
    """One MMA in rational arithmetic, from the words of the law alone."""
    terms = []
    for a, b in zip(x, w, strict=True):
        if a and b:
            # Normal operands: the exponent of a product is the sum of its operands' exponents.
            top = exponent(Fraction(a)) + exponent(Fraction(b))
            terms.append((top, Fraction(a) * Fraction(b)))
    if c:
        terms.append((max(exponent(Fraction(c)), -126), Fraction(c)))
    if not terms:
        return 0.0
    largest = max(top for top, _ in terms)
    total = sum((cut(value, largest - 25) for _, value in terms), Fraction(0))
    if not total:
        return 0.0
    return float(cut(total, max(exponent(total) - 23, -149)))


@pytest.mark.parametrize("span", [(-3, 3), (-30, 30), (-72, -62)])
def test_step_is_the_arithmetic_the_law_describes(span):
    x = samples.bf16((4, 16), 1, *span)
    w = samples.bf16((5, 16), 2, *span)
    x[0, :8] = 0
    c = samples.fp32((4, 5), 3, max(-126, 2 * span[0]), 2 * span[1])
    c[1] = 0
    y = reference_sm90.step(x, w, c)
    exact = [
        [exact_step(a.tolist(), b.tolist(), float(c[i, j])) for j, b in enumerate(w.float())]
        for i, a in enumerate(x.float())
    ]
    assert torch.equal(y, torch.tensor(exact, dtype=torch.float64).float())
    assert not torch.equal(y.double(), c.double() + x.double() @ w.double().T)  # it does cut


def test_a_leaf_is_a_chain_of_sixteens_with_a_padded_tail():
    x, w = samples.bf16((2, 40), 6), samples.bf16((3, 40), 7)
    exact = []
    for a in x.float():
        for b in w.float():
            c = 0.0
            for k in (0, 16, 32):
                c = exact_step(a[k : k + 16].tolist(), b[k : k + 16].tolist(), c)
            exact.append(c)
    y = reference_sm90.leaf(x, w)
    assert torch.equal(y, torch.tensor(exact, dtype=torch.float64).float().view(2, 3))


def test_leaves_are_folded_by_the_plan():
    x, w = samples.bf16((2, 64), 4), samples.bf16((3, 64), 5)
    a, b, c, d = (reference_sm90.leaf(x[:, i : i + 16], w[:, i : i + 16]) for i in range(0, 64, 16))
    y = reference_sm90.accumulate(x, w, ReductionPlan(4))
    assert torch.equal(y, (a + b) + (c + d))
    assert not torch.equal(y, ((a + b) + c) + d)


def fits(tile: gemm.Tile, k: int, leaves: int) -> bool:
    """Whether a tile's steps end where leaves do, or with one leaf beyond the row, and its
    subtrees cover the leaves."""
    return (
        (leaves == 1 or (k // leaves) % tile.bk == 0)
        and (tile.kind == "tiles" or leaves % tile.inner == 0 < leaves - tile.inner)
        and (tile.kind != "serial" or bool(tile.parts in (2, 4) and tile.blocks and not tile.swap))
    )


def test_every_pinned_tile_divides_its_leaf_and_ranges_ascend():
    assert gemm.table()
    for (n, k, leaves, _), tiles in gemm.table().items():
        assert [t.rows for t in tiles] == sorted({t.rows for t in tiles})
        assert n % 8 == 0 == k % 8
        assert all(fits(tile, k, leaves) for tile in tiles)
        assert gemm.tile_for(1, (n, k, leaves, torch.int8)) is None


@pytest.mark.parametrize(
    "k, leaves", [(576, 1), (576, 2), (1536, 2), (40, 1), (8 * 48, 8), (64, 4)]
)
def test_every_unpinned_tile_divides_its_leaf_and_ranges_cover_all_rows(k, leaves):
    tiles = admission.tiles_of((960, k, leaves, torch.bfloat16))
    assert [t.rows for t in tiles] == sorted({t.rows for t in tiles})
    assert tiles[-1].rows >= 1 << 24
    assert all(fits(tile, k, leaves) and tile.bk >= 16 for tile in tiles)
    tested = admission.rows_of(tiles, 960, 132)
    assert [tile for tile in tiles if tile not in [t for t, _ in tested]] == []
    low = 1
    for tile in tiles:
        rows = [m for t, m in tested if t == tile]
        assert min(rows) == low and any(m % tile.bm for m in rows)
        low = tile.rows + 1


@pytest.mark.parametrize("k, leaves", [(4100, 1), (576, 4 * 8), (8 * 40, 8), (36, 1)])
def test_a_shape_that_no_tile_can_compute_is_refused(k, leaves):
    with pytest.raises(Refused, match="SB0453"):
        admission.tiles_of((64, k, leaves, torch.bfloat16))


def test_a_shape_met_during_a_capture_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(Refused, match="SB0454"):
        admission.admit(960, 576, 1)
    assert admission.admitted() == ()


@pytest.mark.parametrize("release, accepted", [("12.8", False), ("12.9", True), ("13.0", True)])
def test_an_old_assembler_is_refused(tmp_path: Path, monkeypatch, release, accepted):
    fake = tmp_path / "ptxas"
    fake.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(fake))
    if accepted:
        assert gpu.ptxas() == fake
    else:
        with pytest.raises(Refused, match="SB0450"):
            gpu.ptxas()
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "absent"))
    with pytest.raises(Refused, match="SB0450"):
        gpu.ptxas()


def test_the_wheel_has_a_new_enough_assembler(monkeypatch):
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assert re.fullmatch("ptxas.*", gpu.ptxas().name)


def test_another_chip_is_refused():
    gpu.require_capability((9, 0))
    for other in ((8, 0), (10, 0), None):
        with pytest.raises(Refused, match="SB0451"):
            gpu.require_capability(other)


def test_cpu_tensors_are_refused():
    with pytest.raises(Refused, match="SB0420"):
        gpu.require("x", torch.zeros(2, dtype=torch.bfloat16), torch.bfloat16, True, "[2]")


def test_a_gate_turns_red_on_one_bit_and_on_a_missing_hazard():
    tally = gpu_gates.Tally("planted")
    law = torch.tensor([1.0, 0.0, torch.nan])
    tally.require("same", law.clone(), law)
    for index, value in ((0, 1.0000001), (1, -0.0), (2, 3.0)):
        other = law.clone()
        other[index] = value
        with pytest.raises(Different, match="SB0440"):
            tally.require("one bit", other, law)
    with pytest.raises(NotObserved, match="SB0441"):
        tally.close(("tie",))


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["law", "rms_norm", "silu_mul", "rotary", "logprob", "gemm"])
def test_gate(gate):
    assert "0 differ" in getattr(gpu_gates, f"gate_{gate}")()
