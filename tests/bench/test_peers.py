"""What Gated DeltaNet's benchmarks are compared with: fetched by a script, rows with versions."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest

from samebits import env
from samebits.bench import gpu_gdn_fla

SCRIPTS = Path(__file__).parents[2] / "scripts"


def peers(*arguments):
    command = [str(SCRIPTS / "peers.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("a", "3.12", "more")])
def test_other_arguments_are_refused(arguments):
    done = peers(*arguments)
    assert done.returncode == 2 and "peers" in done.stderr


def test_a_folder_of_somebody_else_stays_as_it_is(tmp_path):
    (tmp_path / "mine").write_text("kept")
    done = peers(tmp_path)
    assert done.returncode == 2 and f"{tmp_path} exists" in done.stderr
    assert [x.name for x in tmp_path.iterdir()] == ["mine"]


def test_every_package_has_one_version():
    lines = (SCRIPTS / "peers.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert {"fla-core", "flash-qla", "tilelang"} <= {pin.partition("==")[0] for pin in pins}
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", pin) for pin in pins)


@pytest.mark.parametrize(
    ("name", "package"), [("fla chunk", "fla-core"), (gpu_gdn_fla.FLASH_QLA, "flash-qla")]
)
def test_a_row_has_the_version_of_the_other_side(monkeypatch, name, package):
    monkeypatch.setattr(env, "chip", lambda: "a chip")
    monkeypatch.setattr(importlib.metadata, "version", {package: "1.2"}.__getitem__)
    found = gpu_gdn_fla.row("work", 1.0, name, 2.0, None)
    assert found["against"] == {"name": name, "time": 2.0, "version": "1.2"}


def test_a_row_without_an_installed_package_has_no_version(monkeypatch):
    monkeypatch.setattr(env, "chip", lambda: "a chip")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    found = gpu_gdn_fla.row("work", 1.0, "fla chunk", 2.0, None)
    assert found["against"] == {"name": "fla chunk", "time": 2.0}
