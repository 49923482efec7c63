"""A ledger holds decisions; nothing in it can say that something is done."""

import json

import pytest

from samebits import cli
from samebits.casework import ledger
from samebits.casework.steps import STEPS


def edit(toy, change) -> None:
    path = toy.folder / ledger.NAME
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def entry(**fields):
    return {"decision": "blocked", "reason": "waits for somebody", "date": "2025-01-01"} | fields


def test_the_schema_knows_the_steps_in_their_order():
    assert ledger.step_names() == [step.name for step in STEPS]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(state="done"),
        lambda d: d.update(schema_version=2),
        lambda d: d["decisions"].update({"leg-a": entry(decision="done")}),
        lambda d: d["decisions"].update({"leg-a": entry(decision="out-of-scope")}),
        lambda d: d["decisions"].update({"leg-a": entry(mismatches=0)}),
        lambda d: d["decisions"].update({"leg-a": entry(reason="")}),
        lambda d: d["decisions"].update({"leg-a": entry(reason="no")}),
        lambda d: d["decisions"].update({"leg-a": entry(date="yesterday")}),
        lambda d: d["decisions"].update({"leg-z": entry()}),
        lambda d: d["decisions"].update({"leg-a": entry(reason="x" * 1001)}),
        lambda d: d["decisions"].update({"leg-a": entry(reason="waits \x1b[31mred")}),
        lambda d: d["notes"].append({"date": "2025-01-01", "text": "a note \x1b[2J"}),
        lambda d: d["notes"].append({"text": "a note without a date"}),
        lambda d: d.pop("notes"),
        lambda d: d.update(case="other"),
    ],
)
def test_anything_else_is_refused(toy, capsys, change):
    edit(toy, change)
    assert cli.run(["case", "status", "toy"]) == 2
    assert "SB0917" in capsys.readouterr().err


def test_a_key_given_twice_is_refused(toy, capsys):
    path = toy.folder / ledger.NAME
    path.write_text(path.read_text().replace('"notes"', '"case": "toy", "notes"'))
    assert cli.run(["case", "status", "toy"]) == 2
    assert "SB0306" in capsys.readouterr().err


def test_one_broken_ledger_hides_no_other_case(toy, capsys):
    edit(toy, lambda d: d.update(state="done"))
    assert cli.run(["case", "status", "--json"]) == 0
    rows = {row["case"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["toy"]["error"] == "SB0917" and rows["qwen3-tiny"]["next"] is not None


def decide(*args: str) -> int:
    return cli.run(["case", "decide", "toy", *args])


def test_a_decision_is_written_and_taken_back(toy, capsys):
    assert decide("overhead", "blocked", "--reason", "no quiet machine") == 0
    assert json.loads((toy.folder / "ledger.json").read_text())["decisions"]["overhead"][
        "reason"
    ] == ("no quiet machine")
    assert decide("overhead", "out-of-scope", "--reason", "a proxy is not timed", "--json") == 0
    assert decide("overhead", "clear") == 0
    data = json.loads((toy.folder / "ledger.json").read_text())
    assert data["decisions"] == {} and len(data["notes"]) == 2
    assert "no quiet machine" in data["notes"][0]["text"]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["overhead", "blocked"], "SB0917"),
        (["leg-a", "out-of-scope", "--reason", "too slow here"], "SB0918"),
        (["contract", "out-of-scope", "--reason", "too slow here"], "SB0918"),
        (["overhead", "blocked", "--reason", "   a    "], "SB0917"),
        (["overhead", "blocked", "--reason", "x" * 1001], "SB0917"),
        (["overhead", "blocked", "--reason", "waits \x1b[31mred"], "SB0917"),
        (["overhead", "blocked", "--reason", "waits for\nsomebody"], "SB0917"),
        (["leg-z", "blocked", "--reason", "no such thing"], "SB0921"),
        (["topology", "out-of-scope", "--reason", "one machine only"], "SB0918"),
        (["rl", "out-of-scope", "--reason", "takes too long"], "SB0918"),
        (["overhead", "done", "--reason", "looks good to me"], "done"),
    ],
)
def test_decisions_that_are_none_leave_the_ledger_alone(toy, capsys, args, error):
    before = (toy.folder / "ledger.json").read_bytes()
    assert decide(*args) == 2
    said = capsys.readouterr().err
    assert error in said and "\x1b" not in said and len(said) < 1000
    assert (toy.folder / "ledger.json").read_bytes() == before


def test_a_claim_cannot_be_put_out_of_scope_by_hand_either(toy, capsys):
    edit(toy, lambda d: d["decisions"].update({"refit": entry(decision="out-of-scope")}))
    assert cli.run(["case", "status", "toy"]) == 2
    assert "SB0918" in capsys.readouterr().err


def test_a_bad_reason_is_told_in_words(toy, capsys):
    for reason, seen in (("", "no text"), ("no", "2 letters"), ("x" * 1001, "1001 letters")):
        assert decide("overhead", "blocked", "--reason", reason) == 2
        said = capsys.readouterr().err
        assert seen in said and "one line of 8 to 1000 printable letters" in said


def test_the_longest_reason_can_be_taken_back(toy):
    assert decide("write-up", "blocked", "--reason", "x" * 1000) == 0
    assert decide("write-up", "clear") == 0
    assert cli.run(["case", "status", "toy"]) == 3
