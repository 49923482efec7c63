"""`scripts/upstream_tests.py` tells a patch that breaks a test from a test that cannot run."""

from __future__ import annotations

import subprocess

import pytest
import upstream_tests
import yaml

from samebits.patching import pins
from samebits.patching.series import Series
from samebits.patching.workspace import Workspace

TEST = "from code_under_test import value\n\n\ndef test_value():\n    assert value() == 1\n"
CODE = "def value():\n    return {}\n"


@pytest.fixture
def repository(tmp_path):
    """A repository of two commits, as a built tree is: unmodified, then patched."""
    folder = tmp_path / "repository"
    (folder / "tests").mkdir(parents=True)

    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *name, *words], cwd=folder, check=True, capture_output=True)

    def make(before: int, after: int):
        git("init", "-q")
        (folder / "pyproject.toml").write_text("[project]\nname = 'x'\n")
        (folder / "tests" / "test_value.py").write_text(TEST)
        for value in (before, after):
            (folder / "code_under_test.py").write_text(CODE.format(value))
            git("add", ".")
            git("commit", "-q", "--allow-empty", "-m", "one")
        return folder

    return make


@pytest.mark.parametrize(
    ("before", "after", "code", "said"),
    [
        (1, 1, 0, "unmodified: 1 passed; patched: 1 passed"),
        (1, 2, 1, "passes unmodified only: tests/test_value.py::test_value"),
        (2, 1, 3, "unmodified: 1 failed; patched: 1 passed"),
    ],
)
def test_exit_codes(repository, tmp_path, capsys, before, after, code, said):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    chosen = {"run": [{"file": "tests/test_value.py"}]}
    tree = repository(before, after)
    assert upstream_tests.run_upstream("toy", chosen, tree, scratch) == code
    assert said in capsys.readouterr().out


def test_a_file_that_is_not_there_is_not_observed(repository, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    chosen = {"run": [{"file": "tests/test_absent.py"}]}
    assert upstream_tests.run_upstream("toy", chosen, repository(1, 1), scratch) == 3


@pytest.mark.parametrize("after", [{}, {"a": "failed"}, {"a": "skipped"}])
def test_a_test_that_no_longer_passes_is_lost(after):
    assert upstream_tests.lost({"a": "passed", "b": "failed"}, after) == ["a"]


def test_the_selection_names_every_patched_upstream_and_a_reason_for_what_is_left_out():
    selection = yaml.safe_load(upstream_tests.SELECTION.read_text())
    workspace = Workspace.find()
    assert set(selection) == {pin.name for pin in pins.patched(workspace)}
    for name, entry in selection.items():
        assert entry["run"] or entry["left_out"]
        assert all(item["why"] for item in entry["left_out"])
        assert Series(workspace, name).patches(entry["model"])
