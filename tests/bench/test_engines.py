"""Benchmark of whole engines on a GPU: its rows, its gate, what is kept. Nothing is timed here."""

import json

import pytest

from samebits import bench, recipe
from samebits.bench import engine_arm, engine_choice, engine_process, engine_rows, engines
from samebits.bench.engine_arm import Arm
from samebits.bench.engine_choice import Choice
from samebits.errors import Different, Refused

REGIONS = ("gemm.column", "logprob")
ARM = {"name": "aligned", "model": "toy", "settings": {}}
MEMORY = {"allocated": 3 << 29, "groups": []}
OURS = {
    "name": "aligned",
    "arm": ARM,
    "memory": MEMORY,
    "seconds": {"seeded": [4.1, 4.0, 9.0]},
    "mismatches": 0,
    "gated": 64,
    "served": {"gemm.column": 3, "logprob": 2},
    "prefilled": [[1, 2], [3, 4]],
}
SCORED = {
    "scored": [[1, 2], [3, 4]],
    "mismatches": 0,
    "gated": 4,
    "seconds": [0.1, 0.3, 0.2],
    "sequences": 8,
    "memory": {"allocated": 3 << 29},
}


def own(name, seeded, unseeded):
    return {
        "name": name,
        "arm": {"name": name, "model": "toy"},
        "memory": MEMORY,
        "seconds": {"seeded": seeded, "unseeded": unseeded},
        "mismatches": 7,
        "gated": 64,
    }


FAST = own("vLLM V2, FA3, compiled", [5.0, 5.1, 5.2], [3.0, 3.1, 3.2])
SLOW = own("vLLM V1, FA3, compiled", [4.4, 4.5, 4.6], [6.0])
BROKEN = {"name": "vLLM V2, Triton, compiled", "failed": "no such option"}


def test_ours_is_compared_with_the_fastest_of_each_kind_of_request():
    seeded, unseeded = engine_rows.rollout_rows("toy", [OURS, FAST, SLOW, BROKEN])
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
        assert row["against"]["differ"] == "7 of 64"
    assert 0.949 < 1 / seeded["target"] < 0.951


def test_another_aligned_configuration_is_shown_and_never_compared_with():
    ahead = OURS | {"name": "ahead", "seconds": {"seeded": [3.0]}}
    for found in ([OURS, FAST, ahead], [OURS, ahead, FAST]):
        for made in engine_rows.rollout_rows("toy", found):
            assert made["against"]["name"] == FAST["name"]
            (other,) = made["others"]
            tokens = engine_arm.REQUESTS * engine_arm.RESPONSE
            assert other == {
                "name": "ahead",
                "time": round(3e6 / tokens, 2),
                "runs": 1,
                "differ": "0 of 64",
                "peak_gib": 1.5,
            }
    assert engine_rows.rollout_rows("toy", [OURS, ahead]) == []


def test_without_anything_to_compare_with_there_is_no_row():
    assert engine_rows.rollout_rows("toy", [OURS, BROKEN]) == []
    passes = {"aligned": {"failed": "out of memory"}, "stock": SCORED}
    assert [*engine_rows.trainer_rows("toy", passes)] == []


def test_a_pass_without_another_beside_it_says_why_and_judges_nothing():
    passes = {"aligned": SCORED, "stock": {"failed": "a loop in torch"}}
    (row,) = engine_rows.trainer_rows("toy", passes)
    assert (row["ours"], row["ratio"], row["target"]) == (200.0, None, None)
    assert row["against"] == {"name": "Megatron's local spec", "not_measured": "a loop in torch"}
    assert bench.beside(row) == "Megatron's local spec: not measured, a loop in torch"
    assert bench.ratio(row) == "-"


def test_a_row_against_chosen_configurations_is_another_row_and_meets_nothing():
    left = engine_rows.left_out(Arm("vLLM V2, Triton, compiled", "toy", runner=2))
    whole = engine_rows.rollout_rows("toy", [OURS, FAST, BROKEN])
    chosen = engine_rows.rollout_rows("toy", [OURS, FAST, left])
    assert {row["target"] for row in whole} == {engine_rows.THROUGHPUT}
    assert {row["target"] for row in chosen} == {None}
    assert not {row["work"] for row in whole} & {row["work"] for row in chosen}
    for row in chosen:
        assert {"name": left["name"], "not_measured": "not run"} in row["others"]
    # One that does not compete takes nothing away.
    ahead = engine_rows.left_out(Arm("ahead", "toy", {}))
    assert engine_rows.rollout_rows("toy", [OURS, FAST, ahead])[0]["target"] is not None


def test_a_training_pass_is_compared_by_medians():
    slow = SCORED | {"seconds": [0.4, 0.1, 0.2]}
    (row,) = engine_rows.trainer_rows("toy", {"aligned": SCORED, "stock": slow})
    assert (row["ours"], row["against"]["time"], row["ratio"]) == (200.0, 200.0, 1.0)
    assert row["work"] == "trainer forward and backward, 8 x 1024 tokens, toy"
    part = SCORED | {"sequences": 2, "memory": {"allocated": 3 << 29}}
    (row,) = engine_rows.trainer_rows("toy", {"aligned": part, "stock": part})
    assert row["work"].endswith("8 x 1024 tokens in micro-batches of 2, toy")
    assert row["peak_gib"] == row["against"]["peak_gib"] == 1.5


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
    assert engine_process.reason(f"x\n{marked}RuntimeError: y", 1) == "SB0504: a"
    assert engine_process.reason("a\nValueError: no\nmore", 1) == "ValueError: no"
    assert engine_process.reason("only this\n", 1) == "only this"
    assert engine_process.reason("", 9) == "exit status 9"
    assert "not done" in engine_process.reason("", None)


def test_a_hopeless_configuration_is_timed_once():
    def timed(values, best):
        left = iter(values)
        return engine_arm.repeated(lambda: next(left), best)

    assert timed([5.0, 6.0, 7.0], None) == [5.0, 6.0, 7.0]
    assert timed([5.0, 6.0, 7.0], 4.9) == [5.0, 6.0, 7.0]
    assert timed([5.0], 4.0) == [5.0]
    assert timed([12.0], None) == timed([12.0], 10.0) == [12.0]


@pytest.fixture
def case(monkeypatch):
    monkeypatch.setattr("samebits.patching.tree_path", lambda *_: "tree")
    monkeypatch.setattr("samebits.ops.gpu.ptxas", lambda: "ptxas")
    return recipe.load("qwen3-8b-h200")


def test_vllms_own_configurations_see_nothing_of_this_package(case, tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEBITS_FAULT", "k_cut_by_rows")
    aligned, others = engine_choice.arms(case, tmp_path / "model", tmp_path / "stock")
    ours = engines._environment(case, aligned)
    assert ours["VLLM_PLUGINS"] == "samebits" and ours["SAMEBITS_PLATFORM"] == "sm90"
    json.dumps(aligned.settings)
    assert aligned.settings["cuda_graphs"] == 1
    found = set()
    *others, ahead = others
    assert ahead.aligned and ahead.settings == aligned.settings | {"ahead": True}
    for arm in others:
        variables = engines._environment(case, arm)
        assert not [name for name in variables if name.startswith("SAMEBITS_")]
        assert variables["VLLM_PLUGINS"] == ""
        runner, invariant = (
            variables[f"VLLM_{name}"] for name in ("USE_V2_MODEL_RUNNER", "BATCH_INVARIANT")
        )
        found.add((runner, arm.backend, invariant))
        assert (arm.block, arm.pages, arm.states) == (16, 256 * 81 + 64, None)
        assert arm.compiled and arm.model == str(tmp_path / "stock") and not arm.aligned
    plain = {(r, b, "0") for r in "01" for b in ("FLASH_ATTN", "TRITON_ATTN")}
    assert found == plain | {("0", "FLASH_ATTN", "1")}


@pytest.mark.parametrize("together", [1, 3, 8])
def test_configurations_run_until_the_gate_is_red(case, tmp_path, monkeypatch, together):
    asked, started, running = [], [], set()

    class Process:
        def __init__(self, arm, environment, folder, stem):
            self.arm = arm
            started.append(arm.name)
            running.add(arm.name)

        def started(self):
            return True

        def measure(self, best):
            arm = self.arm
            asked.append((arm.name, arm.compiled, dict(best), len(started)))
            self.stop()
            if arm.aligned:
                return OURS | {"name": arm.name} | red
            if arm.backend == "TRITON_ATTN" and arm.compiled:
                return BROKEN | {"name": arm.name}
            return FAST | {"name": arm.name}

        def stop(self):
            running.discard(self.arm.name)

    monkeypatch.setattr(engines, "ArmProcess", Process)
    monkeypatch.setattr(engines, "_memory", lambda: (1000, 1000))
    monkeypatch.setattr(engines, "_weights", lambda _: 0)
    monkeypatch.setattr("samebits.bench.engine_memory.engine_bytes", lambda *_: 900 // together)
    monkeypatch.setattr(engines, "_write_model", lambda *_: None)

    def found(folder):
        for seen in (asked, started):
            seen.clear()
        (tmp_path / folder).mkdir(exist_ok=True)
        return [*engines._rollouts(case, tmp_path, tmp_path / folder, choice)]

    red, choice = {}, Choice()
    # Two that did not start compiled are tried again without.
    assert len(found("a")) == len(asked) == 9 and not running
    compiled = [False, True, True, True, False, True, False, True, False]
    assert [row[1] for row in asked] == compiled
    assert asked[1][2] == {} and asked[-1][2] == {"seeded": 5.1, "unseeded": 3.1}
    assert asked[0][3] == min(together, 7)  # started before the first is timed
    assert len(found("a")) == 9 and not started  # all kept
    choice = Choice(fast=True)
    assert len(found("a")) == 9 and not started  # what is kept is told though not asked for
    rows = found("fast")
    assert [row[0] for row in asked] == [row["name"] for row in rows if "failed" not in row]
    # Those of a batch start together, and the next batch when all are timed.
    assert [row[3] for row in asked] == [min(4, (i // together + 1) * together) for i in range(4)]
    assert [row["name"] for row in rows if row.get("failed") == "not run"] == [
        "vLLM V2, Triton, compiled",
        "vLLM V1, Triton, compiled",
        "vLLM V1, FA3, batch-invariant, compiled",
    ]
    choice = Choice(("no such",))
    with pytest.raises(Refused, match="SB0909"):
        found("b")
    choice = Choice()
    red = {"mismatches": 1}
    assert len(found("b")) == len(asked) == 1 and not running
    red = {"failed": "SB0451: no usable GPU"}
    with pytest.raises(Refused, match="SB0512"):
        found("c")
    assert not running


STAND_IN = """
import json, pathlib, sys
given = json.loads(pathlib.Path(sys.argv[1]).read_text())
if given["name"] == "broken":
    sys.exit("ValueError: no such backend")
pathlib.Path(given["ready"]).touch()
line = sys.stdin.readline()
if given["name"] == "killed":
    sys.exit(3)
pathlib.Path(given["out"]).write_text(json.dumps({"best": json.loads(line)}))
"""


def test_a_process_waits_for_its_turn(tmp_path, monkeypatch):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(engine_arm, "__name__", "stand_in")

    def process(name):
        environment = {"PYTHONPATH": str(tmp_path)}
        return engine_process.ArmProcess(Arm(name, "model"), environment, tmp_path, name)

    first, second, never = process("a"), process("b"), process("c")
    assert first.started() and second.started() and never.started()
    assert not (tmp_path / "a.out").exists()  # nothing is timed before its turn
    assert second.measure({"seeded": 2.0}) == {"name": "b", "best": {"seeded": 2.0}}
    assert first.measure({}) == {"name": "a", "best": {}}
    never.stop()
    assert not (tmp_path / "c.out").exists()
    assert process("broken").measure({})["failed"] == "ValueError: no such backend"
    assert not process("broken").started()
    assert "failed" in process("killed").measure({})
