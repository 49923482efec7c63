"""Rows of the trainer's core, what they are compared with, and how variants are tuned."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton
from triton.runtime.autotuner import Autotuner

from samebits.bench import gpu_gdn_fla, gpu_gdn_train
from samebits.errors import Different
from samebits.ops import gdn

RIGHT = {"chunk_row": 2e-3, "cpr": 2e-3}


@pytest.fixture
def timed(monkeypatch):
    """Times without a GPU: 100 microseconds for another side, 80 and 90 for ours."""
    monkeypatch.setattr(gpu_gdn_fla, "tune_briefly", lambda: None)
    monkeypatch.setattr(gpu_gdn_train.gpu_gdn_ahead, "compiled", lambda area, parts: iter(()))
    monkeypatch.setattr(gpu_gdn_train, "drawn", lambda heads, lengths: (heads, lengths))
    monkeypatch.setattr(gpu_gdn_train, "natives", lambda: dict.fromkeys(gpu_gdn_train.NATIVES))
    monkeypatch.setattr(gpu_gdn_train, "native_step", lambda function, data: None)
    monkeypatch.setattr(gpu_gdn_train, "step", lambda data, schedule: None)
    monkeypatch.setattr(gpu_gdn_train, "medians", lambda sides: [100.0, 80.0, 90.0])

    def errors(by_heads):
        monkeypatch.setattr(gpu_gdn_train, "gradient_errors", by_heads)

    return errors


def test_a_row_for_each_shape_schedule_and_side_that_is_right(timed):
    timed(lambda heads: RIGHT | {"fla chunk": 1e-3 if heads == 8 else 0.5})
    rows = list(gpu_gdn_train.rows())
    works = [f"train {a} x {b}" for a, b in ((1, 10240), (5, 2048))]
    assert [row["work"] for row in rows] == [
        f"gdn {schedule}, {work}, 8 heads" for work in works for schedule in gdn.SCHEDULES
    ]
    assert {row["against"]["name"] for row in rows} == {"fla chunk"}
    assert {row["target"] for row in rows} == {0.90}
    assert [row["met"] for row in rows] == [True, True] * 2


def test_flash_qla_has_rows_of_its_own_behind_the_others(timed):
    timed(lambda heads: RIGHT | {"fla chunk": 1e-3, "FlashQLA": 1e-3})
    rows = list(gpu_gdn_train.rows())
    assert len(rows) == 2 * 4 * 2 * 2
    assert [row["against"]["name"] for row in rows] == ["fla chunk"] * 16 + ["FlashQLA"] * 16
    assert {row["target"] for row in rows[16:]} == {1.25}


def test_the_reason_for_a_missing_row_is_told(timed):
    timed(lambda heads: RIGHT | {"fla chunk": 0.5, "FlashQLA": 1e-3})
    lines = list(gpu_gdn_train.gates())
    assert "32 heads, gradients against float64: chunk_row 2.0e-03" in lines[0]
    assert lines[1] == "gdn train, 32 heads: no row against fla chunk, its gradients are wrong"
    assert len(lines) == 2 * len(gpu_gdn_train.HEADS)


@pytest.mark.parametrize("error", [0.02, float("nan")])
def test_our_wrong_gradients_are_red(timed, error):
    timed(lambda heads: RIGHT | {"cpr": error, "fla chunk": 1e-3})
    with pytest.raises(Different, match="gdn cpr, gradients, 32 heads"):
        list(gpu_gdn_train.gates())


def test_variants_are_shared_out_and_none_is_lost(monkeypatch):
    monkeypatch.setattr(Autotuner, "prune_configs", Autotuner.prune_configs)
    monkeypatch.setattr(Autotuner, "do_bench", Autotuner.do_bench)

    @triton.autotune([triton.Config({}, num_warps=n) for n in (1, 2, 4, 8, 16)], key=["x"])
    @triton.jit
    def kernel(x):
        pass

    found = []
    for index in range(3):
        gpu_gdn_fla.compile_share(index, 3)
        found.append([variant.num_warps for variant in kernel.prune_configs({})])
        assert kernel.do_bench(lambda: 1, quantiles=(0.5, 0.2, 0.8)) == [0.0] * 3
    assert found == [[1, 8], [2, 16], [4]]
    gpu_gdn_fla.compile_share(7, 8)
    assert [variant.num_warps for variant in kernel.prune_configs({})] == [1]


def test_a_variant_is_measured_briefly(monkeypatch):
    monkeypatch.setattr(Autotuner, "do_bench", Autotuner.do_bench)
    monkeypatch.setattr(triton.testing, "do_bench", lambda call, **options: options)
    gpu_gdn_fla.tune_briefly()

    @triton.autotune([triton.Config({}, num_warps=n) for n in (1, 2)], key=["x"])
    @triton.jit
    def kernel(x):
        pass

    found = kernel.do_bench(None, quantiles=(0.5,))
    assert found == {"warmup": 5, "rep": 25, "quantiles": (0.5,)}


def test_every_number_of_heads_is_compiled_ahead():
    parts = gpu_gdn_train.parts()
    run = {(part.function.__name__, part.arguments) for part in parts}
    assert len(run) == len(parts)
    assert run == {
        *(("compile_ours", (heads,)) for heads in gpu_gdn_train.HEADS),
        *(("compile_fla", (heads, i)) for heads in gpu_gdn_train.HEADS for i in range(4)),
    }
