"""`samebits patch check`, `drift` and `branches`."""

import json
from pathlib import Path

import pytest
from quoted import problem
from toy_project import PATCH, SOURCES, SUBJECT, Project, make_sdist, run_git, user_git

from samebits.errors import SamebitsError
from samebits.patching import check, git, pins
from samebits.patching.workspace import Workspace

SECOND = "norm: round once"
SECOND_PATCH = "norm-round-once.patch"


def reasons(project: Project, *args: object) -> tuple[int, str | None, list[tuple[str, str]]]:
    done = project.run(*args, "--json")
    rows = [(row["patch"], row["reason"]) for row in json.loads(done.out)]
    return done.code, done.error_id, [row for row in rows if row[1] != check.APPLIES]


def checked(project: Project):
    return reasons(project, "check", "toy")


def test_good_series(project: Project):
    assert checked(project) == (0, None, [])


def test_good_series_of_two_models(project: Project):
    (project.patches / "series/large").write_text("")
    project.commit(SECOND, "toy/b.py", "line_3 = 3\n", "line_3 = 30\n")
    project.run("export", "toy", "--write", "--model", "large", "--record")
    assert checked(project) == (0, None, [])


@pytest.mark.parametrize(
    ("order", "series", "said"),
    [
        ([], [], f"{PATCH} is in no line of order"),
        ([PATCH, PATCH, SECOND_PATCH], [PATCH, SECOND_PATCH], "twice"),
        ([PATCH, SECOND_PATCH, "norm-none.patch"], [PATCH, SECOND_PATCH], "is no file"),
        ([PATCH, SECOND_PATCH], [PATCH], "is in no model's series"),
        ([PATCH, SECOND_PATCH], [SECOND_PATCH], f"without {PATCH}, which changes toy/a.py"),
        ([PATCH, SECOND_PATCH], [SECOND_PATCH, PATCH], "not in the order"),
        ([PATCH, SECOND_PATCH], [PATCH, PATCH, SECOND_PATCH], "twice"),
        ([PATCH, SECOND_PATCH], [PATCH, SECOND_PATCH, "norm-none.patch"], "is no file"),
    ],
)
def test_lists_that_do_not_fit(project: Project, order, series, said):
    project.commit(SECOND, "toy/a.py", "line_30 = 30\n", "line_30 = 3\n")
    assert project.export("--record").code == 0
    (project.patches / "order").write_text("\n".join(order))
    (project.patches / "series/small").write_text("\n".join(series))
    done = project.run("check", "toy")
    assert (done.code, done.error_id) == (2, "SB0110")
    assert said in done.out


def test_what_was_checked_is_counted_where_nothing_is_found(project: Project):
    done = project.run("check", "toy")
    trees = len(list((project.patches / "series").iterdir()))
    patches = len((project.patches / "order").read_text().split())
    assert done.code == 0
    assert f"as recorded: toy (patches {patches}, trees {trees})" in done.out
    assert project.run("check", "toy", "--json").out.strip() == "[]"


def test_header_edited_by_hand(project: Project):
    file = project.patches / PATCH
    file.write_text(file.read_text().replace("Cost: not measured", "Cost: none at all"))
    code, error, rows = checked(project)
    assert (code, error) == (2, "SB0109")
    assert (PATCH, "header-invalid") in rows


def test_content_edited_by_hand(project: Project):
    file = project.patches / PATCH
    file.write_text(file.read_text().replace("+line_9 = 90", "+line_9 = 91"))
    assert checked(project) == (1, "SB0112", [(PATCH, "export-differs")])


def test_context_edited_by_hand_that_git_ignores(project: Project):
    """Text after the hunks survives `git am`; only the re-export shows it."""
    file = project.patches / PATCH
    file.write_text(file.read_text() + "-- \nmail footer\n")
    assert checked(project) == (1, "SB0112", [(PATCH, "export-differs")])


def test_old_blob_is_not_the_pin(project: Project):
    file = project.patches / PATCH
    index = next(line for line in file.read_text().splitlines() if line.startswith("index "))
    file.write_text(file.read_text().replace(index, f"index {'a' * 40}{index[46:]}"))
    assert checked(project) == (1, "SB0111", [(PATCH, "preimage-changed")])


def test_recorded_tree_is_another(project: Project):
    path = project.root / "patches/pins.yaml"
    tree = pins.get(project.workspace, "toy").trees["small"]
    path.write_text(path.read_text().replace(tree, "f" * 40))
    assert checked(project) == (1, "SB0113", [("small", "tree-differs")])


def test_tree_not_recorded(project: Project):
    path = project.root / "patches/pins.yaml"
    tree = pins.get(project.workspace, "toy").trees["small"]
    path.write_text(path.read_text().replace(tree, "null"))
    assert checked(project) == (1, "SB0113", [("small", "tree-differs")])


def test_proof_that_is_gone(project: Project):
    (project.root / "tests/test_toy.py").write_text("def test_other():\n    pass\n")
    assert checked(project) == (3, "SB0122", [(PATCH, "proof-stale")])


def test_index_out_of_date(project: Project):
    path = project.root / "patches/README.md"
    path.write_text(path.read_text().replace("| hook |", "| fix |"))
    assert checked(project) == (1, "SB0116", [("", "index-differs")])


# --- drift ----------------------------------------------------------------------------------


def drifted(project: Project, **changes: str | None):
    sources = dict(SOURCES)
    for name, content in changes.items():
        path = f"toy/{name}.py"
        if content is None:
            del sources[path]
        else:
            sources[path] = content
    other = project.root / "toy-2.0.tar.gz"
    make_sdist(other, sources, top="toy-2.0")
    return reasons(project, "drift", "toy", "--against", other)


def test_same_release(project: Project):
    assert reasons(project, "drift", "toy", "--against", project.sdist) == (0, None, [])


def test_patches_that_apply_are_listed(project: Project):
    done = project.run("drift", "toy", "--against", project.sdist)
    assert done.out == f"toy  {PATCH}  applies\n"


def test_release_that_left_our_files_alone(project: Project):
    assert drifted(project, b="all new\n") == (0, None, [("", "pin-moved")])


def test_file_moved_on_elsewhere(project: Project):
    code, error, rows = drifted(project, a="# new first line\n" + SOURCES["toy/a.py"])
    assert (code, error) == (1, "SB0120")
    assert rows == [("", "pin-moved"), (PATCH, "preimage-changed")]


def test_surroundings_changed(project: Project):
    rows = drifted(project, a=SOURCES["toy/a.py"].replace("line_10 = 10", "line_10 = 11"))[2]
    assert rows[1:] == [(PATCH, "context-changed")]


def test_file_is_gone(project: Project):
    assert drifted(project, a=None)[2][1:] == [(PATCH, "context-changed")]


def test_change_is_already_there(project: Project):
    new = SOURCES["toy/a.py"].replace("line_9 = 9\n", "line_9 = 90\n") + "# more\n"
    assert drifted(project, a=new)[2][1:] == [(PATCH, "already-upstream")]


def test_drift_against_folder_and_checkout(project: Project):
    folder = project.root / "unpacked-toy-1.0.tar.gz" / "toy-1.0"
    assert reasons(project, "drift", "toy", "--against", folder) == (0, None, [])
    user_git(folder, "init", "-q")
    user_git(folder, "add", "-A", "-f")
    user_git(folder, "commit", "-q", "-m", "tag")
    assert reasons(project, "drift", "toy", "--against", folder) == (0, None, [])


def test_another_folder_is_refused_before_anything_is_copied(project: Project, monkeypatch):
    other = project.root / "other"
    (other / "toy").mkdir(parents=True)
    (other / "toy" / "b.py").write_text("")  # no patch touches it

    def copied(*args, **kwargs):
        pytest.fail("was copied")

    for name in ("copytree", "copy2"):
        monkeypatch.setattr(check.shutil, name, copied)
    monkeypatch.setattr(check.git, "take", copied)
    done = project.run("drift", "toy", "--against", other)
    assert (done.code, done.error_id) == (2, "SB0125")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "other"]):
        user_git(other, *words)
    done = project.run("drift", "toy", "--against", other)
    assert (done.code, done.error_id) == (2, "SB0125")


def test_of_a_folder_only_what_patches_touch_is_copied(project: Project, monkeypatch):
    folder = project.root / "unpacked-toy-1.0.tar.gz" / "toy-1.0"
    copied = []
    real = check.shutil.copy2
    monkeypatch.setattr(
        check.shutil, "copy2", lambda a, b, **kw: copied.append(Path(a).name) or real(a, b, **kw)
    )
    assert reasons(project, "drift", "toy", "--against", folder) == (0, None, [])
    assert copied == ["a.py"]
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 2.0\n")
    assert reasons(project, "drift", "toy", "--against", folder) == (0, None, [("", "pin-moved")])
    (folder / "toy/a.py").write_text("# new first line\n" + SOURCES["toy/a.py"])
    rows = reasons(project, "drift", "toy", "--against", folder)[2]
    assert rows == [("", "pin-moved"), (PATCH, "preimage-changed")]
    (folder / "PKG-INFO").unlink()
    rows = reasons(project, "drift", "toy", "--against", folder)[2]
    assert rows == [("", "pin-moved"), (PATCH, "preimage-changed")]


def test_drift_against_a_version(project: Project, monkeypatch):
    (project.root / "links").mkdir()
    make_sdist(project.root / "links/toy-2.0.tar.gz", SOURCES, top="toy-2.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(project.root / "links"))
    assert reasons(project, "drift", "toy", "--against", "2.0") == (0, None, [])
    assert project.run("drift", "toy", "--against", "3.0").error_id == "SB0104"


@pytest.mark.parametrize(("against", "error"), [("nowhere", "SB0104"), ("file", "SB0105")])
def test_drift_against_nothing(project: Project, against: str, error: str):
    if against == "file":
        against = project.root / "order"
        against.write_text("no archive")
    done = project.run("drift", "toy", "--against", against)
    assert (done.code, done.error_id) == (2, error)


def test_reasons_are_a_closed_list():
    assert set(check._DIFFERENT) | set(check._BAD_INPUT) | {"proof-stale"} <= {
        *check.REASONS,
        "series-invalid",
        "index-differs",
    }


# --- branches -------------------------------------------------------------------------------


def test_branch_has_the_snapshot_and_the_changes(project: Project):
    done = project.run("branches")
    assert done.code == 0, done.error
    name, first, second = done.out.split()
    repository = project.root / "build/branches.git"
    pin = pins.get(project.workspace, "toy")
    assert name == "toy/small"
    assert run_git(repository, "rev-list", "--reverse", name).split() == [first, second]
    assert run_git(repository, "rev-parse", f"{first}^{{tree}}") == pin.tree
    assert run_git(repository, "rev-parse", f"{second}^{{tree}}") == pin.trees["small"]
    message = run_git(repository, "log", "-1", "--format=%B", second)
    assert f"Pin: {first}" in message
    assert f"- {SUBJECT}" in message
    assert run_git(repository, "notes", "--ref=license", "show", first) == "Toy licence"


def test_branch_ids_repeat(project: Project):
    first = project.run("branches").out
    assert project.run("branches").out == first


def test_commits_of_others_on_a_branch_are_kept(project: Project, tmp_path):
    project.run("branches")
    repository = project.root / "build/branches.git"
    user_git(tmp_path, "clone", "-q", "-b", "toy/small", str(repository), "clone")
    user_git(tmp_path / "clone", "commit", "-q", "--allow-empty", "-m", "mine")
    user_git(tmp_path / "clone", "push", "-q")
    tip = run_git(repository, "rev-parse", "toy/small")
    done = project.run("branches")
    assert (done.code, done.error_id) == (2, "SB0121")
    assert run_git(repository, "rev-parse", "toy/small") == tip


def test_branch_of_an_edited_tree(project: Project):
    (project.tree() / "toy/a.py").write_text("edited\n")
    assert project.run("branches").error_id == "SB0114"


def test_git_failure_has_an_id(tmp_path):
    with pytest.raises(git.GitFailed) as caught:
        git.run(tmp_path, "log")
    assert caught.value.error_id == "SB0103"
    assert caught.value.exit_code == 2


def test_no_finding_is_explained_by_the_command_that_found_it(project: Project):
    for reason in {*check.REASONS, "series-invalid", "index-differs"} - {"pin-moved"}:
        if reason == "already-upstream":  # of drift alone
            continue
        with pytest.raises(SamebitsError) as caught:
            check.raise_for(Workspace.find(), [check.Finding("toy", PATCH, reason, "x")])
        assert "patch check" not in caught.value.hint
        assert problem(caught.value.hint) is None
    file = project.patches / PATCH
    file.write_text(file.read_text().replace("+line_9 = 90", "+line_9 = 91"))
    for verb in ("check", "apply"):
        assert project.run(verb, "toy").error.hint == f"git -C {project.root} diff patches/toy"
