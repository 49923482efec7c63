"""The generated parts of README.md: counts and states come from records, and a change is seen."""

from __future__ import annotations

import sys
from dataclasses import replace

import pages
import pytest

from samebits import cases, recipe
from samebits.casework import ladder, steps

STATUS = cases.Status("toy", "EQUAL", {"B": 12}, {"B": 0}, [], ["CUDA"], "2025-01-01", 2)
STATUS = replace(STATUS, scope="not claimed: D")
EMPTY = "".join(f"<!-- {name}: generated -->\nold\n<!-- end -->\n" for name in pages.PARTS)


@pytest.fixture
def one_case(monkeypatch, tmp_path):
    states = tuple(
        steps.State(s.name, s.title, steps.DONE, "", "", "", "", s.after) for s in steps.STEPS[:-1]
    )
    last = steps.STEPS[-1]
    out = steps.State(last.name, last.title, steps.OUT, "nobody asked", "", "", "", last.after)
    monkeypatch.setattr(cases, "all_statuses", lambda: [STATUS])
    monkeypatch.setattr(recipe, "known_cases", lambda: ["toy"])
    found = steps.Progress("toy", (*states, out), ())
    monkeypatch.setattr(steps, "progress", lambda name, local: found)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    for part in ("controls", "ladders", "blind"):  # read from the folders of cases
        monkeypatch.setitem(pages.PARTS, part, lambda: "")
    for page in pages.PAGES:
        path = tmp_path / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(EMPTY)
    return tmp_path / "README.md"


def run(monkeypatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["pages.py", *args])
    return pages.main()


def test_reproductions_are_counted_in_the_case_table(one_case):
    header, _, row, *_ = pages.case_table().splitlines()
    assert header.endswith("| reproduced |") and row.endswith("| 2 |")
    assert "| EQUAL (not claimed: D) |" in row


def test_every_case_with_a_contract_says_what_it_cannot_see():
    rows = [line.split(" | ") for line in pages.blind_table().splitlines()[2:]]
    found = {name.removeprefix("| "): cells for name, *cells in rows}
    with_contract = {p.parent.name for p in recipe.cases_folder().glob("*/contract.json")}
    assert found.keys() == with_contract
    assert found["qwen2-tiny"][0] == ("leg E, F, O; optimizer steps, refits, RL; recurrent layers")
    assert found["qwen3.5-tiny"] == ["-", "1e-6", "untied", "2 |"]
    assert found["smollm2-135m"][1:] == ["1e-5", "tied", "1 |"]


def test_every_step_is_shown_with_what_was_left_out(one_case):
    text = pages.step_table()
    assert all(f"| `{step.name}` |" in text for step in steps.STEPS)
    assert "- toy leaves out `write-up`: nobody asked" in text


def test_an_unrecorded_run_of_this_machine_is_not_shown(one_case, monkeypatch):
    asked = []
    real = steps.progress

    def progress(name, *, local=True):
        asked.append(local)
        return real(name, local=local)

    monkeypatch.setattr(steps, "progress", progress)
    pages.step_table()
    assert asked == [False]


def test_a_recorded_ladder_is_shown_and_a_stale_one_is_named(monkeypatch):
    legs = {"B": ladder.Leg(9, 4, 0.5), "C": ladder.Leg(9, 0, 0.0)}
    rung = ladder.Rung("stock", legs, dict.fromkeys(ladder.COSTS, 2.0))
    found = ladder.Ladder("toy", "2025-01-01", "a chip", "samebits prove toy --ladder", {}, [rung])
    monkeypatch.setattr(recipe, "known_cases", lambda: ["toy"])
    monkeypatch.setattr(recipe, "load", lambda name: name)
    monkeypatch.setattr(ladder, "read", lambda case: found)
    for changed in ([], ["hooks/vllm"]):
        monkeypatch.setattr(ladder, "stale", lambda made, case, changed=changed: changed)
        text = pages.ladder_table()
        assert "| stock (none) | 4 of 9 | 0 of 9 | 0.5 | 2 (1.00) |" in text
        assert ("STALE" in text) == bool(changed)
    monkeypatch.setattr(ladder, "read", lambda case: None)
    assert pages.ladder_table() == "Nothing recorded yet."


def test_a_page_that_differs_is_seen_and_written(one_case, monkeypatch, capsys):
    assert run(monkeypatch, "--check") == 1
    assert one_case.read_text() == EMPTY
    assert "scripts/pages.py" in capsys.readouterr().err
    assert run(monkeypatch) == 0
    assert run(monkeypatch, "--check") == 0
    one_case.write_text(one_case.read_text().replace("| 2 |", "| 3 |"))
    assert run(monkeypatch, "--check") == 1
