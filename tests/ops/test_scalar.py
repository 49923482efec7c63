"""exp32, log32 and the bf16 conversions: error against float64, bits against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scalar_support import run, ulps

from samebits import bits
from samebits.ops import scalar
from samebits.ops.jit import kernel
from samebits.ops.reference import fma32

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-45, -1e-45, 1.1754944e-38]
SPECIAL += [-103.9, -103.97, -103.98, -104.5, -87.4, 88.72, 88.73, 3e38, -3e38]


@kernel
def _exp(x, y):
    for i in range(x.size):
        y[i] = scalar.exp32(x[i])


@kernel
def _log(x, y):
    for i in range(x.size):
        y[i] = scalar.log32(x[i])


@kernel
def _narrow(x, y):
    for i in range(x.size):
        y[i] = scalar.narrow(x[i])


@kernel
def _widen(x, y):
    for i in range(x.size):
        y[i] = scalar.widen(x[i])


@pytest.mark.parametrize("low,high", [(-104, 88.7), (-1, 1), (-30, 0), (-104, -86)])
def test_exp_error_stays_below_the_documented_bound(low, high):
    x = np.random.default_rng(0).uniform(low, high, 1_000_000).astype(np.float32)
    worst = ulps(run(_exp, x), np.exp(x.astype(np.float64))).max()
    assert 0.5 < worst <= 1.02


@pytest.mark.parametrize("low,high", [(0.5, 2), (1, 50000), (0.99, 1.01)])
def test_log_error_stays_below_the_documented_bound(low, high):
    x = np.random.default_rng(0).uniform(low, high, 1_000_000).astype(np.float32)
    x = x[x != 1]
    worst = ulps(run(_log, x), np.log(x.astype(np.float64))).max()
    assert 0.5 < worst <= 0.86


def test_log_over_all_positive_exponents():
    x = np.random.default_rng(0).integers(1, 0x7F800000, 1_000_000).astype(np.uint32)
    x = x.view(np.float32)
    assert ulps(run(_log, x), np.log(x.astype(np.float64))).max() <= 0.86


def test_every_bf16_input_matches_the_references_bits():
    x = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    for body, law in ((_exp, scalar.reference_exp32), (_log, scalar.reference_log32)):
        got, want = run(body, x), law(torch.from_numpy(x)).numpy()
        nan = np.isnan(want)
        assert (np.isnan(got) == nan).all() and nan.any()
        assert bits.compare(got[~nan], want[~nan]).equal


def test_random_bits_match_the_references_bits():
    x = np.random.default_rng(1).integers(0, 2**32, 200_000).astype(np.uint32).view(np.float32)
    near = np.random.default_rng(2).uniform(-104, 89, 100_000).astype(np.float32)
    x = np.concatenate([x, near, np.array(SPECIAL, np.float32)])
    for body, law in ((_exp, scalar.reference_exp32), (_log, scalar.reference_log32)):
        got, want = run(body, x), law(torch.from_numpy(x)).numpy()
        nan = np.isnan(want)
        assert (np.isnan(got) == nan).all()
        assert bits.compare(got[~nan], want[~nan]).equal


def test_special_values():
    x = np.array(SPECIAL, np.float32)
    exp, log = (dict(zip(SPECIAL, run(body, x), strict=True)) for body in (_exp, _log))
    assert exp[-np.inf] == 0 and not np.signbit(exp[-np.inf]) and exp[np.inf] == np.inf
    assert exp[-103.97] == np.float32(1e-45) and exp[-103.98] == 0 and exp[-104.5] == 0
    assert np.isfinite(exp[88.72]) and exp[88.73] == np.inf and np.isnan(exp[SPECIAL[4]])
    assert 0 < exp[-87.4] < 1.1754944e-38
    assert log[0.0] == -np.inf and log[np.inf] == np.inf and log[1.0] == 0
    assert np.isnan(log[-1.0]) and np.isnan(log[-1e-45]) and np.isnan(log[SPECIAL[4]])


def test_an_element_alone_equals_the_element_in_a_vector():
    x = np.random.default_rng(3).uniform(-20, 20, 4097).astype(np.float32)
    for body, points in ((_exp, x), (_log, np.abs(x) + np.float32(1e-3))):
        whole = run(body, points)
        alone = np.concatenate([run(body, points[i : i + 1]) for i in range(points.size)])
        assert bits.compare(whole, alone).equal


def test_narrow_rounds_ties_to_even_and_keeps_nan():
    high = np.arange(65536, dtype=np.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (high | np.uint32(low)).view(np.float32)
        got = run(_narrow, x, np.uint16)
        law = bits.int_view(scalar.reference_narrow(torch.from_numpy(x)))
        assert (got == law).all()
        torch_bits = bits.int_view(torch.from_numpy(x).to(torch.bfloat16))
        nan = np.isnan(x)
        assert (got[~nan] == torch_bits[~nan]).all()
        assert np.isnan(run(_widen, got[nan])).all() and nan.any()


def test_widen_is_exact_on_every_bf16():
    half = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    wide = run(_widen, half).view(np.uint32)
    assert (wide == half.astype(np.uint32) << 16).all()


def test_fold_lanes_is_the_plans_fold():
    lanes = np.random.default_rng(4).normal(size=scalar.LANES).astype(np.float32)
    level = list(lanes)
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
    assert scalar.fold_lanes(lanes.copy()) == level[0]


def test_fma32_rounds_once():
    # The product is 2**-24 - 2**-70: just below a tie with c, by less than float64 can hold.
    a, b = torch.tensor([2.0**-12 * (1 + 2.0**-23)]), torch.tensor([2.0**-12 * (1 - 2.0**-23)])
    c = torch.tensor([1 + 2.0**-23])
    assert (a.double() * b.double() + c.double()).float() != c  # two roundings go wrong here
    assert fma32(a, b, c) == c


def test_fma32_keeps_subnormals_zeros_and_infinities():
    a = torch.tensor([2.0**-75, 2.0**-75, -0.0, 3e38, 1.0])
    b = torch.tensor([2.0**-75, 1.5 * 2.0**-75, 1.0, 3e38, 1.0])
    c = torch.tensor([0.0, 0.0, -0.0, -torch.inf, -1.0])
    want = torch.tensor([0.0, 2.0**-149, -0.0, -torch.inf, 0.0])
    assert bits.compare(fma32(a, b, c), want).equal
