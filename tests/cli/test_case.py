"""`samebits case`: the status that is shown is what the evidence says now."""

import json
from dataclasses import replace

import pytest

from samebits import cases, cli
from samebits.errors import NotObserved, Refused
from samebits.patching.workspace import Workspace

FIELDS = {"seen": "a", "required": "b", "hint": "samebits case list"}
STATUS = cases.Status(
    "toy", "STALE", {"B": 1200, "C": 800}, {"B": 0, "C": 2}, ["recipe"], ["CUDA"], "2025-01-01"
)
NARROW = replace(STATUS, verdict="EQUAL", stale=[], scope="drawn weights; not claimed: D")


def test_list_shows_every_case_with_the_status_of_its_evidence(monkeypatch, capsys):
    monkeypatch.setattr(cases, "all_statuses", lambda: [STATUS])
    assert cli.run(["case", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("toy", "STALE", "B 0 of 1,200", "C 2 of 800", "recipe"))
    assert cli.run(["case", "list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["verdict"] == "STALE" and row["legs"] == ["B", "C"]
    assert row["tokens"] == {"B": 1200, "C": 800} and row["mismatches"]["C"] == 2
    assert row["stale"] == ["recipe"] and row["not_shown"] == ["CUDA"]


def test_a_verdict_is_shown_with_what_it_is_less_than(monkeypatch, capsys):
    monkeypatch.setattr(cases, "all_statuses", lambda: [NARROW])
    monkeypatch.setattr(cases, "status", lambda case: NARROW)
    for verb in (["list"], ["show", "qwen3-tiny"]):
        assert cli.run(["case", *verb]) == 0
        shown = capsys.readouterr().out
        assert "EQUAL (drawn weights; not claimed: D)" in shown


@pytest.mark.parametrize(
    ("error", "verdict"),
    [(NotObserved("SB0313", **FIELDS), "not proved"), (Refused("SB0802", **FIELDS), "SB0802")],
)
def test_a_case_without_valid_evidence_is_never_equal(monkeypatch, error, verdict):
    from samebits import evidence

    def verify(case):
        raise error

    monkeypatch.setattr(evidence, "verify", verify)
    found = cases.status("qwen3-tiny")
    assert (found.verdict, found.tokens) == (verdict, {})


def test_every_recipe_of_the_folder_is_listed(tmp_path, monkeypatch, capsys):
    for name in ("one", "two", "_template"):
        (tmp_path / "cases" / name).mkdir(parents=True)
        (tmp_path / "cases" / name / "recipe.yaml").write_text("")
    monkeypatch.setattr(Workspace, "find", classmethod(lambda cls: Workspace(tmp_path)))
    assert cli.run(["case", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in rows] == ["one", "two"]
    assert all(row["verdict"] != "EQUAL" for row in rows)


def test_show_names_recipe_series_and_layouts(capsys):
    assert cli.run(["case", "show", "qwen3-tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trainer_tp"] == [1, 2] and found["series"]["vllm"] == "qwen3-tiny"
    assert len(found["recipe"]) == 64 and found["status"]["case"] == "qwen3-tiny"
    assert cli.run(["case", "show", "qwen3-tiny"]) == 0
    assert "architecture  qwen3" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [["verify"], ["case", "show"], ["contract", "show"]])
def test_the_template_is_no_case(verb, capsys):
    assert cli.run([*verb, "_template"]) == 2
    err = capsys.readouterr().err
    assert "SB0322" in err and "my-model" not in err


def test_the_form_of_a_case_is_named_by_its_path(capsys, monkeypatch):
    monkeypatch.chdir(Workspace.find().root)
    assert cli.run(["verify", "cases/_template"]) == 3
    err = capsys.readouterr().err
    assert "hint: samebits prove cases/_template --record\n" in err and "my-model" not in err


def test_a_missing_file_is_no_missing_case(tmp_path, capsys):
    assert cli.run(["verify", str(tmp_path / "nope.json")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("SB0303") and "no such file" in err and f"hint: ls {tmp_path}\n" in err


def test_an_unknown_case_is_refused(capsys):
    assert cli.run(["case", "show", "nothing"]) == 2
    assert "SB0322" in capsys.readouterr().err
