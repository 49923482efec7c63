"""Traces: what is recorded, how passes of one sequence are joined, where two sides part."""

import numpy as np
import pytest
import torch

from samebits import trace

HEADS, KV_HEADS, SIZE = 4, 2, 2
WIDTH = (HEADS + 2 * KV_HEADS) * SIZE
LAYER = ("norm.rms", "gemm.column", "norm.rms", "rope", "attention", "gemm.row",
         "norm.rms", "gemm.column", "act.silu_mul", "gemm.row")  # fmt: skip


def _forward(tokens: int, layers: int = 2, seed: int = 0):
    """(region, output) of one forward pass; q/k norm has one row per head."""
    draw = np.random.default_rng(seed)
    calls = [("embedding", draw.integers(0, 65536, (tokens, 8)).astype(np.uint16))]
    for _ in range(layers):
        for index, region in enumerate(LAYER):
            rows, width = (tokens * HEADS, SIZE) if index == 2 else (tokens, WIDTH)
            calls.append((region, draw.integers(0, 65536, (rows, width)).astype(np.uint16)))
    calls.append(("norm.rms", draw.integers(0, 65536, (tokens, 8)).astype(np.uint16)))
    calls.append(("gemm.lm_head", draw.integers(0, 1 << 32, (tokens, 9)).astype(np.uint32)))
    return calls


def _write(folder, calls, first=0):
    folder.mkdir(exist_ok=True)
    for i, (region, output) in enumerate(calls):
        operands = {"input": np.arange(len(output), dtype=np.uint64)}
        if region.startswith("gemm"):
            operands["weight"] = np.array([7], np.uint64)
        np.savez(folder / f"{first + i:05d}.{region}.npz", output=output, **operands)


def _parts(calls, cut):
    """The same pass in two parts, as an engine decodes."""
    heads = [(r, o[: cut * (len(o) // TOKENS)]) for r, o in calls]
    tails = [(r, o[cut * (len(o) // TOKENS) :]) for r, o in calls]
    return heads, tails


TOKENS = 6


def test_equal_traces_have_no_difference(tmp_path):
    calls = _forward(TOKENS)
    _write(tmp_path / "a", calls)
    _write(tmp_path / "b", calls)
    a, b = (trace.load(tmp_path / name, TOKENS) for name in "ab")
    assert trace.first_difference(a, b) is None


def test_layers_are_numbered_by_their_row_products(tmp_path):
    _write(tmp_path / "a", _forward(TOKENS))
    layers = [(call.region, call.layer) for call in trace.load(tmp_path / "a", TOKENS)]
    assert layers[0] == ("embedding", None)
    assert layers[1:11] == [(region, 0) for region in LAYER]
    assert layers[11:21] == [(region, 1) for region in LAYER]
    assert layers[21:] == [("norm.rms", None), ("gemm.lm_head", None)]


def test_the_first_difference_names_layer_region_and_element(tmp_path):
    calls = _forward(TOKENS)
    _write(tmp_path / "a", calls)
    changed = calls[15][1].copy()
    changed[4, 5] ^= 1
    _write(tmp_path / "b", [*calls[:15], ("attention", changed), *calls[16:]])
    a, b = (trace.load(tmp_path / name, TOKENS) for name in "ab")
    found = trace.first_difference(a, b)
    assert found is not None
    assert (found.layer, found.region, found.element) == (1, "attention", (4, 5))
    assert int(found.left, 16) ^ int(found.right, 16) == 1
    assert (found.differing, found.elements) == (1, TOKENS * WIDTH)
    assert found.operands == {"input": f"{4:016x}"}
    assert trace.first_difference(a, b, rows=4) is None  # later tokens are not looked at


def test_decode_steps_are_joined_into_one_pass(tmp_path):
    calls = _forward(TOKENS)
    _write(tmp_path / "a", calls)
    head, tail = _parts(calls, 4)
    head[-1] = (head[-1][0], head[-1][1][3:])  # a prompt yields the logits of its last row only
    _write(tmp_path / "b", head)
    _write(tmp_path / "b", tail, first=len(head))
    a = trace.load(tmp_path / "a", TOKENS)
    b = trace.load(tmp_path / "b", TOKENS, first_logits=3)
    assert trace.first_difference(a, b) is None
    b[-1].output[0, 0] ^= 1
    found = trace.first_difference(a, b)
    assert found is not None
    assert (found.region, found.element) == ("gemm.lm_head", (3, 0))


def test_a_pass_that_runs_ahead_is_left_out(tmp_path):
    calls = _forward(TOKENS)
    _write(tmp_path / "a", calls)
    _write(tmp_path / "a", _forward(1, seed=1)[:4], first=len(calls))
    assert len(trace.load(tmp_path / "a", TOKENS)[1].output) == TOKENS
    with pytest.raises(ValueError, match="lacks 2 of 9 tokens"):
        trace.load(tmp_path / "a", TOKENS + 3)


def test_fused_projections_are_brought_into_one_column_order(tmp_path):
    calls = _forward(TOKENS)
    order = trace.qkv_order(HEADS, KV_HEADS, SIZE)
    assert sorted(order) == list(range(WIDTH))
    # Groups of (q, q, k, v), two columns each: the queries of the second group start at column 8.
    assert list(order[:8]) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert list(order[8:]) == [4, 5, 12, 13, 6, 7, 14, 15]
    _write(tmp_path / "b", calls)
    for index in (2, 12):
        stored = np.empty_like(calls[index][1])
        stored[:, order] = calls[index][1]
        calls[index] = (calls[index][0], stored)
    _write(tmp_path / "a", calls)
    a = trace.load(tmp_path / "a", TOKENS, qkv=order)
    assert trace.first_difference(a, trace.load(tmp_path / "b", TOKENS)) is None


def test_different_call_sequences_are_refused(tmp_path):
    calls = _forward(TOKENS)
    _write(tmp_path / "a", calls)
    _write(tmp_path / "b", [*calls[:4], *calls[5:]])
    a, b = (trace.load(tmp_path / name, TOKENS) for name in "ab")
    with pytest.raises(ValueError, match="call 4 is rope of layer 0"):
        trace.first_difference(a, b)


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Operators with recorders, in a folder that does not exist yet."""
    import importlib

    for module, functions in trace._TRACED.values():
        loaded = importlib.import_module(f"samebits.ops.{module}")
        for name in functions:
            monkeypatch.setattr(loaded, name, getattr(loaded, name))  # put back afterwards
    monkeypatch.setenv("SAMEBITS_TRACE", str(tmp_path / "live"))
    trace.install()
    return tmp_path / "live"


def test_calls_are_recorded_while_the_folder_exists(recorded):
    from samebits.ops import gemm
    from samebits.plan import ReductionPlan

    x, w = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(5, 8, dtype=torch.bfloat16)
    gemm.linear(x, w)
    recorded.mkdir()
    gemm.linear(x, w)
    gemm.row_parallel(x, w, ReductionPlan(2))
    assert [p.name for p in sorted(recorded.iterdir())] == [
        "00000.gemm.column.npz",
        "00001.gemm.row.npz",
    ]
    with np.load(recorded / "00000.gemm.column.npz") as found:
        assert found["output"].tolist() == [[0x4100] * 5] * 3  # 8.0
        assert found["input"].shape == (3,) and found["weight"].shape == (1,)


def test_a_fault_is_recorded_as_the_call_that_it_stands_for(monkeypatch, tmp_path):
    from samebits import faults
    from samebits.ops import gemm

    for name in ("linear", "row_parallel"):
        monkeypatch.setattr(gemm, name, getattr(gemm, name))
    monkeypatch.setattr(trace, "_TRACED", {r: v for r, v in trace._TRACED.items() if "gemm" in r})
    monkeypatch.setattr(gemm, "lm_head", gemm.lm_head)
    monkeypatch.setenv("SAMEBITS_FAULT", "k_cut_by_rows")
    monkeypatch.setenv("SAMEBITS_TRACE", str(tmp_path))
    faults.install()
    trace.install()
    gemm.linear(torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(5, 8, dtype=torch.bfloat16))
    assert [p.name for p in tmp_path.iterdir()] == ["00000.gemm.column.npz"]


def test_weights_digest_alike_in_any_order_of_rows():
    rows = np.random.default_rng(0).integers(0, 65536, (6, 8)).astype(np.uint16)
    total = trace._row_digests(rows).sum(dtype=np.uint64)
    assert trace._row_digests(rows[::-1]).sum(dtype=np.uint64) == total
    rows[2, 3] ^= 1
    assert trace._row_digests(rows).sum(dtype=np.uint64) != total
