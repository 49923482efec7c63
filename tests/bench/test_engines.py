"""Benchmark of whole engines on a GPU: its rows, its gate, what is kept. Nothing is timed here."""

import json

import pytest

from samebits import recipe
from samebits.bench import engine_arm, engines
from samebits.bench.engine_arm import Arm
from samebits.errors import Different, Refused

REGIONS = ("gemm.column", "logprob")
OURS = {
    "name": "aligned",
    "seconds": {"seeded": [4.1, 4.0, 9.0]},
    "mismatches": 0,
    "gated": 64,
    "served": {"gemm.column": 3, "logprob": 2},
    "prefilled": [[1, 2], [3, 4]],
}
SCORED = {"scored": [[1, 2], [3, 4]], "mismatches": 0, "gated": 4, "seconds": [0.1, 0.3, 0.2]}


def own(name, seeded, unseeded):
    return {"name": name, "seconds": {"seeded": seeded, "unseeded": unseeded}, "mismatches": 7}


FAST = own("vLLM V2, FA3, compiled", [5.0, 5.1, 5.2], [3.0, 3.1, 3.2])
SLOW = own("vLLM V1, FA3, compiled", [4.4, 4.5, 4.6], [6.0])
BROKEN = {"name": "vLLM V2, Triton, compiled", "failed": "no such option"}


def test_ours_is_compared_with_the_fastest_of_each_kind_of_request():
    seeded, unseeded = engines.rollout_rows("toy", [OURS, FAST, SLOW, BROKEN])
    assert seeded["against"]["name"] == SLOW["name"]
    assert seeded["ratio"] == round(4.1 / 4.5, 3)
    assert unseeded["against"]["name"] == FAST["name"]
    assert unseeded["ratio"] == round(4.1 / 3.1, 3)
    tokens = engine_arm.REQUESTS * engine_arm.RESPONSE
    assert seeded["ours"] == unseeded["ours"] == round(4.1e6 / tokens, 2)
    assert seeded["work"] != unseeded["work"]
    for row in (seeded, unseeded):
        assert row["work"].startswith("rollout") and row["work"].endswith(", toy")
        assert {"name": BROKEN["name"], "not_measured": BROKEN["failed"]} in row["others"]
        assert len(row["others"]) == 2
    assert 0.949 < 1 / seeded["target"] < 0.951


def test_without_anything_to_compare_with_there_is_no_row():
    assert engines.rollout_rows("toy", [OURS, BROKEN]) == []
    for arm in ("aligned", "stock"):
        passes = {"aligned": SCORED, "stock": SCORED} | {arm: {"failed": "out of memory"}}
        assert [*engines.trainer_rows("toy", passes)] == []


def test_a_training_pass_is_compared_by_medians():
    slow = SCORED | {"seconds": [0.4, 0.1, 0.2]}
    (row,) = engines.trainer_rows("toy", {"aligned": SCORED, "stock": slow})
    assert (row["ours"], row["against"]["time"], row["ratio"]) == (200.0, 200.0, 1.0)
    assert row["work"].startswith("trainer") and row["work"].endswith(", toy")


@pytest.mark.parametrize(
    ("rollout", "passes", "seen"),
    [
        ({"mismatches": 1}, {}, "decode and prefill: 1 of 64"),
        ({"gated": 0}, {}, "decode and prefill: 0 of 0"),
        ({"served": {"gemm.column": 3}}, {}, "logprob was not served"),
        ({"prefilled": [[1, 2], [3, 5]]}, {}, "score and prefill: 1 of 4"),
        ({}, {"mismatches": 2}, "score and training forward: 2 of 4"),
    ],
)
def test_the_gate_is_red(rollout, passes, seen):
    engines.gate(OURS, SCORED, REGIONS)
    engines.gate(OURS, {"failed": "out of memory"}, REGIONS)
    with pytest.raises(Different, match="SB0440") as caught:
        engines.gate(OURS | rollout, SCORED | passes, REGIONS)
    assert seen in caught.value.seen


def test_a_failure_is_kept_with_its_reason_but_not_ours(tmp_path):
    calls = []

    def measure():
        calls.append(1)
        return dict(BROKEN)

    for aligned, runs in ((False, 1), (True, 2)):
        calls.clear()
        path = tmp_path / f"{aligned}.json"
        for _ in range(2):
            assert engines._kept(path, measure, aligned=aligned) == BROKEN
        assert len(calls) == runs and path.exists() == (not aligned)


def test_the_reason_is_the_refusal_or_the_last_error():
    refusal = {"type": "Refused", "id": "SB0504", "seen": "a", "required": "b", "hint": "c"}
    marked = f"(EngineCore) samebits-error: {json.dumps(refusal)}\n"
    assert engines.reason(f"x\n{marked}RuntimeError: y", 1) == "SB0504: a"
    assert engines.reason("a\nValueError: no\nmore", 1) == "ValueError: no"
    assert engines.reason("only this\n", 1) == "only this"
    assert engines.reason("", 9) == "exit status 9"
    assert "not done" in engines.reason("", None)


def test_a_hopeless_configuration_is_timed_once():
    def timed(values, best):
        left = iter(values)
        return engine_arm.repeated(lambda: next(left), best)

    assert timed([5.0, 6.0, 7.0], None) == [5.0, 6.0, 7.0]
    assert timed([5.0, 6.0, 7.0], 4.9) == [5.0, 6.0, 7.0]
    assert timed([5.0], 4.0) == [5.0]


@pytest.fixture
def case(monkeypatch):
    monkeypatch.setattr("samebits.patching.tree_path", lambda *_: "tree")
    monkeypatch.setattr("samebits.ops.gpu.ptxas", lambda: "ptxas")
    return recipe.load("qwen3-8b-h200")


def test_vllms_own_configurations_see_nothing_of_this_package(case, tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEBITS_FAULT", "k_cut_by_rows")
    aligned, others = engines.arms(case, tmp_path / "model", tmp_path / "stock")
    ours = engines._environment(case, aligned)
    assert ours["VLLM_PLUGINS"] == "samebits" and ours["SAMEBITS_PLATFORM"] == "sm90"
    json.dumps(aligned.settings)
    assert aligned.settings["cuda_graphs"] == 1
    found = set()
    for arm in others:
        variables = engines._environment(case, arm)
        assert not [name for name in variables if name.startswith("SAMEBITS_")]
        assert variables["VLLM_PLUGINS"] == ""
        found.add((variables["VLLM_USE_V2_MODEL_RUNNER"], arm.backend))
        assert arm.compiled and arm.model == str(tmp_path / "stock") and not arm.aligned
    assert found == {(r, b) for r in "01" for b in ("FLASH_ATTN", "TRITON_ATTN")}


def test_configurations_run_until_the_gate_is_red(case, tmp_path, monkeypatch):
    asked = []

    def arm(case, given: Arm, folder, best):
        asked.append((given.name, given.compiled, dict(best)))
        if given.aligned:
            return OURS | red
        if given.backend == "TRITON_ATTN" and given.compiled:
            return BROKEN | {"name": given.name}
        return FAST | {"name": given.name}

    monkeypatch.setattr(engines, "_arm", arm)
    monkeypatch.setattr(engines, "_write_model", lambda *_: None)
    red = {}
    found = [*engines._rollouts(case, tmp_path, tmp_path / "a")]
    assert len(found) == len(asked) == 7  # two that did not start compiled, again without
    assert [compiled for _, compiled, _ in asked] == [False, True, True, True, False, True, False]
    assert asked[1][2] == {} and asked[-1][2] == {"seeded": 5.1, "unseeded": 3.1}
    asked.clear()
    red = {"mismatches": 1}
    assert len([*engines._rollouts(case, tmp_path, tmp_path / "a")]) == len(asked) == 1
    red = {"failed": "SB0451: no usable GPU"}
    with pytest.raises(Refused, match="SB0512"):
        [*engines._rollouts(case, tmp_path, tmp_path / "a")]
