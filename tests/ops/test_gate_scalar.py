"""log1p32, softplus32, sigmoid32: error against float64, bits against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scalar_support import run, ulps

from samebits import bits
from samebits.ops import gate_scalar
from samebits.ops.jit import kernel


@kernel
def _log1p(x, y):
    for i in range(x.size):
        y[i] = gate_scalar.log1p32(x[i])


@kernel
def _softplus(x, y):
    for i in range(x.size):
        y[i] = gate_scalar.softplus32(x[i])


@kernel
def _sigmoid(x, y):
    for i in range(x.size):
        y[i] = gate_scalar.sigmoid32(x[i])


LAWS = {
    _log1p: gate_scalar.reference_log1p32,
    _softplus: gate_scalar.reference_softplus32,
    _sigmoid: gate_scalar.reference_sigmoid32,
}


@pytest.mark.parametrize("low,high", [(-60, -20), (-20, 0), (-2, 2), (0, 30)])
def test_log1p_error_stays_below_the_documented_bound(low, high):
    x = np.exp2(np.random.default_rng(0).uniform(low, high, 1_000_000)).astype(np.float32)
    assert ulps(run(_log1p, x), np.log1p(x.astype(np.float64))).max() <= 1.3


@pytest.mark.parametrize("low,high", [(-104, -20), (-20, -1), (-1, 1), (1, 30)])
def test_softplus_error_stays_below_the_documented_bound(low, high):
    x = np.random.default_rng(0).uniform(low, high, 1_000_000).astype(np.float32)
    truth = np.log1p(np.exp(x.astype(np.float64)))
    assert ulps(run(_softplus, x), truth).max() <= 2.1


@pytest.mark.parametrize("low,high", [(-88.7, 88.7), (-10, 0), (0, 10)])
def test_sigmoid_error_stays_below_the_documented_bound(low, high):
    x = np.random.default_rng(0).uniform(low, high, 1_000_000).astype(np.float32)
    truth = 1 / (1 + np.exp(-x.astype(np.float64)))
    normal = truth >= 2.0**-126
    assert ulps(run(_sigmoid, x), truth)[normal].max() <= 2.5


@pytest.mark.parametrize("body", LAWS, ids=lambda body: body.__name__)
def test_bits_equal_the_reference(body):
    every = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    any_bits = np.random.default_rng(1).integers(0, 2**32, 200_000).astype(np.uint32)
    near = np.random.default_rng(2).uniform(-152, 130, 100_000).astype(np.float32)
    close = np.random.default_rng(3).uniform(-2, 22, 100_000).astype(np.float32)
    x = np.concatenate([every, any_bits.view(np.float32), near, close])
    if body is _log1p:
        x = np.abs(x)
    got, want = run(body, x), LAWS[body](torch.from_numpy(x)).numpy()
    nan = np.isnan(want)
    assert (np.isnan(got) == nan).all() and (nan == np.isnan(x)).all() and nan.any()
    assert bits.compare(got[~nan], want[~nan]).equal


def test_special_values():
    least = 2.0**-149
    assert run(_log1p, [0.0, least]).tolist() == [0.0, least]
    assert run(_log1p, [1e-10])[0] == np.float32(1e-10) and run(_log1p, [np.inf])[0] == np.inf
    assert run(_softplus, [-np.inf, 20.5]).tolist() == [0.0, 20.5]
    assert run(_softplus, [3e38])[0] == np.float32(3e38) and run(_softplus, [np.inf])[0] == np.inf
    assert run(_sigmoid, [0.0, np.inf, -np.inf, -200.0]).tolist() == [0.5, 1.0, 0.0, 0.0]


def test_an_element_alone_equals_the_element_in_a_vector():
    x = np.random.default_rng(3).uniform(0, 20, 1025).astype(np.float32)
    for body in LAWS:
        alone = np.concatenate([run(body, x[i : i + 1]) for i in range(x.size)])
        assert bits.compare(run(body, x), alone).equal
