"""Commits to files and back, the same bytes every time; nothing is lost."""

import shutil

import pytest
from toy_project import MESSAGE, PATCH, SUBJECT, Project, run_git, user_git

from samebits.patching import git, pins

SECOND = "norm: round once"
SECOND_PATCH = "norm-round-once.patch"


def test_round_trip_gives_the_same_bytes_and_tree(project: Project):
    project.commit(SECOND, "toy/a.py", "line_30 = 30\n", "line_30 = 3\n")
    assert project.export().code == 0
    names = ["order", PATCH, SECOND_PATCH]
    before = {name: (project.patches / name).read_bytes() for name in names}
    tree = run_git(project.edit, "rev-parse", "HEAD^{tree}")
    assert project.run("apply", "toy", "--edit", "--clean").code == 0
    assert run_git(project.edit, "rev-parse", "HEAD^{tree}") == tree
    assert project.export().code == 0
    assert {name: (project.patches / name).read_bytes() for name in names} == before


def test_nothing_to_do(project: Project):
    done = project.run("export", "toy")
    assert done.code == 0
    assert done.out == f"{PATCH} same\n"


def test_dry_run_says_what_differs_and_writes_nothing(project: Project):
    before = (project.patches / "order").read_text()
    project.commit(SECOND, "toy/b.py", "line_3 = 3\n", "line_3 = 30\n")
    done = project.run("export", "toy")
    assert (done.code, done.error_id) == (1, "SB0116")
    assert SECOND_PATCH in done.error.seen
    assert not (project.patches / SECOND_PATCH).exists()
    assert (project.patches / "order").read_text() == before


def test_amended_commit_rewrites_its_file_only(project: Project):
    project.commit(SECOND, "toy/b.py", "line_3 = 3\n", "line_3 = 30\n")
    project.export()
    first = (project.patches / PATCH).read_bytes()
    (project.edit / "toy/b.py").write_text("all new\n")
    git.run(project.edit, "commit", "-q", "--amend", "-a", "--no-edit")
    done = project.export()
    assert done.out.splitlines() == [f"{PATCH} same", f"{SECOND_PATCH} changed"]
    assert (project.patches / PATCH).read_bytes() == first


def test_series_takes_only_what_is_named(project: Project):
    (project.patches / "series/large").write_text("")
    project.commit(SECOND, "toy/b.py", "line_3 = 3\n", "line_3 = 30\n")
    assert project.run("export", "toy", "--write", "--model", "large").code == 0
    assert (project.patches / "series/large").read_text() == f"{SECOND_PATCH}\n"
    assert (project.patches / "series/small").read_text() == f"# models\n{PATCH}\n"


def test_bad_header_writes_nothing(project: Project):
    project.commit(SECOND, "toy/b.py", "line_3", "line_4", message="{subject}\n\nno header\n")
    done = project.export()
    assert (done.code, done.error_id) == (2, "SB0109")
    assert not (project.patches / SECOND_PATCH).exists()


@pytest.mark.parametrize("loose", ["changed", "new"])
def test_loose_changes(project: Project, loose: str):
    project.run("apply", "toy", "--edit")
    (project.edit / ("toy/a.py" if loose == "changed" else "toy/new.py")).write_text("x = 1\n")
    done = project.export()
    assert (done.code, done.error_id) == (2, "SB0118")


def test_merges(project: Project):
    user_git(project.edit, "checkout", "-q", "-b", "side", "HEAD~1")
    user_git(project.edit, "commit", "-q", "--allow-empty", "-m", "side")
    user_git(project.edit, "checkout", "-q", "-")
    user_git(project.edit, "merge", "-q", "--no-ff", "-m", "merge", "side")
    assert project.export().error_id == "SB0118"


def test_two_commits_of_one_subject(project: Project):
    project.commit(SECOND, "toy/b.py", "line_3 = 3\n", "line_3 = 30\n")
    project.commit(SECOND, "toy/b.py", "line_4 = 4\n", "line_4 = 40\n")
    assert project.export().error_id == "SB0118"


def test_tree_of_another_release(project: Project, tmp_path):
    (tmp_path / "a.py").write_text("")
    git.init(tmp_path)
    git.commit_all(tmp_path, "another release")
    assert project.run("export", "toy", "--from", tmp_path).error_id == "SB0118"
    assert project.run("export", "toy", "--from", tmp_path / "absent").error_id == "SB0118"


def test_a_patch_is_removed_only_when_named(project: Project):
    git.run(project.edit, "reset", "-q", "--hard", "HEAD~1")
    done = project.export()
    assert (done.code, done.error_id) == (2, "SB0117")
    assert f"--drop {PATCH}" in done.error.hint
    assert (project.patches / PATCH).exists()
    assert project.export("--drop", PATCH).code == 0
    assert not (project.patches / PATCH).exists()
    assert PATCH not in (project.patches / "order").read_text()
    assert PATCH not in (project.patches / "series/small").read_text()


def test_record_changes_one_line(project: Project):
    pins_file = project.root / "patches/pins.yaml"
    before = pins_file.read_text()
    old = pins.get(project.workspace, "toy").trees["small"]
    project.commit(SECOND, "toy/b.py", "line_3 = 3\n", "line_3 = 30\n")
    assert project.export("--record").code == 0
    new = pins.get(project.workspace, "toy").trees["small"]
    assert new != old
    assert pins_file.read_text() == before.replace(old, new)
    assert "# first comment" in before
    assert "# kept comment" in before


def test_record_adds_a_model(project: Project):
    (project.patches / "series/large").write_text("")
    assert project.run("export", "toy", "--record").code == 0
    trees = pins.get(project.workspace, "toy").trees
    assert trees["large"] == pins.get(project.workspace, "toy").tree
    assert trees["small"] != trees["large"]
    assert pins.get(project.workspace, "plain").version == "2.0"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("license: MIT\n  license_file", "colour: red\n  license_file"),
        ("  size: ", "  size: 0x"),
        ("  sha256: ", "  sha256: z"),
        ("sdist: toy-1.0.tar.gz", "sdist: ../toy-1.0.tar.gz"),
        ("# first comment\n", "- a list\n"),
        ("    small: ", "    small: z"),
    ],
)
def test_bad_pin_file(project: Project, old: str, new: str):
    path = project.root / "patches/pins.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    done = project.run("apply", "toy")
    assert (done.code, done.error_id) == (2, "SB0101")


def test_id_that_looks_like_a_number_stays_text(project: Project):
    path = project.root / "patches/pins.yaml"
    tree = pins.get(project.workspace, "toy").tree
    path.write_text(path.read_text().replace(tree, "1234567890" * 4))
    assert pins.get(project.workspace, "toy").tree == "1234567890" * 4


def test_index_is_written(project: Project):
    text = (project.root / "patches/README.md").read_text()
    assert text.startswith("# Patches\n")
    assert f"(toy/{PATCH})" in text
    assert SUBJECT.split(": ")[0] in MESSAGE.format(subject=SUBJECT)


def test_an_export_without_an_edit_tree_says_how_to_get_one(project: Project):
    shutil.rmtree(project.edit)
    done = project.run("export", "toy")
    assert (done.code, done.error_id) == (2, "SB0118")
    assert done.error.hint == f"samebits patch --root {project.root} apply toy --edit"


@pytest.mark.parametrize("name", ["../small", "a/b", "", "-x"])
def test_a_series_is_named_like_a_file(project: Project, name: str):
    done = project.run("export", "toy", "--write", f"--model={name}")
    assert (done.code, done.error_id) == (2, "SB0102")
    assert sorted(p.name for p in (project.patches / "series").iterdir()) == ["small"]
