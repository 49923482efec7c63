"""`samebits prove` and `samebits rl`: refusals before any work, output and exit codes after it."""

import json
import types

import numpy as np
import pytest

from samebits import cli
from samebits import recipe as recipes
from samebits.evidence import DifferenceReport, Side, comparison, control
from samebits.gates import locate, page, prove, rl
from samebits.gates.run import Stage
from samebits.gates.streams import Stream
from samebits.patching.workspace import Workspace


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A checkout with folders of its own, in which no engine is ever started."""
    (tmp_path / "cases").symlink_to(recipes.cases_folder())
    found = Workspace(tmp_path)
    monkeypatch.setattr(Workspace, "find", classmethod(lambda cls: found))
    return found


def test_an_unknown_case_is_refused_with_the_known_ones(workspace, capsys):
    for verb in ("prove", "rl"):
        assert cli.run([verb, "no-such-case"]) == 2
        error = capsys.readouterr().err
        assert "SB0322" in error and "qwen3-tiny" in error and "hint: samebits case list" in error


def test_a_shortened_run_cannot_be_recorded(workspace, capsys):
    assert cli.run(["prove", "qwen3-tiny", "--record", "--quick"]) == 2
    error = capsys.readouterr().err
    assert "SB0903" in error and "--quick" in error
    assert not workspace.build.exists()


def test_a_negative_sequence_is_a_usage_error(capsys):
    assert cli.run(["prove", "qwen3-tiny", "--locate", "-1"]) == 2
    assert "--locate" in capsys.readouterr().err


def test_a_second_run_of_one_case_is_refused(workspace, capsys):
    with workspace.lock("run-qwen3-tiny"):
        for verb, *options in (["prove"], ["rl"], ["prove", "--locate", "1"]):
            assert cli.run([verb, "qwen3-tiny", *options]) == 2
            assert "SB0108" in capsys.readouterr().err


def test_a_case_without_rl_is_refused(workspace, capsys, monkeypatch):
    run = types.SimpleNamespace(recipe=recipes.load("qwen3-tiny"), options={})
    monkeypatch.setattr(prove, "open_run", lambda case, size: run)
    assert cli.run(["rl", "qwen3-tiny"]) == 2
    error = capsys.readouterr().err
    assert "SB0905" in error and "qwen3-tiny has no `rl` section" in error


def test_steps_are_counted_from_one(capsys):
    assert cli.run(["rl", "qwen3-tiny", "--steps", "0"]) == 2
    assert "--steps" in capsys.readouterr().err


SIDE = Side("rollout, decode", "bf800000"), Side("rollout, prefill", "bf800001")
REPORT = DifferenceReport("B", "decode/prefill", 4, 9, 7, *SIDE, "samebits prove toy --locate 4")


def _outcome(tmp_path, verdict: str):
    wrong = int(verdict == "DIFFERENT")
    record = comparison(
        "B",
        "decode/prefill",
        "left equals right",
        tokens=10,
        mismatches=wrong,
        streams=("a" * 64, ("b" if wrong else "a") * 64),
        command="samebits prove toy",
        max_abs=0.25 * wrong,
        control=control("stock", 80, 50, 0.5),
    )
    predicate = {
        "comparisons": [record],
        "oracle": [],
        "rl": None,
        "repeats": [],
        "shards": ["all"],
        "sources": [],
        "environment": {"intent": {}},
        "parameters": {
            "switches": {},
            "rl_steps": 0,
            "legs": {"B": {"tokens": 10, "hazards": [], "control": "stock"}},
        },
    }
    if verdict == "NOT_OBSERVED":
        predicate["parameters"]["legs"]["B"]["hazards"] = ["preempted"]
    statement = types.SimpleNamespace(
        predicate=predicate, data={"predicate": predicate}, case="toy", verdict=verdict
    )
    recipe = types.SimpleNamespace(scope="not claimed: D")
    run = types.SimpleNamespace(workspace=Workspace(tmp_path), flag="", recipe=recipe)
    differences = [REPORT] if wrong else []
    return prove.Outcome(statement, tmp_path / "evidence.json", {}, run, differences)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verdict", "code", "words"),
    [
        ("EQUAL", 0, ["toy: EQUAL (not claimed: D); mismatches per leg: B 0 of 10; 1 of 1"]),
        ("DIFFERENT", 1, ["1 of 10 tokens differ", "sequence 4, position 9", "--locate 4"]),
        ("NOT_OBSERVED", 3, ["leg B: hazard preempted never fired", "raise `requests`"]),
    ],
)
def test_exit_code_and_output_follow_the_verdict(
    tmp_path, monkeypatch, capsys, verdict, code, words
):
    outcome = _outcome(tmp_path, verdict)
    monkeypatch.chdir(tmp_path)  # paths are shown as this folder sees them
    shown_first = []

    def proved(case, quick, record, listener):
        listener.judged(outcome.statement, outcome.path)
        shown_first.append(capsys.readouterr().out)
        for report in outcome.differences:
            listener.located(report)
        return outcome

    monkeypatch.setattr(prove, "prove", proved)
    monkeypatch.setattr(page, "write", lambda statement, stages, chip, path, *_: path)
    assert cli.run(["prove", "toy"]) == code
    shown = shown_first[0]  # before anything is traced
    assert "decode/prefill" in shown and "50 of 80" in shown and "evidence: evidence.json" in shown
    shown += capsys.readouterr().out
    assert shown.count("evidence: ") == 1
    assert f"in total: {int(verdict == 'DIFFERENT')} of 10 comparisons of a token" in shown
    assert all(word in shown for word in words) and "scripts/pages.py" not in shown
    assert cli.run(["prove", "toy", "--record"]) == code
    assert "scripts/pages.py" in capsys.readouterr().out
    assert cli.run(["prove", "toy", "--json"]) == code
    assert shown_first[-1] == ""
    assert json.loads(capsys.readouterr().out) == outcome.statement.data


def _noted(left: Side) -> DifferenceReport:
    """A difference that was not followed to a region; bits `-` stand for none that was seen."""
    return DifferenceReport(**{**vars(REPORT), "note": "not traced: x", "left": left})


def _gone(note: str) -> DifferenceReport:
    """A difference that the run saw, and that is not there when it is computed again."""
    return DifferenceReport(**{**vars(REPORT), "note": note})


@pytest.mark.parametrize(
    ("reports", "code"),
    [
        ([], 0),
        ([REPORT], 1),
        ([_noted(REPORT.left)], 1),
        ([_noted(Side("rollout, decode", "-"))], 3),
        *(([_gone(note)], 3) for note in locate.GONE),
    ],
)
def test_locate_says_which_pairs_differ(workspace, monkeypatch, capsys, reports, code):
    monkeypatch.setattr(prove, "open_run", lambda case, size: types.SimpleNamespace())
    asked = []

    def one_sequence(run, sequence, pair):
        asked.append((sequence, pair))
        return reports

    monkeypatch.setattr(locate, "one_sequence", one_sequence)
    assert cli.run(["prove", "qwen3-tiny", "--locate", "4"]) == code
    differ = [report for report in reports if report.note not in locate.GONE]
    assert f"sequence 4: {len(differ)} pairs of" in capsys.readouterr().out
    assert cli.run(["prove", "qwen3-tiny", "--locate", "4", "--json"]) == code
    assert len(json.loads(capsys.readouterr().out)) == len(reports)
    assert cli.run(["prove", "qwen3-tiny", "--locate", "4", "--pair", "decode/prefill"]) == code
    assert asked == [(4, None), (4, None), (4, "decode/prefill")]


def test_a_case_of_refits_alone_has_one_pair_to_locate(workspace, monkeypatch, capsys):
    monkeypatch.setattr(prove, "open_run", lambda case, size: types.SimpleNamespace())
    asked = []
    monkeypatch.setattr(locate, "one_sequence", lambda *given: asked.append(given[1:]) or [])
    assert cli.run(["prove", "qwen3.5-9b-rl-h200", "--locate", "2004"]) == 0
    assert asked == [(2004, locate.REFITS)]
    assert f"0 pairs of {locate.REFITS} differ" in capsys.readouterr().out


def test_a_pair_needs_a_sequence(capsys):
    assert cli.run(["prove", "qwen3-tiny", "--pair", "decode/prefill"]) == 2
    assert "SB0926" in capsys.readouterr().err


def _rl_stage(wrong: int) -> Stage:
    left, right = Stream(), Stream()
    bits = np.array([0xBF800000, 0xBF800001], np.uint32)
    left.add(1000, 4, [5, 6], bits)
    right.add(1000, 4, [5, 6], bits ^ np.uint32(wrong))
    numbers = (
        "repeated_cached_tokens",
        "dropped_blocks",
        "max_abs",
        "mean_abs",
        "k3_kl",
        "is_ratio_max",
        "is_ratio_median",
        "reward",
    )
    step = {"step": 1, "tokens": 2, "mismatches": 2 * wrong, "loss": 0.5, "grad_norm": 1.0}
    return Stage({"rollout": left, "trainer": right}, {"steps": [step | dict.fromkeys(numbers, 1)]})


@pytest.mark.parametrize("wrong", [0, 1])
def test_rl_ends_with_one_when_a_bit_differs(workspace, monkeypatch, capsys, wrong):
    asked = {}

    def run_rl(run, *, steps, arithmetic):
        asked.update(steps=steps, arithmetic=arithmetic)
        return _rl_stage(wrong)

    run = types.SimpleNamespace(recipe=recipes.load("smollm2-135m"), flag="")
    monkeypatch.setattr(prove, "open_run", lambda case, size: run)
    monkeypatch.setattr(rl, "run_rl", run_rl)
    assert cli.run(["rl", "smollm2-135m", "--arithmetic", "stock"]) == wrong
    assert asked == {"steps": run.recipe.rl["steps"], "arithmetic": "stock"}
    shown = capsys.readouterr().out
    assert f"{2 * wrong} of 2 tokens differ in 5 steps" in shown and "repeat: " not in shown
    assert "repeated_cached" in shown and "dropped" in shown
    assert cli.run(["rl", "smollm2-135m"]) == wrong
    line = f"repeat: samebits prove smollm2-135m --locate 1000 --pair {locate.REFITS}"
    shown = capsys.readouterr().out
    assert (line in shown) == bool(wrong) and "grad_norm 0" not in shown
    assert cli.run(["rl", "smollm2-135m", "--steps", "3", "--json"]) == wrong
    assert asked == {"steps": 3, "arithmetic": "aligned"}
    assert json.loads(capsys.readouterr().out)[0]["tokens"] == 2


def test_rl_says_which_refit_moved_nothing(workspace, monkeypatch, capsys):
    stage = _rl_stage(0)
    stage.facts["steps"][0]["grad_norm"] = 0.0
    run = types.SimpleNamespace(recipe=recipes.load("smollm2-135m"), flag="")
    monkeypatch.setattr(prove, "open_run", lambda case, size: run)
    monkeypatch.setattr(rl, "run_rl", lambda run, **_: stage)
    assert cli.run(["rl", "smollm2-135m"]) == 0
    assert "- step 1: grad_norm 0, so its refit sent the weights as" in capsys.readouterr().out
