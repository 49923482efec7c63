"""A small upstream, `toy` 1.0, with one patch, in a project folder of its own."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samebits.cli.patch import app
from samebits.errors import SamebitsError
from samebits.patching import git
from samebits.patching.workspace import Workspace

LINES = "".join(f"line_{i} = {i}\n" for i in range(40))
SOURCES = {
    "toy/a.py": LINES,
    "toy/b.py": LINES,
    "toy/_version.py": "version = 1\n",
    ".gitignore": "_version.py\nignored/\n",
    "LICENSE": "Toy licence\n",
}
MESSAGE = """{subject}

Mismatch: Decode and prefill cut the same sum at different places, so that
their bits differ.

Change: The builder asks `samebits.hooks.toy.partition` for the length.

Why a patch: The length is a local constant that no option reaches.

Patch-Class: hook
Origin: samebits
Contract: attention.partition
Switch: SAMEBITS_ARITHMETIC (default aligned)
Runs-In: rollout, after worker start
Proof: tests/test_toy.py::test_equal
Cost: not measured
Upstream-Status: not-yet (no contract upstream)
Remove-When: the builder takes the length as an argument
Refreshed: v1.0 2026-01-31
Signed-off-by: Full Name <name@example.org>
"""
SUBJECT = "attn: take partitions from the contract"
PATCH = "attn-take-partitions-from-the-contract.patch"


@dataclass
class Result:
    code: int
    out: str
    error: SamebitsError | None

    @property
    def error_id(self) -> str | None:
        return self.error.error_id if self.error else None


@dataclass
class Project:
    """A checkout with one upstream; `run` is the command line."""

    root: Path

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.root)

    @property
    def patches(self) -> Path:
        return self.root / "patches" / "toy"

    @property
    def edit(self) -> Path:
        return self.root / "build" / "edit" / "toy"

    @property
    def sdist(self) -> Path:
        return self.root / "toy-1.0.tar.gz"

    @property
    def cached(self) -> Path:
        return self.root / "build" / "sdist" / "toy-1.0.tar.gz"

    def run(self, *args: object) -> Result:
        done = CliRunner().invoke(app, ["--root", str(self.root), *map(str, args)])
        if done.exception is None or isinstance(done.exception, SystemExit):
            return Result(done.exit_code, done.stdout, None)
        if not isinstance(done.exception, SamebitsError):
            raise done.exception
        return Result(done.exception.exit_code, done.stdout, done.exception)

    def tree(self, model: str = "small") -> Path:
        done = self.run("apply", "toy", "--model", model)
        assert done.code == 0, done.error
        return self.root / done.out.split()[2]

    def commit(self, subject: str, path: str, old: str, new: str, message: str = MESSAGE) -> None:
        """Commit one replacement in the edit tree."""
        if not self.edit.exists():
            assert self.run("apply", "toy", "--edit").code == 0
        file = self.edit / path
        text = file.read_text() if file.exists() else ""
        assert old in text
        file.write_text(text.replace(old, new, 1) if old else new)
        git.commit_all(self.edit, message.format(subject=subject))

    def export(self, *args: object) -> Result:
        return self.run("export", "toy", "--write", "--model", "small", *args)


def make_sdist(path: Path, sources: dict[str, str], top: str = "toy-1.0") -> None:
    folder = path.parent / f"unpacked-{path.name}" / top
    for name, content in sources.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=top)


def tree_of(sources: dict[str, str], folder: Path) -> str:
    for name, content in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    git.init(folder)
    return git.commit_all(folder, "sources")


def make_bare(folder: Path) -> Project:
    root = folder / "project"
    (root / "patches" / "toy" / "series").mkdir(parents=True)
    make_sdist(root / "toy-1.0.tar.gz", SOURCES)
    content = (root / "toy-1.0.tar.gz").read_bytes()
    (root / "patches" / "pins.yaml").write_text(f"""# first comment
toy:
  distribution: toy
  version: 1.0
  sdist: toy-1.0.tar.gz
  sha256: {hashlib.sha256(content).hexdigest()}
  size: {len(content)}
  repository: https://example.org/toy
  tag: v1.0
  commit: null  # kept comment
  license: MIT
  license_file: toy/LICENSE
  tree: {tree_of(SOURCES, folder / "plain")}
  trees: {{}}

plain:
  distribution: plain
  version: 2.0
  sdist: plain-2.0.tar.gz
  sha256: {"0" * 64}
  size: 1
  repository: https://example.org/plain
  tag: v2.0
  commit: null
  license: MIT
  tree: {"1" * 40}
""")
    (root / "patches" / "toy" / "LICENSE").write_text("Toy licence\n")
    (root / "patches" / "toy" / "series" / "small").write_text("# models\n")
    (root / "patches" / "README.md").write_text("# Patches\n")
    (root / "tests").mkdir()
    (root / "tests" / "test_toy.py").write_text("def test_equal():\n    pass\n")
    project = Project(root)
    cached = project.cached
    cached.parent.mkdir(parents=True)
    cached.write_bytes(content)
    return project


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders that `bare` and `project` copy; made once, because git is slow to start."""
    bare = make_bare(tmp_path_factory.mktemp("bare"))
    patched = copied(bare.root, tmp_path_factory.mktemp("patched"))
    patched.commit(SUBJECT, "toy/a.py", "line_9 = 9\n", "line_9 = 90\n")
    assert patched.export("--record").code == 0
    return {"bare": bare.root, "project": patched.root}


def copied(template: Path, folder: Path) -> Project:
    return Project(Path(shutil.copytree(template, folder / "project", symlinks=True)))


@pytest.fixture
def bare(templates: dict[str, Path], tmp_path: Path) -> Project:
    """The upstream pinned, its sdist beside the project, no patch yet."""
    return copied(templates["bare"], tmp_path)


@pytest.fixture
def project(templates: dict[str, Path], tmp_path: Path) -> Project:
    """As `bare`, with one patch exported and its tree recorded."""
    return copied(templates["project"], tmp_path)


def run_git(folder: Path, *args: str) -> str:
    return git.text(folder, *args)


def user_git(folder: Path, *args: str) -> None:
    """Git as a user runs it, for checkouts that tests pass in."""
    identity = ["-c", "user.name=Someone", "-c", "user.email=someone@example.org"]
    subprocess.run(["git", *identity, "-C", str(folder), *args], check=True, capture_output=True)
