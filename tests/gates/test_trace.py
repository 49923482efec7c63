"""The first difference of two traces is found by call, layer, region and element."""

import numpy as np
import pytest

from samebits import trace


def _write(folder, calls):
    folder.mkdir()
    for i, (region, array) in enumerate(calls):
        np.save(folder / f"{i:05d}.{region}.npy", array)


@pytest.fixture
def calls():
    draw = np.random.default_rng(0)
    regions = ["embedding", "norm.rms", "gemm.column", "attention", "gemm.row", "norm.rms",
               "gemm.column", "act.silu_mul", "gemm.row", "norm.rms", "gemm.column", "attention"]  # fmt: skip
    return [(r, draw.integers(0, 65536, (3, 8)).astype(np.uint16)) for r in regions]


def test_equal_traces_have_no_difference(tmp_path, calls):
    _write(tmp_path / "a", calls)
    _write(tmp_path / "b", calls)
    assert trace.first_difference(tmp_path / "a", tmp_path / "b") is None


def test_column_order_of_a_projection_is_not_a_difference(tmp_path, calls):
    _write(tmp_path / "a", calls)
    calls[2] = (calls[2][0], calls[2][1][:, ::-1])
    _write(tmp_path / "b", calls)
    assert trace.first_difference(tmp_path / "a", tmp_path / "b") is None


def test_first_difference_names_layer_region_and_element(tmp_path, calls):
    _write(tmp_path / "a", calls)
    changed = calls[11][1].copy()
    changed[1, 5] ^= 1
    _write(tmp_path / "b", [*calls[:11], ("attention", changed)])
    found = trace.first_difference(tmp_path / "a", tmp_path / "b")
    assert (found.call, found.layer, found.region, found.row, found.column) == (
        11,
        1,
        "attention",
        1,
        5,
    )
    assert int(found.left, 16) ^ int(found.right, 16) == 1


def test_different_call_sequences_are_refused(tmp_path, calls):
    _write(tmp_path / "a", calls)
    _write(tmp_path / "b", calls[1:])
    with pytest.raises(ValueError, match="call 0"):
        trace.first_difference(tmp_path / "a", tmp_path / "b")
