"""The guides follow the skill format, and the lint sees what it is there for."""

from __future__ import annotations

import os
import re

import pytest
import skills
import yaml
from quoted import ROOT

from samebits import faults

GOOD = """---
name: mend-things
description: Mends things. Use when a thing is broken.
---

# Mend

See [more](references/more.md) and `samebits/faults.py`.
"""
TASKS = {
    "skill": "mend-things",
    "tasks": [
        {
            "id": f"task-{outcome}-{number}",
            "prompt": "Please mend this thing for me.",
            "expect": {"outcome": outcome, "says": ["what is broken"], "never": ["guesses"]},
        }
        for number, outcome in enumerate(("done", "done", "stop"))
    ],
}


@pytest.fixture
def skill(tmp_path):
    """A skill without fault: (folder, write(name, text))."""
    folder = tmp_path / "mend-things"

    def write(name: str, text: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    write("SKILL.md", GOOD)
    write("references/more.md", "# More\n")
    write("evals/evals.yaml", yaml.safe_dump(TASKS))
    return folder, write


def test_all_guides_of_this_repository_pass():
    names = {path.parent.name for path in skills.SKILLS.glob("*/SKILL.md")}
    assert names == {
        "add-model",
        "find-first-difference",
        "port-patches",
        "prove-zero",
        "read-evidence",
    }
    assert skills.check(skills.SKILLS) == []


def test_a_skill_without_fault_passes(skill):
    assert skills.problems(skill[0]) == []


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("name: mend-things", "name: mend-thing", "not that of its folder"),
        ("name: mend-things", "name: Mend--Things", "lower-case"),
        ("name: mend-things", "name: 7", "lower-case"),
        ("description: Mends", "description: " + "Mends " * 200, "1 to 1024"),
        ("description: Mends things. Use when a thing is broken.", "description: Mends.", "when"),
        ("description: Mends things. Use when a thing is broken.", "description:", "1 to 1024"),
        ("---\n\n# Mend", "colour: red\n---\n\n# Mend", "unknown key colour"),
        ("---\nname", "name", "no front matter"),
        ("# Mend", "# Mend" + "\n" * 500, "500 lines or more"),
        ("# Mend", "# Mend " + "x" * 20_001, "20000 characters"),
        ("(references/more.md)", "(references/less.md)", "references/less.md, which is not there"),
        ("[more](references/more.md)", "more", "not linked from SKILL.md"),
        ("`samebits/faults.py`", "`samebits/fault.py`", "not in the repository"),
    ],
)
def test_a_fault_in_the_page_is_found(skill, old, new, what):
    folder, write = skill
    assert old in GOOD
    write("SKILL.md", GOOD.replace(old, new, 1))
    found = skills.problems(folder)
    assert any(what in line for line in found), found


def test_a_deep_reference_is_found(skill):
    folder, write = skill
    write("references/deep/er.md", "# Deeper\n")
    assert any("more than one level deep" in line for line in skills.problems(folder))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda d: d.update(skill="other"), "is not mend-things"),
        (lambda d: d["tasks"].pop(0), "fewer than three"),
        (lambda d: d["tasks"][2]["expect"].update(outcome="done"), "no task whose right outcome"),
        (lambda d: d["tasks"][0]["expect"].update(outcome="maybe"), "outcome is none of"),
        (lambda d: d["tasks"][0].update(id="Task 0"), "id is not lower case"),
        (lambda d: d["tasks"][0].update(id="task-done-1"), "an id twice"),
        (lambda d: d["tasks"][0].update(prompt="Go."), "no prompt"),
        (lambda d: d["tasks"][0]["expect"].pop("never"), "says and never"),
        (lambda d: d["tasks"][0]["expect"].update(says="a sentence"), "no list of sentences"),
        (lambda d: d["tasks"][0].update(hint="x"), "unknown keys"),
    ],
)
def test_a_fault_in_the_evals_is_found(skill, change, what):
    folder, write = skill
    data = yaml.safe_load(yaml.safe_dump(TASKS))
    change(data)
    write("evals/evals.yaml", yaml.safe_dump(data))
    found = skills.problems(folder)
    assert any(what in line for line in found), found


def test_missing_evals_are_found(skill):
    folder, _ = skill
    (folder / "evals" / "evals.yaml").unlink()
    assert any("no evals" in line for line in skills.problems(folder))


def test_a_guide_that_the_readme_does_not_name_is_found(skill):
    folder, _ = skill
    (folder.parent / "README.md").write_text("# Guides\n")
    assert skills.check(folder.parent) == ["README.md: no link to mend-things"]


def test_links_are_made_once_and_replace_nothing(tmp_path):
    target = tmp_path / "a" / "skills"
    assert skills.link(target) == []
    assert (target / "prove-zero" / "SKILL.md").is_file()
    assert not os.path.isabs(os.readlink(target / "prove-zero"))
    assert skills.link(target) == []  # again: what it made itself is not in the way
    (target / "prove-zero").unlink()
    (target / "prove-zero").write_text("mine")
    (target / "add-model").unlink()
    assert skills.link(target) == [str(target / "prove-zero")]
    assert (target / "prove-zero").read_text() == "mine"
    assert not (target / "add-model").exists()


def test_every_patch_has_an_upstream_form():
    page = skills.SKILLS / "port-patches" / "references" / "upstream-forms.md"
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", page.read_text(), re.MULTILINE)
    patches = sorted(path.stem for path in (ROOT / "patches").glob("*/*.patch"))
    assert sorted(rows) == patches


def test_every_planted_fault_of_the_table_exists_and_is_tested():
    page = skills.SKILLS / "prove-zero" / "references" / "legs.md"
    rows = set(re.findall(r"^\| `(\w+)` \| \w+.*\| ", page.read_text(), re.MULTILINE))
    assert len(rows) >= 6
    assert rows <= {*faults.PLANTED, *faults.ELSEWHERE}
    tested = (ROOT / "tests" / "faults" / "test_faults.py").read_text()
    assert [name for name in rows if f'"{name}"' not in tested] == []


def test_every_region_has_a_guide():
    from samebits.ops.registry import REGIONS

    text = (skills.SKILLS / "find-first-difference" / "SKILL.md").read_text()
    table = text[text.index("| region | guide |") :]
    table = table[: table.index("\n\n")]
    assert [region for region in REGIONS if region not in table] == []


def test_every_step_of_the_ledger_is_in_the_table_of_steps():
    from samebits.casework.steps import STEPS

    text = (skills.SKILLS / "add-model" / "SKILL.md").read_text()
    table = text[text.index("| step | entry | command |") :]
    table = table[: table.index("\n\n")]
    rows = [re.split(r", then |, ", row.split(" | ")[0].strip("| ")) for row in table.split("\n")]
    named = [name for row in rows[2:] for name in row]
    assert named == [step.name for step in STEPS]
