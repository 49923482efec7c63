"""`samebits bench`: rows, records of other machines kept, unknown names refused."""

import json
import sys
import types

import pytest

from samebits import cli
from samebits.errors import Different, catalog
from samebits.patching.workspace import Workspace

ROW = {
    "work": "gemm 64x64",
    "ours": 12.5,
    "unit": "us",
    "against": {"name": "torch fp32", "time": 10.0},
    "ratio": 1.25,
    "target": 2.0,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "cases").mkdir()
    monkeypatch.setattr(Workspace, "find", classmethod(lambda cls: Workspace(tmp_path)))
    return tmp_path / "cases"


def _rows(monkeypatch, rows):
    module = types.SimpleNamespace(rows=rows)
    monkeypatch.setitem(sys.modules, "samebits.bench.gemm", module)


def test_a_run_prints_rows_and_records_only_when_told(folder, monkeypatch, capsys):
    _rows(monkeypatch, lambda: [ROW])
    assert cli.run(["bench", "run", "gemm", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["met"] is True and row["hardware"] and row["date"]
    assert not (folder / "bench.json").exists()
    assert cli.run(["bench", "run", "gemm", "--record"]) == 0
    assert "gemm 64x64" in capsys.readouterr().out
    assert len(json.loads((folder / "bench.json").read_text())) == 1


@pytest.mark.parametrize(("ratio", "target", "met"), [(3.0, 2.0, False), (3.0, None, None)])
def test_a_target_is_met_or_not_or_absent(folder, monkeypatch, capsys, ratio, target, met):
    _rows(monkeypatch, lambda: [ROW | {"ratio": ratio, "target": target}])
    assert cli.run(["bench", "run", "gemm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["met"] is met


def test_a_record_keeps_rows_of_other_work_and_machines(folder, monkeypatch, capsys):
    other = ROW | {"hardware": "another chip", "date": "2025-01-01", "met": True}
    (folder / "bench.json").write_text(json.dumps([other]))
    _rows(monkeypatch, lambda: [ROW | {"ours": 99.0}])
    for _ in range(2):
        assert cli.run(["bench", "run", "gemm", "--record"]) == 0
    capsys.readouterr()
    assert cli.run(["bench", "show", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["ours"] for row in rows] == [12.5, 99.0]
    assert rows[0] == other


def test_a_red_bit_gate_prints_no_row(folder, monkeypatch, capsys):
    error_id = sorted(catalog())[0]

    def red():
        raise Different(error_id, seen="a", required="b", hint="samebits explain")

    _rows(monkeypatch, red)
    assert cli.run(["bench", "run", "gemm", "--record"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and error_id in shown.err
    assert not (folder / "bench.json").exists()


def test_an_unknown_benchmark_is_refused(folder, capsys):
    assert cli.run(["bench", "run", "gem"]) == 2
    error = capsys.readouterr().err
    assert "SB0909" in error and "gemm" in error


def test_without_a_record_there_is_nothing_to_show(folder, capsys):
    assert cli.run(["bench", "show"]) == 3
    assert "SB0910" in capsys.readouterr().err


def test_the_engines_of_a_case_are_timed_on_request(folder, monkeypatch, capsys):
    asked = []

    def rows(case):
        asked.append(case)
        return [ROW | {"work": f"rollout prefill, {case}"}]

    monkeypatch.setitem(sys.modules, "samebits.bench.rollout", types.SimpleNamespace(rows=rows))
    assert cli.run(["bench", "run", "rollout", "--case", "toy", "--record"]) == 0
    assert asked == ["toy"] and "toy" in (folder / "bench.json").read_text()


def test_a_choice_of_configurations_goes_to_the_engines(folder, monkeypatch, capsys):
    asked = []

    def rows(case, choice):
        asked.append((case, choice.names, choice.fast))
        return [ROW | {"work": f"rollout, {case}"}]

    monkeypatch.setitem(sys.modules, "samebits.bench.engines", types.SimpleNamespace(rows=rows))
    run = ["bench", "run", "engines", "--case", "toy"]
    assert cli.run([*run, "--fast"]) == 0
    assert cli.run([*run, "--arm", "a, b", "--arm", "c"]) == 0
    assert asked == [("toy", (), True), ("toy", ("a, b", "c"), False)]
    capsys.readouterr()
    for option in (["--fast"], ["--arm", "a"]):
        assert cli.run(["bench", "run", "rollout", "--case", "toy", *option]) == 2
        assert "SB0909" in capsys.readouterr().err


@pytest.mark.parametrize("names", [[], ["gemm"], ["rollout", "gemm"]])
def test_other_benchmarks_have_no_case(folder, capsys, names):
    assert cli.run(["bench", "run", *names, "--case", "toy"]) == 2
    assert "SB0909" in capsys.readouterr().err
