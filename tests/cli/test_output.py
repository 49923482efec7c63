"""What verbs print: one form of help, of exit codes, of JSON; tables that say what they count."""

import errno
import importlib
import json
import re
import subprocess
import types

import pytest

from samebits import bench, cases, cli
from samebits.patching.workspace import Workspace

GROUPS = [[], ["patch"], ["contract"], ["case"], ["bench"]]
LEAVES = [["patch", "apply"], ["case", "show"], ["bench", "run"], *([v] for v in cli.VERBS)]


def text(capsys, *args: str, code: int = 0) -> str:
    assert cli.run(args) == code
    return capsys.readouterr().out


@pytest.fixture
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("verb", GROUPS, ids=" ".join)
def test_no_summary_is_cut(verb, width, capsys):
    listed = text(capsys, *verb, "--help").partition("Commands:")[2]
    assert listed and "..." not in listed


@pytest.mark.parametrize("verb", [*GROUPS, *LEAVES], ids=" ".join)
def test_help_is_plain_and_names_every_exit_code(verb, width, capsys):
    shown = text(capsys, *verb, "--help")
    assert not re.search("[\u2500-\u257f]", shown)
    assert " ".join(shown.split()).endswith(cli.EXIT_CODES)


def test_the_first_line_of_help_says_what_it_is_for(capsys):
    assert "log-probabilities, and" in text(capsys, "--help").splitlines()[2]


def test_targets_of_make_are_listed_in_columns():
    root = Workspace.find().root
    listed = subprocess.run(["make", "-s", "help"], cwd=root, capture_output=True, text=True)
    rows = [line for line in listed.stdout.splitlines() if line.startswith("  make ")]
    assert len(rows) > 8
    assert len({re.match(r"  make \S+ +", row).end() for row in rows}) == 1


def test_a_case_is_shown_as_a_table(capsys):
    shown = text(capsys, "case", "show", "qwen3-tiny")
    assert not set("[]{}'") & set(shown)
    assert re.search(r"^trainer TP +1, 2 *$", shown, re.MULTILINE)


class Evidence:
    """A verified statement with a leg of bits and the leg of distances."""

    status, stale, reproductions, scope = "EQUAL", (), 0, ""

    statement = types.SimpleNamespace(
        predicate={
            "claim": {"not_covered": []},
            "environment": {"happenstance": {"finished": "2026-01-01T00:00:00"}},
        }
    )

    def as_dict(self):
        legs = {"A": {"tokens": 1320, "mismatches": 0}, "O": {"tokens": 486, "mismatches": 0}}
        return {"legs": legs}


def test_legs_are_never_summed_and_distances_are_no_mismatches(monkeypatch, capsys):
    monkeypatch.setattr("samebits.evidence.verify", lambda case: Evidence())
    found = cases.status("qwen3-tiny")
    assert found.mismatches == {"A": 0}
    assert found.legs() == ["A 0 of 1,320", "O (distances of 486)"]
    many = cases.Status("toy", "DIFFERENT", {"A": 9, "B": 9}, {"A": 3, "B": 4}, [], [], None)
    monkeypatch.setattr(cases, "all_statuses", lambda: [many])
    shown = text(capsys, "case", "list")
    assert "A 3 of 9" in shown and "B 4 of 9" in shown and "7" not in shown


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "cases").mkdir()
    monkeypatch.setattr(Workspace, "find", classmethod(lambda cls: Workspace(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cases"


ROW = {
    "work": "gemm 64x64",
    "ours": 12.5,
    "unit": "us",
    "against": {"name": "torch", "time": 10.0},
    "ratio": 1.25,
    "target": 2.0,
    "met": True,
    "hardware": "1 x NVIDIA H200",
    "date": "2026-01-01",
}


def test_rows_of_every_machine_are_shown(folder, capsys):
    assert json.loads(text(capsys, "bench", "show", "--json", code=3)) == []
    for name, hardware in (("bench.json", "a CPU"), ("bench-h200.json", "1 x NVIDIA H200")):
        (folder / name).write_text(json.dumps([ROW | {"hardware": hardware}]))
    rows = json.loads(text(capsys, "bench", "show", "--json"))
    assert {row["hardware"] for row in rows} == {"a CPU", "1 x NVIDIA H200"}


def test_pages_show_both_machines_and_sum_up_many_rows(folder, monkeypatch):
    pages = importlib.import_module("pages")
    assert pages.bench_table() == "Nothing recorded yet."
    (folder / "bench.json").write_text(json.dumps([ROW | {"hardware": "a CPU"}]))
    many = [ROW | {"ratio": 1 + i / 10, "met": i < 9} for i in range(30)]
    (folder / "bench-h200.json").write_text(json.dumps(many))
    table = pages.bench_table()
    assert "| gemm 64x64 | 12.5 us | torch: 10.0 | 1.25 | 2.00 | yes |" in table
    assert "| gemm | torch | 30 | 2.45 | 1.00 .. 3.90 | 9 of 30 |" in table


def test_rows_that_could_not_be_recorded_are_not_timed(folder, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", str(folder))

    monkeypatch.setattr(bench.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(bench, "run", lambda names: pytest.fail("was timed"))
    assert cli.run(["bench", "run", "gemm", "--record"]) == 2
    assert "SB0123" in capsys.readouterr().err


def test_a_read_only_checkout_stops_a_run_before_its_work(folder, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", "build")

    monkeypatch.setattr("samebits.patching.workspace.Path.mkdir", refuse)
    fields = {"gdn_schedule": None, "engine": {"max_model_len": 512}}
    monkeypatch.setattr("samebits.recipe.load", lambda case: type("R", (), {"case": case} | fields))
    for verb in ("prove", "rl"):
        assert cli.run([verb, "qwen3-tiny"]) == 2
        assert "SB0123" in capsys.readouterr().err
