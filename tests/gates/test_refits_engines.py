"""A hybrid case that claims leg E alone, from its engines to its verdict, with stateless SGD."""

import dataclasses

import pytest
from locate_support import HYBRID, RL, open_run

from samebits.evidence import required
from samebits.evidence.verdict import judge
from samebits.gates import prove

pytestmark = pytest.mark.engine

HAZARDS = ["optimizer_step", "refit", "prefix_cache_invalidated"]
STEPS = {"steps": 3, "samples_per_prompt": 4, "max_tokens": 24, "optimizer": "sgd"}


def test_refits_are_equal_after_steps_of_sgd_and_stock_is_not(tmp_path):
    folder = tmp_path / "refits"
    folder.mkdir()
    leg = {"tokens": 300, "hazards": HAZARDS, "control": "stock"}
    one = {"trainer_tp": [1], "rollout_tp": [1]}
    parts = {"legs": {"E": leg}, "layouts": one, "rl": RL | STEPS | {"learning_rate": "1e-1"}}
    run = open_run(folder, "qwen3.5-tiny", HYBRID, **parts)
    size = dataclasses.replace(prove.Size(), stock_rl_prompts=1)
    done = prove._stages(run, size)
    statement = prove.state(run, done, quick=False, started="2025-01-01T00:00:00+00:00")
    predicate = statement.predicate
    assert judge(predicate).reasons == () and statement.verdict == "EQUAL"
    (row,) = predicate["comparisons"]
    assert row["hazards"] == dict.fromkeys(HAZARDS, 2)
    assert row["mismatches"] == 0 < 300 < row["tokens"]
    assert row["control"]["mismatches"] >= 32
    assert all(step["grad_norm"] > 0 for step in done["rl_aligned"].facts["steps"])
    assert not any(step["train_forward_mismatches"] for step in done["rl_aligned"].facts["steps"])
    assert list(required._problems(predicate, run.recipe)) == []
