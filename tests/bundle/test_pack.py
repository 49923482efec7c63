"""What a bundle is packed from: the lock, wheels, archives, this project and its trees."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from samebits import recipe
from samebits.bundle import archive, install, pack, wheels
from samebits.bundle.wheels import File
from samebits.errors import Refused
from samebits.patching.workspace import Workspace

ROOT = Path(__file__).parents[2]


def make_wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    """A wheel of `name` 1.0 for any platform."""
    info = f"{name}-1.0.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for member, text in {**files, **metadata}.items():
            file.writestr(member, text)
    return path


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "scripts").mkdir()
    return Workspace(tmp_path)


def lock(workspace: Workspace, text: str) -> None:
    (workspace.root / wheels.LOCK).write_text(text)


def test_the_lock_has_the_versions_that_cpu_cases_run_with():
    pinned = set((ROOT / "scripts/requirements.lock").read_text().split("\n"))
    groups = wheels.read_lock(Workspace(ROOT))
    assert {"core", "common", "cpu", "verl-deps", "ray"} == groups.keys()
    locked = {package.line for group in groups.values() for package in group}
    assert locked - pinned == set()
    assert not {line for line in locked if line.startswith(("torch==", "triton=="))}


def test_patterns_below_a_package_leave_files_out(workspace):
    lock(workspace, "# heading\n\n# [core] words\na==1.0\n# without a/x/* b\nb-c==2\n")
    (packages,) = wheels.read_lock(workspace).values()
    assert packages == [wheels.Locked("a==1.0", ("a/x/*", "b")), wheels.Locked("b-c==2")]
    assert packages[1].key == "b-c==2"


@pytest.mark.parametrize("text", ["a==1\n", "# [core]\na>=1\n", "# [core]\n a==1\n"])
def test_a_line_that_is_not_understood_is_refused(workspace, text):
    lock(workspace, text)
    with pytest.raises(Refused, match="SB1106"):
        wheels.read_lock(workspace)


def test_wheels_come_through_pip_and_are_kept(workspace, tmp_path, monkeypatch):
    offered = tmp_path / "offered"
    offered.mkdir()
    made = make_wheel(offered, "toy_thing", {"toy_thing.py": ""})
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(offered)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    packages = [wheels.Locked("Toy.Thing==1.0")]
    (found,) = wheels.fetch(workspace, "3.12", packages)
    assert found.read_bytes() == made.read_bytes()
    made.unlink()
    assert wheels.fetch(workspace, "3.12", packages) == [found]
    with pytest.raises(Refused, match="SB1107"):
        wheels.fetch(workspace, "3.12", [wheels.Locked("toy-other==1.0")])


def test_files_of_a_wheel_go_where_an_installer_puts_them(tmp_path):
    names = [
        "toy/__init__.py",
        "toy/servers/big",
        "toy-1.0.data/scripts/run",
        "toy-1.0.data/purelib/toy/pure.py",
        "toy-1.0.data/headers/toy.h",
    ]
    wheel = make_wheel(tmp_path, "toy", dict.fromkeys(names, "x"))
    placed = {file.path: file.mode for file in wheels.layout(wheel, ("toy/servers/*",))}
    info = {f"site-packages/toy-1.0.dist-info/{n}" for n in ("METADATA", "WHEEL", "RECORD")}
    plain = {"site-packages/toy/__init__.py", "site-packages/toy/pure.py"}
    assert placed.keys() == info | plain | {"scripts/run"}
    assert placed["scripts/run"] == 0o755 and placed["site-packages/toy/pure.py"] == 0o644


def test_the_same_files_give_the_same_parts(tmp_path):
    files = [File(f"samebits/{name}", name.encode() * 5000, 0o755) for name in "cab"]
    rows = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        rows.append(archive.write(folder, "x", files, limit=100, compress=True))
        files.reverse()
    assert rows[0] == rows[1]
    assert [part["size"] for part in rows[0]["parts"][:-1]] == [100] * (len(rows[0]["parts"]) - 1)
    assert sum(part["size"] for part in rows[0]["parts"]) == rows[0]["size"]


def test_parts_are_reused_while_they_are_whole_and_cut_alike(tmp_path):
    files = [File("samebits/a", b"a" * 1000)]

    def write(old, limit=4000, content=files):
        return archive.write(tmp_path, "x", content, limit=limit, compress=False, old=old)

    first = write(None)
    part = tmp_path / first["parts"][0]["name"]
    inode = part.stat().st_ino
    assert write(first) == first and part.stat().st_ino == inode
    assert len(write(first, limit=3000)["parts"]) > len(first["parts"])
    first = write(None)
    part.write_bytes(b"")
    assert write(first) == first and part.stat().st_size == first["parts"][0]["size"]
    assert write(first, content=[File("samebits/a", b"b")])["sha256"] != first["sha256"]


def test_two_files_for_one_path_are_refused(tmp_path):
    same = [File("samebits/a", b"a"), File("samebits/a", b"a")]
    assert len(archive.write(tmp_path, "x", same, limit=99, compress=True)["files"]) == 1
    with pytest.raises(Refused, match="SB1108"):
        archive.write(
            tmp_path, "x", [File("samebits/a", b"a"), File("samebits/a", b"b")],
            limit=99, compress=True,
        )  # fmt: skip


def test_an_unknown_group_is_refused(tmp_path):
    options = pack.Options(tmp_path, pack.MIB, "3.12", ("vllm-ex",), ("qwen3-tiny",), "sm90")
    with pytest.raises(Refused, match="SB1104"):
        pack.pack(Workspace(ROOT), options)


def test_cases_with_the_same_weights_share_a_group():
    cases = [recipe.load(name) for name in recipe.known_cases()]
    carried = pack._carried(cases)
    served = [case.case for group in carried.values() for case in group]
    assert sorted(served) == sorted(c.case for c in cases if c.source["kind"] == "gguf-wheel")
    hashes = [group[0].source["wheel_sha256"] for group in carried.values()]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.slow
def test_the_packed_project_runs_from_where_it_is_installed(tmp_path):
    """The real project and the trees of one case: packed, installed and asked for its cases."""
    out, into = tmp_path / "bundle", tmp_path / "installed"
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    options = pack.Options(out, 2 * pack.MIB, python, ("project",), ("smollm2-135m",), "sm90")
    manifest = pack.pack(Workspace(ROOT), options)
    assert len(manifest["groups"]["project"]["parts"]) > 1
    host = {name: re.sub(r"\*", "0", text) for name, text in manifest["host"].items()}
    install.install(out, into, None, only_check=False, host=host)
    command = [into / "venv/bin/samebits", "case", "list", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {row["case"] for row in json.loads(done.stdout)} == set(recipe.known_cases())
    (tree,) = (into / "samebits/build/vllm").glob("*/")
    assert not (tree / ".git").exists() and not (tree / "csrc").exists()
    (tree / "vllm/version.py").write_text("")
    entry = manifest["groups"]["project"]["checks"][0]
    with pytest.raises(install.Problem, match="SB0114"):
        install.run_check(into, entry["label"], entry["code"])


def test_one_run_at_a_time_packs_into_a_folder(workspace, tmp_path, monkeypatch):
    options = pack.Options(tmp_path / "out", pack.MIB, "3.12", None, (), None)
    asked = []

    def inner(*_):
        if not asked:
            asked.append(1)
            with pytest.raises(Refused, match="SB0108"):
                pack.pack(workspace, options)
        return {}

    monkeypatch.setattr(pack, "_pack", inner)
    assert pack.pack(workspace, options) == {} and asked


def test_extensions_of_two_trees_are_loaded_by_two_processes():
    paths = [f"samebits/build/vllm/{tree}/vllm/{name}.so" for tree in "ab" for name in ("_C", "x")]
    checks = pack._loads("vllm-ext", [File(path, b"") for path in paths])
    assert [c["label"].split(",")[0][-12:] for c in checks] == ["build/vllm/a", "build/vllm/b"]
    for check, tree in zip(checks, "ab", strict=True):
        assert check["code"].count("build/vllm/") == 2
        assert check["code"].count(f"build/vllm/{tree}/vllm/") == 2
