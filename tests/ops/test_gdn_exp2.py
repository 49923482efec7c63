"""exp2_32: error against float64, bits against the reference, special values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scalar_support import run, ulps

from samebits.ops import gdn_scalar
from samebits.ops.jit import kernel

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-45, -1e-45, 0.5, -0.5, 1.5, -1.5]
SPECIAL += [-126.0, -149.0, -149.9, -150.0, -150.1, -151.5, 127.0, 127.99999, 128.0, 3e38, -3e38]


@kernel
def _exp2(x, y):
    for i in range(x.size):
        y[i] = gdn_scalar.exp2_32(x[i])


@pytest.mark.parametrize("low,high", [(-150, 128), (-1, 1), (-30, 0), (-150, -125)])
def test_error_stays_below_the_documented_bound(low, high):
    x = np.random.default_rng(0).uniform(low, high, 1_000_000).astype(np.float32)
    worst = ulps(run(_exp2, x), np.exp2(x.astype(np.float64))).max()
    assert 0.5 < worst <= 0.87


def test_integers_are_exact():
    n = np.arange(-149, 128)
    assert (
        run(_exp2, n.astype(np.float32)).astype(np.float64) == np.exp2(n.astype(np.float64))
    ).all()


def test_special_values():
    got = run(_exp2, np.array([-151, -np.inf, 128, np.inf, np.nan], np.float32))
    assert got[:4].tolist() == [0.0, 0.0, np.inf, np.inf] and np.isnan(got[4])
    assert not np.signbit(got[:2]).any()


def test_every_bf16_and_random_inputs_match_the_references_bits():
    every = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    spread = np.random.default_rng(1).uniform(-152, 130, 300_000).astype(np.float32)
    x = np.concatenate([every, spread, np.array(SPECIAL, np.float32)])
    got, want = run(_exp2, x), gdn_scalar.reference_exp2_32(torch.from_numpy(x)).numpy()
    nan = np.isnan(want)
    assert (np.isnan(got) == nan).all()
    assert (got[~nan].view(np.uint32) == want[~nan].view(np.uint32)).all()
