"""Patched trees without a repository: package folders and a listing that hashes to the tree id."""

import shutil
from pathlib import Path

import pytest

from samebits.errors import Refused
from samebits.patching import git, sparse, trees

FILES = {
    "toy/__init__.py": "",
    "toy/a.py": "a = 1\n",
    "toy/sub/b.py": "b = 1\n",
    "toy.egg-info/PKG-INFO": "Name: toy\n",
    "toy-extra/c.py": "c = 1\n",  # sorts before `toy/` in a tree, and after it by name
    "csrc/kernel.cu": "",
    "setup.py": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A sparse tree below `build/toy`, as an installed bundle has it."""
    work = tmp_path / "work"
    for name, text in FILES.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    (work / "toy/a.py").chmod(0o755)
    git.init(work)
    found = git.commit_all(work, "all")
    listing = {}
    for line in git.text(work, "ls-tree", "-r", "HEAD").splitlines():
        mode, _, rest = line.split(" ", 2)
        blob, path = rest.split("\t")
        listing[path] = (mode, blob)
    folder = tmp_path / "build/toy" / found
    for path in sparse.kept(listing):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(work / path, folder / path)
    sparse.listing_path(folder).write_text(sparse.write_listing(listing))
    return folder


def check(folder: Path) -> None:
    trees.verify("toy", "small", folder)


def test_packages_and_metadata_are_kept_and_verified_by_the_listing(tree):
    check(tree)
    kept = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert kept == {name for name in FILES if name.startswith(("toy/", "toy.egg-info/"))}


def test_what_running_leaves_behind_is_no_edit(tree):
    for name in ("toy/__pycache__/a.cpython-311.pyc", "toy/sub/b.f-1.py311.nbi"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("")
    check(tree)


@pytest.mark.parametrize("harm", ["changed", "mode", "missing", "more", "shadow", "link"])
def test_an_edit_is_refused(tree, harm):
    file = tree / "toy/sub/b.py"
    if harm == "changed":
        file.write_text("b = 2\n")
    elif harm == "mode":
        file.chmod(0o755)
    elif harm == "missing":
        file.unlink()
    elif harm == "more":
        (tree / "toy/sub/c.so").write_text("")
    elif harm == "shadow":
        (tree / "torch.py").write_text("")
    else:
        file.rename(tree.parent / "b.py")
        file.symlink_to(tree.parent / "b.py")
    with pytest.raises(Refused, match="SB0114"):
        check(tree)


def test_a_listing_of_another_tree_is_refused(tree):
    listing = sparse.listing_path(tree)
    text = listing.read_text()
    (tree / "toy/sub/b.py").write_text("b = 2\n")
    forged = sparse.read_listing(text)
    forged["toy/sub/b.py"] = ("100644", sparse.blob_id(b"b = 2\n"))
    for content in (sparse.write_listing(forged), "no listing\n"):
        listing.write_text(content)
        with pytest.raises(Refused, match="SB0114"):
            check(tree)
