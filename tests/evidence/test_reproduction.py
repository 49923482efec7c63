"""A reproduction is judged from both runs, and checked as strictly as evidence."""

from __future__ import annotations

import copy
import json

import pytest
from platforms import INTENT

from samebits import cli, evidence
from samebits.contract import canonical
from samebits.errors import NotObserved, Refused
from samebits.evidence import current, reproduction
from samebits.evidence.statement import integrity

LATER = {"started": "2025-02-01T00:00:00Z", "finished": "2025-02-01T00:10:00Z"}


@pytest.fixture
def first(run, recipe):
    """The recorded run, in its place."""
    return evidence.write(run(intent=INTENT), recipe.evidence_path)


@pytest.fixture
def again(run, make_rows, recipe):
    """Builds a second run; `leg` and further arguments change one leg's rows."""

    def build(leg="", intent=INTENT, row=None, **changes):
        rows = make_rows(recipe, leg, **(row or {}))
        fields = {"comparisons": rows, "happenstance": LATER, "intent": intent}
        return run(**(fields | changes))

    return build


def made(first, second, operator="someone"):
    return reproduction.build(first, second, operator)


def store(recipe, done):
    path = reproduction.default_path(recipe, done)
    reproduction.write(done, path)
    return path


DIFFERS = {
    "mismatches": 3,
    "max_abs": 0.5,
    "streams": ("a" * 64, "b" * 64),
    "first": {"sequence": 0, "position": 1, "token": 2, "left": "aa", "right": "bb"},
}


def test_the_same_again_is_reproduced(first, again, recipe):
    done = made(first, again())
    assert (done.verdict, done.predicate["reasons"]) == ("REPRODUCED", [])
    path = store(recipe, done)
    assert path.parent == recipe.folder / "reproductions" and path.name.startswith("2025-02-01-")
    checked = reproduction.check(path)
    assert (checked.status, checked.exit_code, checked.stale) == ("REPRODUCED", 0, ())


def test_a_difference_in_the_second_run_is_different(first, again):
    done = made(first, again("B", row=DIFFERS))
    assert done.verdict == "DIFFERENT"
    assert any(
        "leg B, decode/prefill: 3 mismatches, 0 recorded" in r for r in done.predicate["reasons"]
    )


def test_other_streams_on_the_same_platform_are_different(first, again):
    other = {"streams": ("c" * 64, "c" * 64)}
    done = made(first, again("B", row=other))
    assert done.verdict == "DIFFERENT" and "other streams" in done.predicate["reasons"][0]
    elsewhere = made(first, again("B", row=other, intent=INTENT | {"isa": "AVX512"}))
    assert elsewhere.verdict == "REPRODUCED"


@pytest.mark.parametrize(
    "changes",
    [{"seeds": {"capsule": 2}}, {"dependencies": {"x": "0" * 64}}, {"switches": {"a": "b"}}],
)
def test_other_inputs_reproduce_nothing(first, again, changes):
    done = made(first, again(**changes))
    assert done.verdict == "NOT_OBSERVED" and "other inputs" in done.predicate["reasons"][0]


def test_a_second_run_that_shows_too_little_reproduces_nothing(first, again):
    assert made(first, again("B", row={"hazards": {}})).verdict == "NOT_OBSERVED"


def test_nothing_that_was_not_observed_is_reproduced(again):
    weak = {"hazards": {}}
    done = made(again("B", row=weak), again("B", row=weak, happenstance=LATER | {"host": "b"}))
    assert done.verdict == "NOT_OBSERVED"


def test_a_comparison_that_did_not_run_again_reproduces_nothing(first, again, make_rows, recipe):
    rows = [row for row in make_rows(recipe) if row["name"] != "trainer-tp2/rollout-tp2"]
    done = made(first, again(comparisons=rows))
    assert done.verdict == "NOT_OBSERVED"
    assert any("in one of the two runs only" in reason for reason in done.predicate["reasons"])


def test_a_copy_of_the_recorded_run_is_no_second_run(first):
    with pytest.raises(Refused, match="the second run is the recorded one"):
        made(first, first)


def test_a_contract_with_another_platform_admitted_is_the_same_input(first):
    data = copy.deepcopy(first.data)
    data["predicate"]["parameters"]["contract"]["digest"] = "f" * 64
    data["predicate"]["integrity"] = integrity(data)
    other = evidence.Statement.parse(canonical.encode(data, "x"), "x")
    assert reproduction.summary(first)["inputs"] == reproduction.summary(other)["inputs"]


# --- forged, stale, misplaced ---------------------------------------------------------------------


@pytest.fixture
def forge(first, again, recipe):
    """Writes a changed copy of a good reproduction; integrity is recomputed unless told."""

    def change(edit, honest=True):
        data = copy.deepcopy(dict(made(first, again()).data))
        edit(data)
        if honest:
            data["predicate"]["integrity"] = integrity(data)
        path = recipe.folder / "reproductions" / "forged.json"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(canonical.encode(data, "forged"))
        return path

    return change


def inner(data):
    return data["predicate"]["evidence"]["predicate"]


EDITS = [
    (lambda d: d["predicate"].update(verdict="DIFFERENT"), "SB0803"),
    (lambda d: d["predicate"].update(reasons=["because"]), "SB0803"),
    (lambda d: d["predicate"].update(extra=1), "SB0801"),
    (lambda d: d["predicate"].update(operator=" "), "SB0801"),
    (lambda d: d["predicate"].update(limits=[]), "SB0801"),
    (lambda d: d["predicate"].update(case="smollm2-135m"), "SB0804"),
    (lambda d: d["predicate"]["rerun"]["counts"][0].update(tokens=10**6), "SB0804"),
    (lambda d: d["predicate"]["rerun"].update(platform="0" * 64), "SB0804"),
    (lambda d: d["subject"][0]["digest"].update(sha256="0" * 64), "SB0804"),
    (lambda d: inner(d)["comparisons"][0].update(tokens=10**6), "SB0802"),
    (lambda d: inner(d).update(verdict="DIFFERENT"), "SB0802"),
    (lambda d: inner(d).update(extra=1), "SB0801"),
]


@pytest.mark.parametrize(("edit", "error"), EDITS)
def test_a_forged_reproduction_is_refused(forge, edit, error, capsys):
    path = forge(edit)
    with pytest.raises(Refused, match=error):
        reproduction.check(path)
    assert cli.run(["verify", str(path)]) == 2


def test_an_edit_without_its_digest_is_refused(forge):
    path = forge(lambda d: d["predicate"].update(operator="another"), honest=False)
    with pytest.raises(Refused, match="SB0802"):
        reproduction.check(path)


def test_a_claim_about_the_recorded_run_is_held_against_it(forge):
    def edit(data):
        data["predicate"]["recorded"]["counts"][0]["tokens"] += 1

    with pytest.raises(Refused, match="not that of its evidence"):
        reproduction.check(forge(edit))


@pytest.mark.parametrize("cut", [1, 500])
def test_a_truncated_file_is_refused(first, again, recipe, cut):
    path = store(recipe, made(first, again()))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(Refused):
        reproduction.check(path)


def test_it_is_stale_when_the_evidence_is_recorded_again(first, again, run, recipe, capsys):
    path = store(recipe, made(first, again()))
    evidence.write(run(intent=INTENT, happenstance=LATER), recipe.evidence_path)
    checked = reproduction.check(path)
    assert (checked.status, checked.exit_code) == ("STALE", 3)
    assert reproduction.count(recipe) == 0
    assert cli.run(["verify", str(path)]) == 3


def test_it_is_stale_when_what_it_stands_on_changes(first, again, recipe, monkeypatch):
    path = store(recipe, made(first, again()))
    monkeypatch.setattr(current, "trees", lambda recipe: {"vllm": "9" * 40})
    assert "tree of vllm changed" in reproduction.check(path).stale


def test_without_the_recorded_evidence_it_says_nothing(first, again, recipe):
    path = store(recipe, made(first, again()))
    recipe.evidence_path.unlink()
    assert reproduction.check(path).status == "STALE"


def test_a_reproduction_in_the_folder_of_another_case_is_refused(first, again, recipe):
    path = store(recipe, made(first, again()))
    other = recipe.folder.parent / "other"
    (other / "reproductions").mkdir(parents=True)
    text = recipe.path.read_text().replace("case: qwen3-tiny", "case: other")
    (other / "recipe.yaml").write_text(text)
    moved = other / "reproductions" / path.name
    moved.write_bytes(path.read_bytes())
    with pytest.raises(Refused, match="SB0810"):
        reproduction.check(moved)


# --- counting -------------------------------------------------------------------------------------


def test_operators_are_counted_once_and_only_where_it_holds(first, again, recipe, forge):
    assert evidence.verify(recipe.folder).reproductions == 0
    store(recipe, made(first, again(), "one"))
    store(recipe, made(first, again(happenstance=LATER | {"host": "b"}), "one"))
    store(recipe, made(first, again(), "two"))
    store(recipe, made(first, again("B", row=DIFFERS), "three"))
    forge(lambda d: d["predicate"].update(operator="four"), honest=False)
    assert evidence.verify(recipe.folder).reproductions == 2
    assert evidence.verify(recipe.folder).as_dict()["reproductions"] == 2


def test_nothing_is_replaced(first, again, recipe):
    done = made(first, again())
    path = store(recipe, done)
    with pytest.raises(Refused, match="SB0811"):
        reproduction.write(done, path)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def reproduce(monkeypatch, recipe, capsys):
    """Runs the verb with a second run that is given; returns the exit code and what was printed."""
    from samebits.gates import prove

    def call(statement, *args):
        def rerun(case):
            assert statement is not None, "a run that had to be refused was started"
            return prove.Outcome(statement, recipe.folder / "x.json", {}, None)  # type: ignore[arg-type]

        monkeypatch.setattr(prove, "rerun", rerun)
        capsys.readouterr()
        code = cli.run(["reproduce", str(recipe.path), "--operator", "someone", *args])
        return code, capsys.readouterr()

    return call


def test_the_command_writes_a_statement_that_verifies(first, again, recipe, reproduce, capsys):
    before = recipe.evidence_path.read_bytes()
    code, said = reproduce(again())
    assert code == 0 and "REPRODUCED by someone" in said.out
    (path,) = (recipe.folder / "reproductions").iterdir()
    assert recipe.evidence_path.read_bytes() == before
    assert cli.run(["verify", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["operator"] == "someone"
    assert cli.run(["verify", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "REPRODUCED" in shown and "the same platform" in shown


def test_a_difference_is_written_too_and_exits_as_one(first, again, recipe, reproduce):
    code, said = reproduce(again("B", row=DIFFERS))
    assert code == 1 and "DIFFERENT" in said.out
    (path,) = (recipe.folder / "reproductions").iterdir()
    assert cli.run(["verify", str(path)]) == 1


def test_other_inputs_exit_as_three(first, again, reproduce):
    assert reproduce(again(seeds={"capsule": 2}))[0] == 3


def test_another_file_can_be_named_once(first, again, reproduce, tmp_path):
    path = tmp_path / "mine.json"
    assert reproduce(again(), "--output", str(path), "--json")[0] == 0
    content = path.read_bytes()
    code, said = reproduce(None, "--output", str(path))
    assert code == 2 and "SB0811" in said.err and path.read_bytes() == content


def test_without_evidence_or_with_stale_one_nothing_is_run(first, recipe, reproduce, monkeypatch):
    monkeypatch.setattr(current, "trees", lambda recipe: {"vllm": "9" * 40})
    code, said = reproduce(None)
    assert code == 3 and "SB0812" in said.err
    recipe.evidence_path.unlink()
    code, said = reproduce(None)
    assert code == 3 and "SB0805" in said.err
    with pytest.raises(NotObserved):
        reproduction.recorded_run(recipe)


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 101])
def test_an_operator_is_one_short_line(first, recipe, capsys, name):
    assert cli.run(["reproduce", str(recipe.path), "--operator", name]) == 2
    assert "--operator" in capsys.readouterr().err
