"""A second run is computed afresh, apart from the recorded one."""

from __future__ import annotations

import pytest

from samebits import recipe as recipes
from samebits.gates import prove
from samebits.gates.run import Run
from samebits.patching.workspace import Workspace
from samebits.weights import sources


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Folders of runs that were started; no stage computes anything."""
    (tmp_path / "cases").symlink_to(recipes.cases_folder())
    real = Workspace.find()
    (tmp_path / "patches").symlink_to(real.patches)
    (tmp_path / "build").mkdir()
    for upstream in ("vllm", "megatron", "verl"):  # a run looks at the patched trees first
        (tmp_path / "build" / upstream).symlink_to(real.root / "build" / upstream)
    monkeypatch.setattr(Workspace, "find", classmethod(lambda cls: Workspace(tmp_path)))
    monkeypatch.setattr(sources, "prepare", lambda recipe: tmp_path)
    found = []

    def stand_in(run: Run, size, quick, record, listener=None):
        found.append((run.folder, size, quick, record))
        (run.folder / "stage.json").touch()

    monkeypatch.setattr(prove, "_prove", stand_in)
    return found


def test_it_has_the_recorded_size_and_a_folder_of_its_own(ran):
    prove.rerun("qwen3-tiny")
    prove.prove("qwen3-tiny", record=True)
    (again, size, *options), (recorded, recorded_size, *_) = ran
    assert size == recorded_size and options == [False, False]
    assert again != recorded and again.name == f"rerun-{recorded.name}"


def test_an_interrupted_one_goes_on_and_a_finished_one_is_never_reused(ran):
    prove.rerun("qwen3-tiny")
    prove.rerun("qwen3-tiny")
    folder = ran[0][0]
    assert ran[1][0] == folder and (folder / "stage.json").exists()
    (folder / "evidence.json").write_text("{}")
    (folder / "stage.json").write_text("old")
    prove.rerun("qwen3-tiny")
    assert ran[2][0] == folder and (folder / "stage.json").read_text() == ""
    assert (folder.with_name(f"{folder.name}.done-1") / "stage.json").read_text() == "old"
