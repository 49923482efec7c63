"""`samebits patch apply`, and the trees that engines run from."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from toy_project import PATCH, SOURCES, SUBJECT, Project, make_sdist, run_git, user_git

from samebits.doctor import machine
from samebits.errors import Refused
from samebits.patching import pins, trees


def test_tree_is_the_snapshot_then_one_commit_for_each_patch(project: Project):
    tree = project.tree()
    subjects = run_git(tree, "log", "--reverse", "--format=%s").splitlines()
    assert subjects == ["toy 1.0, unmodified", SUBJECT]
    assert run_git(tree, "rev-parse", "HEAD^{tree}") == tree.name
    assert "line_9 = 90\n" in (tree / "toy/a.py").read_text()
    assert (tree / "toy/_version.py").exists()  # the sdist's own .gitignore would drop it


def test_second_run_reuses_the_tree(project: Project):
    tree = project.tree()
    before = (tree / "toy/a.py").stat().st_ino
    assert project.tree() == tree
    assert (tree / "toy/a.py").stat().st_ino == before


def test_paths_for_engines(project: Project):
    tree = project.tree()
    assert trees.tree_path("toy", "small", project.workspace) == tree
    assert trees.python_paths("small", project.workspace) == [tree]
    record = trees.tree_record("toy", "small", project.workspace)
    assert record["source"] == "sdist"
    assert record["patches"] == [PATCH]


@pytest.mark.parametrize("inside", [True, False])
def test_paths_resolve_from_the_current_folder(project: Project, tmp_path, monkeypatch, inside):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(project.root if inside else elsewhere)
    printed = Path(project.run("apply", "toy").out.split()[2])
    assert printed.is_dir() and printed.is_absolute() != inside
    (row,) = json.loads(project.run("apply", "toy", "--json").out)
    assert row["path"] == str(printed.resolve())
    (row,) = json.loads(project.run("apply", "toy", "--edit", "--json").out)
    assert row["path"] == str(project.edit)


def test_a_patch_without_its_class_is_not_applied(project: Project):
    file = project.patches / PATCH
    file.write_text(file.read_text().replace("Patch-Class: hook\n", ""))
    done = project.run("apply", "toy")
    assert (done.code, done.error_id) == (2, "SB0109")
    assert "`Patch-Class` is missing" in done.error.seen
    assert project.run("apply", "toy", "--edit").code == 0  # where it is corrected


def test_a_limit_on_the_size_of_files_has_an_id(bare: Project):
    """Of a file that we write, and of one that git writes."""
    for limit in (512, 2048):
        done = subprocess.run(
            [sys.executable, "-m", "samebits", "patch", "--root", bare.root, "apply", "toy"],
            capture_output=True,
            text=True,
            # Python would leave its own compiled files cut short.
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            preexec_fn=lambda limit=limit: resource.setrlimit(
                resource.RLIMIT_FSIZE, (limit, limit)
            ),
        )
        assert (done.returncode, done.stderr[:7]) == (2, "SB0107 "), done.stderr
        assert not list((bare.root / "build/toy").glob(".building-*"))
        assert bare.cached.exists()


def test_missing_tree_names_the_command(project: Project):
    with pytest.raises(Refused) as caught:
        trees.tree_path("toy", "small", project.workspace)
    assert caught.value.error_id == "SB0115"
    assert caught.value.hint == "samebits patch apply toy --model small"


def test_changed_series_makes_the_old_tree_unusable(project: Project):
    project.tree()
    project.commit("norm: round once", "toy/b.py", "line_3 = 3\n", "line_3 = 30\n")
    assert project.export().code == 0
    with pytest.raises(Refused, match="SB0115"):
        trees.tree_path("toy", "small", project.workspace)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("toy/a.py", "edited = 1\n"),
        ("toy/new.py", "added = 1\n"),
        ("ignored/new.py", "added in a folder that upstream ignores\n"),
    ],
)
def test_edited_tree_is_refused_and_kept(project: Project, path: str, content: str):
    tree = project.tree()
    (tree / path).parent.mkdir(exist_ok=True)
    (tree / path).write_text(content)
    with pytest.raises(Refused) as caught:
        trees.tree_path("toy", "small", project.workspace)
    rooted = f"samebits patch --root {project.root} apply toy --model small --clean"
    for error, hint in (
        (caught.value, "samebits patch apply toy --model small --clean"),
        (project.run("apply", "toy").error, rooted),
    ):
        assert (error.error_id, error.hint) == ("SB0114", hint)
        assert path in error.seen
    assert (tree / path).read_text() == content


def test_commit_on_top_is_refused(project: Project):
    tree = project.tree()
    user_git(tree, "commit", "--allow-empty", "-m", "same tree, other commit")
    assert project.run("apply", "toy").code == 0  # the tree is what counts
    (tree / "toy/a.py").write_text("")
    user_git(tree, "commit", "-a", "-m", "another tree")
    assert project.run("apply", "toy").error_id == "SB0114"


def test_clean_keeps_the_edited_tree_aside(project: Project):
    tree = project.tree()
    (tree / "toy/a.py").write_text("edited = 1\n")
    assert project.run("apply", "toy", "--clean").code == 0
    assert "line_9 = 90\n" in (tree / "toy/a.py").read_text()
    aside = tree.with_name(f"{tree.name}.edited-1")
    assert (aside / "toy/a.py").read_text() == "edited = 1\n"


def test_running_a_tree_is_no_edit(project: Project):
    tree = project.tree()
    (tree / "toy/__pycache__").mkdir()
    (tree / "toy/__pycache__/a.cpython-311.pyc").write_bytes(b"\0")
    assert project.run("apply", "toy").code == 0


def test_patch_edited_by_hand(project: Project):
    file = project.patches / PATCH
    file.write_text(file.read_text().replace("+line_9 = 90", "+line_9 = 91"))
    done = project.run("apply", "toy")
    assert (done.code, done.error_id) == (2, "SB0112")
    assert PATCH in done.error.seen
    assert not list((project.root / "build/toy").glob(".building-*"))


def test_damaged_patch(project: Project):
    file = project.patches / PATCH
    file.write_text(file.read_text().replace("line_8 = 8", "line_8 = x"))
    assert project.run("apply", "toy").error_id == "SB0112"


def test_patch_for_another_file_is_refused_though_git_would_take_it(project: Project):
    file = project.patches / PATCH
    index = next(line for line in file.read_text().splitlines() if line.startswith("index "))
    file.write_text(file.read_text().replace(index, f"index {'a' * 40}{index[46:]}"))
    assert project.run("apply", "toy").error_id == "SB0111"


def test_series_that_names_a_missing_file(project: Project):
    (project.patches / "series/small").write_text("norm-no-such.patch\n")
    done = project.run("apply", "toy")
    assert (done.code, done.error_id) == (2, "SB0110")
    assert "norm-no-such.patch" in done.error.seen


def test_tree_that_is_not_the_recorded_one(project: Project):
    file = project.root / "patches/pins.yaml"
    recorded = project.tree().name
    file.write_text(file.read_text().replace(recorded, "f" * 40))
    done = project.run("apply", "toy")
    assert (done.code, done.error_id) == (1, "SB0113")


@pytest.mark.parametrize(
    "args", [("nothing",), ("plain",), ("toy", "--model", "huge"), ("toy", "--model", "../order")]
)
def test_unknown_names(project: Project, args):
    done = project.run("apply", *args)
    assert (done.code, done.error_id) == (2, "SB0102")
    assert "touch" not in done.error.hint  # a misspelt name must not become a series


def test_a_wrong_sdist_is_refused_though_the_tree_is_there(project: Project, tmp_path):
    project.tree()
    wrong = tmp_path / "wrong.tar.gz"
    wrong.write_bytes(b"x" * project.sdist.stat().st_size)
    for more in ((), ("--edit",), ("--edit",)):
        done = project.run("apply", "toy", "--from", wrong, *more)
        assert (done.code, done.error_id) == (2, "SB0105")
        assert project.run("apply", "toy", "--edit").code == 0


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"models": 1}'])
def test_a_damaged_record_of_a_tree_counts_as_missing(project: Project, text: str):
    tree = project.tree()
    record = tree.with_name(f"{tree.name}.json")
    whole = record.read_text()
    record.write_text(text)
    with pytest.raises(Refused, match="SB0115"):
        trees.tree_path("toy", "small", project.workspace)
    assert project.tree() == tree
    assert record.read_text() == whole


def read_only(code: int):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code), "build/locks")

    return refuse


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
@pytest.mark.parametrize(
    "args",
    [
        ("apply", "toy"),
        ("apply", "toy", "--edit"),
        ("check", "toy"),
        ("branches",),
        ("export", "toy", "--record"),
        ("drift", "toy", "--against", "SDIST"),
    ],
)
def test_a_checkout_that_cannot_be_written(project: Project, monkeypatch, args, code):
    before = sorted(project.root.rglob("*"))
    monkeypatch.setattr("samebits.patching.workspace.FileLock.acquire", read_only(code))
    done = project.run(*(project.sdist if arg == "SDIST" else arg for arg in args))
    assert (done.code, done.error_id) == (2, "SB0123")
    assert sorted(project.root.rglob("*")) == before  # refused before the work


def test_an_index_that_cannot_be_written(project: Project, monkeypatch):
    monkeypatch.setattr("samebits.files.write_atomic", read_only(errno.EROFS))
    assert project.run("export", "toy", "--record").code == 0  # nothing to write
    project.commit("norm: round once", "toy/b.py", "line_3 = 3\n", "line_3 = 30\n")
    assert project.export().error_id == "SB0123"


def test_doctor_compares_trees_with_pins_series_and_files(project: Project):
    def found():
        pin = pins.get(project.workspace, "toy")
        return [(f.check, f.severity) for f in machine._trees(project.workspace, pin)]

    assert found() == [("toy", "problem")]
    (project.root / "build/toy/left-over").mkdir(parents=True)
    assert found() == [("toy", "problem")]
    tree = project.tree()
    assert found() == [("toy", "ok")]
    (project.patches / "series/large").write_text("")
    pins.record_tree(project.workspace, "toy", "large", "a" * 40)
    assert found() == [("toy", "ok"), ("toy for large", "warning")]
    (tree / "toy/a.py").write_text("edited = 1\n")
    assert ("toy for small", "problem") in found()


def test_a_folder_that_is_no_checkout(project: Project, tmp_path):
    (project.root / "patches/pins.yaml").unlink()
    done = project.run("check")
    assert (done.code, done.error_id) == (2, "SB0124")
    assert done.error.hint == "samebits patch check"


def test_paths_in_hints_work_from_the_current_folder(project: Project, monkeypatch):
    from samebits.errors import word

    odd = project.root / "a folder; ls"
    odd.mkdir()
    monkeypatch.chdir(project.root)
    assert word(odd) == "'a folder; ls'"
    assert word(Path("-x")) == "./-x"
    monkeypatch.chdir(odd)
    assert word(project.root) == str(project.root)
    done = project.run("apply", "toy", "--model", "huge")
    assert done.error.hint == f"ls {project.patches / 'series'}"
    done = project.run("apply", "toy", "--checkout", odd)
    assert done.error.error_id == "SB0119"


def test_local_sdist(project: Project):
    project.cached.unlink()
    assert project.run("apply", "toy", "--from", project.sdist).code == 0
    assert project.cached.read_bytes() == project.sdist.read_bytes()


@pytest.mark.parametrize("kind", ["truncated", "wrong", "absent"])
def test_bad_local_sdist(project: Project, kind: str):
    project.cached.unlink()
    content = project.sdist.read_bytes()
    bad = project.root / "bad.tar.gz"
    if kind == "truncated":
        bad.write_bytes(content[:-10])
    elif kind == "wrong":
        bad.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = project.run("apply", "toy", "--from", bad)
    assert (done.code, done.error_id) == (2, "SB0105")
    assert ("truncated" in done.error.seen) == (kind == "truncated")
    assert not list(project.cached.parent.iterdir())
    assert not list((project.root / "build/toy").glob("*/toy"))


def test_cached_sdist_that_rotted_is_moved_aside(project: Project):
    good = project.cached.read_bytes()
    project.cached.write_bytes(good[:-9])
    assert project.run("apply", "toy", "--from", project.sdist).code == 0
    assert project.cached.read_bytes() == good
    aside = project.cached.with_name(project.cached.name + ".bad-1")
    assert aside.read_bytes() == good[:-9]


def test_snapshot_that_is_not_the_pinned_tree(project: Project):
    pins = project.root / "patches/pins.yaml"
    text = pins.read_text()
    tree = text.split("  tree: ")[1][:40]
    pins.write_text(text.replace(tree, "a" * 40))
    assert project.run("apply", "toy").error_id == "SB0101"


def checkout(project: Project, changes: dict[str, str]):
    """A checkout as a tag gives it: no generated file, more files than the sdist."""
    folder = project.root / "checkout"
    folder.mkdir()
    sources = {**SOURCES, "ci/run": "echo\n", ".gitattributes": "ci export-ignore\n", **changes}
    del sources["toy/_version.py"]
    for name, content in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    user_git(folder, "init", "-q")
    user_git(folder, "add", "-A")
    user_git(folder, "commit", "-q", "-m", "tag")
    return folder


def test_checkout_at_the_tag(project: Project):
    folder = checkout(project, {})
    (folder / "toy/a.py").write_text("a loose edit never enters\n")
    done = project.run("apply", "toy", "--checkout", folder, "--json")
    assert done.code == 0, done.error
    tree = project.root / json.loads(done.out)[0]["path"]
    assert "line_9 = 90\n" in (tree / "toy/a.py").read_text()
    assert (tree / "ci/run").exists()  # export-ignore drops nothing
    assert trees.tree_path("toy", "small", project.workspace) == tree
    record = trees.tree_record("toy", "small", project.workspace)
    assert record["source"] == "checkout"
    assert record["commit"] == run_git(folder, "rev-parse", "HEAD")


def test_checkout_of_another_commit(project: Project):
    folder = checkout(project, {"toy/a.py": "# moved on\n" + SOURCES["toy/a.py"]})
    done = project.run("apply", "toy", "--checkout", folder)
    assert (done.code, done.error_id) == (2, "SB0119")
    assert "toy/a.py" in done.error.seen


def test_checkout_of_another_commit_with_the_same_blobs(project: Project):
    folder = checkout(project, {"toy/b.py": "moved on, and no patch touches it"})
    pins = project.root / "patches/pins.yaml"
    pins.write_text(pins.read_text().replace("commit: null", f"commit: {'c' * 40}", 1))
    done = project.run("apply", "toy", "--checkout", folder)
    assert (done.code, done.error_id) == (2, "SB0119")


def test_recorded_tree_is_preferred_to_a_checkout(project: Project):
    other = project.run("apply", "toy", "--checkout", checkout(project, {})).out.split()[2]
    tree = project.tree()
    assert tree != project.root / other
    assert trees.tree_path("toy", "small", project.workspace) == tree


def test_folder_that_is_no_checkout(project: Project):
    assert project.run("apply", "toy", "--checkout", project.root).error_id == "SB0119"


def test_two_runs_at_once(project: Project):
    program = "from samebits.cli.patch import app; app()"
    command = [sys.executable, "-c", program, "--root", str(project.root), "apply", "toy"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 1
    names = [path.name for path in (project.root / "build/toy").iterdir()]
    assert len([name for name in names if len(name) == 40]) == 1


def test_a_run_that_waits_too_long(project: Project, monkeypatch):
    with (
        project.workspace.lock("toy"),
        pytest.raises(Refused) as caught,
        project.workspace.lock("toy", wait_seconds=0.05),
    ):
        pass
    assert caught.value.error_id == "SB0108"
    assert caught.value.seen.endswith("toy.lock is held by another process after 0.05 s")
    assert caught.value.hint == f"fuser -v {project.root}/build/locks/toy.lock"
    monkeypatch.chdir(project.root)
    with (
        project.workspace.lock("toy"),
        pytest.raises(Refused) as caught,
        project.workspace.lock("toy", wait_seconds=0),
    ):
        pass
    assert caught.value.seen.endswith("is held by another process")
    assert caught.value.hint == f"fuser -v {project.root}/build/locks/toy.lock"


def test_rest_of_a_killed_run_is_cleared(project: Project):
    left = project.root / "build/toy/.building-dead/tree"
    left.mkdir(parents=True)
    project.tree()
    assert not left.exists()


def test_edit_tree_is_never_built_over(project: Project):
    assert project.run("apply", "toy", "--edit").code == 0
    (project.edit / "toy/a.py").write_text("work in progress\n")
    assert project.run("apply", "toy", "--edit").code == 0
    assert (project.edit / "toy/a.py").read_text() == "work in progress\n"
    assert project.run("apply", "toy", "--edit", "--clean").code == 0
    aside = project.edit.with_name("toy.edited-1")
    assert (aside / "toy/a.py").read_text() == "work in progress\n"
    assert "line_9 = 90\n" in (project.edit / "toy/a.py").read_text()


def test_sdist_that_leaves_its_folder_is_not_unpacked(project: Project, tmp_path):
    bad = tmp_path / "bad.tar.gz"
    make_sdist(bad, {"a.py": ""}, top="x/../../outside")
    with pytest.raises(Exception, match=r"outside"):
        trees.unpack(bad, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_patch_verbs_need_no_torch():
    program = "import sys, samebits.cli.patch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_user_configuration_of_git_changes_nothing(project: Project, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        "[core]\n\tautocrlf = true\n[diff]\n\tnoprefix = true\n\tmnemonicPrefix = true\n"
        "\tcontext = 7\n[format]\n\tsignature = mine\n"
        "\theaders = X-Mine: yes\n"
        "[commit]\n\tgpgSign = true\n[user]\n\tname = Someone\n\temail = someone@example.org\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Someone")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert project.run("check", "toy").code == 0
    assert run_git(project.tree(), "log", "-1", "--format=%cn") == "samebits"


def test_wrong_way_round_options(project: Project):
    assert project.run("apply", "--no-such-option").code == 2
