"""Single regions switched on in the real engines: what runs is what was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from trainer_support import HERE, HYBRID, QWEN3, make_case

from samebits import patching, runtime
from samebits import recipe as recipes
from samebits.gates import ladder
from samebits.ops import registry

pytestmark = pytest.mark.engine


def outcomes(case, series: str, sets: list[str]) -> dict:
    """What one process found by building one trainer after another (`trainer_regions.py`)."""
    paths = [*map(str, patching.python_paths(series)), str(HERE)]
    done = subprocess.run(
        [sys.executable, str(HERE / "trainer_regions.py"), *map(str, case), *sets],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict, regions: tuple[str, ...]) -> None:
    """Rows of the named regions and of no other; a step computes the bits of a score."""
    for arithmetic, outcome in found.items():
        wanted = set(regions) if arithmetic == "aligned" else set()
        if arithmetic.startswith("only:"):
            wanted = set(arithmetic.removeprefix("only:").split(","))
        assert set(outcome["served"]) == wanted, arithmetic
        assert outcome["step_as_score"] and outcome["grad_norm"] > 0, arithmetic
        # All of them compute one function: bits differ, values hardly.
        assert outcome["loss"] == pytest.approx(found["aligned"]["loss"], abs=0.05), arithmetic


def test_every_region_of_a_dense_trainer_runs_alone_and_is_left_out_alone(tmp_path):
    regions = registry.DENSE
    alone = [runtime.only([region]) for region in regions]
    rest = {region: runtime.only(set(regions) - {region}) for region in regions}
    case = make_case(tmp_path, "qwen3", QWEN3)
    found = outcomes(case, "qwen3-tiny", ["stock", *alone, *rest.values(), "aligned"])
    check(found, regions)
    bits = {arithmetic: outcome["bits"] for arithmetic, outcome in found.items()}
    assert bits["stock"] != bits["aligned"]
    # On one rank a row of the embedding is a copy, whoever makes it.
    assert bits[rest["embedding"]] == bits["aligned"]
    for region in ("rope", "attention", "act.silu_mul", "gemm.lm_head", "logprob"):
        assert bits[rest[region]] != bits["aligned"], region


def test_the_regions_of_a_hybrid_trainer_too(tmp_path):
    regions = registry.HYBRID
    rungs = {"gdn": registry.TOGETHER, **{r: (r,) for r in regions if r not in registry.TOGETHER}}
    named = [rungs[name] for name in ("gdn", "attention.gate", "norm.rms_zero_centred", "rope")]
    sets = [runtime.only(part) for part in named]
    sets += [runtime.only(set(regions) - set(part)) for part in named]
    case = make_case(tmp_path, "qwen3_5_text", HYBRID, "qwen3.5-tiny", gdn_schedule="chunk_row")
    found = outcomes(case, "qwen3.5-tiny", ["stock", *sets, "aligned"])
    check(found, regions)
    assert found["stock"]["bits"] != found["aligned"]["bits"]
    assert found[sets[4]]["bits"] != found["aligned"]["bits"]


@pytest.mark.slow  # minutes: three times both engines
def test_a_ladder_of_three_rungs_goes_from_stock_to_equal(monkeypatch):
    """The rung between leaves the output layer stock: its bf16 logits reach our log-softmax."""
    every = frozenset(registry.regions_of(recipes.load("qwen3-tiny").architecture))
    few = every - {"gemm.lm_head", "rope", "norm.rms"}
    steps = [("stock", frozenset()), ("most", few), ("all", every)]
    monkeypatch.setattr(ladder, "rungs", lambda *_: steps)
    found = ladder.climb("qwen3-tiny", quick=True, fresh=True)
    stock, most, last = found.rungs
    assert found.exit_code == 0 and found.first_at_zero is last
    assert stock.legs["B"].tokens == 4 * 12 and stock.legs["C"].mismatches > 32
    assert most.legs["C"].mismatches and not last.mismatches
    for rung in found.rungs:
        assert rung.ms_per_token.keys() == {"decode", "prefill", "score", "step"}
        assert all(ms is None or ms > 0 for ms in rung.ms_per_token.values())
