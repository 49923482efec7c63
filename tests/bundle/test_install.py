"""`install.py` of a bundle: whole parts or nothing, one folder of its own, run again."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from samebits.bundle import archive, install
from samebits.bundle.wheels import File
from samebits.errors import catalog

HOST = {
    "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
    "machine": "linux-x86_64",
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
}
REQUIRED = {**HOST, "torch": "2.11.*+cu130"}
BIG = random.Random(0).randbytes(50_000)
PROJECT = {
    "samebits/hello.txt": b"hello\n",
    "samebits/cases/toy/evidence.json": b"{}\n",
    "site-packages/toy/__init__.py": b"def main():\n    print('toy runs')\n",
    "site-packages/toy-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
    "site-packages/toy-1.0.dist-info/entry_points.txt": b"[console_scripts]\ntoy = toy:main\n",
    "scripts/plain": b"#!python\nimport toy\ntoy.main()\n",
}


def pack(folder: Path, project: dict[str, bytes], check: str = "import toy") -> dict:
    """A bundle of two groups; `big` does not compress and takes three parts."""
    groups = {}
    for name, content, compress in (
        ("project", project, True),
        ("big:toy", {"samebits/build/big.bin": BIG}, False),
    ):
        files = [
            File(path, data, 0o755 if path.startswith("scripts/") else 0o644)
            for path, data in content.items()
        ]
        stem = name.replace(":", "-")
        groups[name] = {
            **archive.write(folder, stem, files, limit=21_000, compress=compress),
            "checks": [{"label": f"check of {name}", "code": check}],
        }
    manifest = {
        "format": install.FORMAT,
        "host": REQUIRED,
        "required": ["project"],
        "groups": groups,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    pack(folder, PROJECT)
    return folder


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "installed"


def run(bundle: Path, into: Path, asked: str | None = None, *, only_check=False, **host: str):
    install.install(bundle, into, asked, only_check=only_check, host={**HOST, **host})


def refused(error_id: str, *arguments, **options) -> str:
    with pytest.raises(install.Problem) as caught:
        run(*arguments, **options)
    assert caught.value.error_id == error_id
    return str(caught.value)


def inodes(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_ino for p in folder.rglob("*") if p.is_file()}


def test_files_commands_and_packages_are_as_packed(bundle, into):
    run(bundle, into)
    assert (into / "samebits/hello.txt").read_bytes() == b"hello\n"
    assert (into / "samebits/build/big.bin").read_bytes() == BIG
    assert len(list(bundle.glob("big-toy-*.part"))) == 3
    for command in ("toy", "plain"):
        done = subprocess.run([into / "venv/bin" / command], capture_output=True, text=True)
        assert done.stdout == "toy runs\n", done.stderr
    code = "from importlib import metadata; print(metadata.version('toy'))"
    python = into / "venv/bin/python"
    assert subprocess.run([python, "-c", code], capture_output=True).stdout == b"1.0\n"


def test_packages_of_the_installing_interpreter_come_last(bundle, into):
    run(bundle, into)
    code = "import sys, yaml; print(yaml.__file__); print(*sys.path, sep='\\n')"
    done = subprocess.run([into / "venv/bin/python", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    place, *path = done.stdout.splitlines()
    folders = [folder for folder in path if folder.endswith("-packages")]
    assert folders[0] == str(install.site_packages(into))
    assert place.startswith(tuple(folders[1:]))
    assert path.index(str(into / "samebits")) < path.index(folders[1])


def test_a_content_that_paths_share_is_carried_once_and_written_to_each(tmp_path):
    paths = {"samebits/build/one/big.bin": 0o755, "samebits/build/two/big.bin": 0o644}
    files = [File(path, BIG, mode) for path, mode in paths.items()]
    entry = archive.write(tmp_path, "twice", files, limit=1 << 20, compress=False)
    assert entry["size"] < 1.5 * len(BIG)
    assert list(install.members(tmp_path, entry)) == [(p, BIG, mode) for p, mode in paths.items()]


def test_an_installed_bundle_is_reused(bundle, into):
    run(bundle, into)
    before = inodes(into / "samebits")
    run(bundle, into)
    assert inodes(into / "samebits") == before


def test_the_parts_are_not_needed_again(bundle, into):
    run(bundle, into)
    for part in bundle.glob("*.part"):
        part.unlink()
    run(bundle, into)


@pytest.mark.parametrize("harm", ["changed", "shorter", "missing"])
def test_a_harmed_part_is_refused_before_anything_is_written(bundle, into, harm):
    part = bundle / "big-toy-01.part"
    content = bytearray(part.read_bytes())
    if harm == "missing":
        part.unlink()
    elif harm == "shorter":
        part.write_bytes(content[:-1])
    else:
        content[100] ^= 1
        part.write_bytes(content)
    text = refused("SB1101", bundle, into)
    assert "big-toy-01.part" in text and "hint: sha256sum " in text
    assert not into.exists()
    run(bundle, into, "project")  # its parts are whole
    assert not (into / "samebits/build").exists()


def test_a_manifest_of_another_form_is_refused(bundle, into):
    for text in ("", "{}", "[]", '{"format": 99}'):
        (bundle / "manifest.json").write_text(text)
        refused("SB1101", bundle, into)
    (bundle / "manifest.json").unlink()
    refused("SB1101", bundle, into)


def test_a_file_that_the_manifest_does_not_name_is_refused(bundle, into):
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["groups"]["project"]["files"]["samebits/hello.txt"][1] = "0" * 64
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    assert "samebits/hello.txt" in refused("SB1101", bundle, into)


@pytest.mark.parametrize("path", ["samebits/../../out", "/etc/out", "elsewhere/out", "samebits/"])
def test_no_path_leaves_the_folder(into, path):
    with pytest.raises(install.Problem):
        install.target(into, path)


def test_a_folder_of_others_is_left_alone(bundle, into):
    into.mkdir()
    (into / "precious").write_text("work")
    refused("SB1103", bundle, into)
    assert inodes(into).keys() == {str(into / "precious")}
    (into / install.MARKER).write_text("{}")
    refused("SB1103", bundle, into)


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.13.0+cpu"), ("torch", "2.11.0"), ("triton", "absent"), ("python", "3.10")],
)
def test_another_host_is_refused(bundle, into, name, version):
    text = refused("SB1102", bundle, into, **{name: version})
    assert f"{name} {version}" in text and f"{name} {REQUIRED[name]}" in text
    assert not into.exists()


def test_the_host_is_read_from_its_own_files(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('nothing is imported')\n")
    (package / "version.py").write_text("__version__ = '2.11.0+cu130'\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "from samebits.bundle import install; print(install.seen_host()['torch'])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(install.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=env
    )
    assert done.stdout == "2.11.0+cu130\n", done.stderr


def test_groups_are_chosen_by_name_or_by_what_is_before_a_colon(bundle, into):
    manifest = install.read_manifest(bundle)
    assert install.chosen_groups(manifest, None) == ["project", "big:toy"]
    assert install.chosen_groups(manifest, "big") == ["project", "big:toy"]
    assert install.chosen_groups(manifest, "") == ["project"]
    refused("SB1104", bundle, into, "bi")


def test_check_writes_nothing(bundle, into):
    run(bundle, into, only_check=True)
    assert not into.exists()
    (bundle / "big-toy-00.part").unlink()
    refused("SB1101", bundle, into, only_check=True)


def test_a_changed_file_is_moved_aside_and_unpacked_again(bundle, into, capsys):
    run(bundle, into)
    (into / "samebits/hello.txt").write_text("edited\n")
    run(bundle, into)
    assert (into / "samebits/hello.txt").read_bytes() == b"hello\n"
    assert (into / "changed-1/samebits/hello.txt").read_text() == "edited\n"
    (into / "samebits/hello.txt").write_text("again\n")
    run(bundle, into)
    assert (into / "changed-2/samebits/hello.txt").read_text() == "again\n"
    assert [path.name for path in (into / "samebits").glob("hello*")] == ["hello.txt"]
    assert "hello.txt" in capsys.readouterr().err


def test_results_of_runs_stay_where_they_are(bundle, into):
    run(bundle, into)
    (into / "samebits/cases/toy/evidence.json").write_text("proved\n")
    run(bundle, into)
    assert (into / "samebits/cases/toy/evidence.json").read_text() == "proved\n"


def test_a_newer_bundle_replaces_and_removes_what_the_older_one_wrote(bundle, into):
    run(bundle, into)
    newer = {path: data for path, data in PROJECT.items() if path != "samebits/hello.txt"}
    newer["samebits/cases/toy/evidence.json"] = b"{2}\n"
    (into / "samebits/cases/toy/evidence.json").write_text("proved\n")
    big = (into / "samebits/build/big.bin").stat().st_ino
    pack(bundle, newer)
    run(bundle, into)
    assert not (into / "samebits/hello.txt").exists()
    cases = into / "samebits/cases/toy"
    assert (cases / "evidence.json").read_text() == "{2}\n"
    kept = into / "changed-1/samebits/cases/toy/evidence.json"
    assert kept.read_text() == "proved\n"
    assert (into / "samebits/build/big.bin").stat().st_ino == big  # its group is the same


def test_a_package_that_cannot_be_imported_is_told_by_its_last_words(bundle, into):
    pack(bundle, PROJECT, check="import toy, not_there")
    text = refused("SB1105", bundle, into)
    assert "No module named 'not_there'" in text


def test_without_trials_nothing_is_imported(bundle, into):
    pack(bundle, PROJECT, check="import toy, not_there")
    install.install(bundle, into, None, only_check=False, host=HOST, trials=False)
    refused("SB1105", bundle, into)


def test_the_command_line_ends_with_what_to_run(bundle, into, monkeypatch, capsys):
    monkeypatch.setattr(install, "seen_host", lambda: HOST)
    monkeypatch.setattr(install, "__file__", str(bundle / "install.py"))
    assert install.main(["--into", str(into), "--check"]) == 0
    assert capsys.readouterr().out == "" and not into.exists()
    assert install.main(["--into", str(into)]) == 0
    assert capsys.readouterr().out.startswith(f"cd {into / 'samebits'} && ../venv/bin/samebits")
    (bundle / "manifest.json").unlink()
    assert install.main(["--into", str(into)]) == 2
    assert capsys.readouterr().err.startswith("SB1101 the bundle is not whole\n  seen: ")


def test_titles_are_those_of_the_catalog():
    assert {key: catalog()[key]["title"] for key in install.TITLES} == install.TITLES


def test_it_needs_nothing_but_the_standard_library(bundle):
    text = Path(install.__file__).read_text()
    (bundle / "install.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-I", "-S", bundle / "install.py", "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "--into" in done.stdout, done.stderr
