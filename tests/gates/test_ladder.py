"""The ladder of a case: its rungs, what is measured again, exit codes, and the page it writes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml

from samebits import cli, runtime
from samebits import recipe as recipes
from samebits.casework import ladder as record
from samebits.casework import writeup
from samebits.casework.ladder import Leg, Rung
from samebits.errors import Refused
from samebits.gates import ladder, prove, sizes
from samebits.gates.run import Stage
from samebits.gates.streams import Stream
from samebits.ops import registry

CASE = "qwen3-tiny"
TOKENS = 40
COSTS = {"decode": 2.0, "prefill": 1.0, "score": 1.0, "step": 4.0}
PAGE = "# qwen3-tiny: what broke\n\nBy hand.\n\n## gemm: x\n\n- **Cause**: also by hand.\n"


def rung(name, b=0, c=0, **costs) -> Rung:
    return Rung(name, {"B": Leg(TOKENS, b, 0.1), "C": Leg(TOKENS, c, 0.2)}, COSTS | costs)


def made(*rungs) -> record.Ladder:
    return record.Ladder("toy", "2026-01-01", "a chip", "samebits prove toy --ladder", {}, rungs)


def test_every_rung_adds_one_region_until_all_are_aligned():
    for architecture in ("llama", "qwen3_5_text"):
        steps = ladder.rungs(architecture)
        assert steps[0] == ("stock", frozenset())
        assert steps[-1][1] == set(registry.regions_of(architecture))
        added = [after - before for (_, before), (_, after) in pairwise(steps)]
        for (name, _), new in zip(steps[1:], added, strict=True):
            assert new == (set(registry.TOGETHER) if name == "gdn" else {name})


def test_named_rungs_come_first_then_products_and_the_others_in_forward_order():
    names = [name for name, _ in ladder.rungs("qwen3", ["logprob", "rope"])]
    products = ["gemm.column", "gemm.row", "gemm.lm_head"]
    rest = [region for region in registry.DENSE if region not in ("logprob", "rope", *products)]
    assert names == ["stock", "logprob", "rope", *products, *rest]


def test_on_a_gpu_the_log_softmax_comes_before_the_output_layer():
    for architecture in ("qwen3", "qwen3_5_text"):
        names = [name for name, _ in ladder.rungs(architecture, platform="sm90")]
        at = names.index("gemm.lm_head")
        assert names[at - 1] == "logprob" and names.index("gemm.row") < at
        cpu = [name for name, _ in ladder.rungs(architecture)]
        assert sorted(names) == sorted(cpu) and cpu.index("gemm.lm_head") < cpu.index("logprob")
    with pytest.raises(Refused, match="SB0927") as refused:
        ladder.rungs("qwen3", ["gemm.lm_head"], "sm90")
    assert "logprob before gemm.lm_head" in refused.value.required
    assert ladder.rungs("qwen3", ["logprob", "gemm.lm_head"], "sm90")


@pytest.mark.parametrize("order", [["rope", "rope"], ["gdn.core"], ["softmax"], [""]])
def test_a_name_that_is_no_rung_is_refused(order):
    with pytest.raises(Refused, match="SB0927") as refused:
        ladder.rungs("qwen3", order)
    assert "gemm.lm_head" in refused.value.required


@pytest.mark.parametrize(
    ("rungs", "code", "words"),
    [
        ([rung("stock", 40, 39), rung("rope", 0, 3), rung("logprob")], 0, "at 0: logprob"),
        ([rung("stock", 40, 39), rung("rope"), rung("logprob")], 0, "first rung at 0: rope"),
        # A zero that does not last is none.
        ([rung("stock", 4, 4), rung("rope"), rung("x", 1), rung("y")], 0, "first rung at 0: y"),
        ([rung("stock"), rung("rope"), rung("logprob")], 3, "first rung at 0: stock"),
        ([rung("stock", 40, 40), rung("rope"), rung("logprob", 0, 1)], 1, "no rung at 0"),
        ([rung("stock"), rung("logprob", 1)], 1, "no rung at 0"),
    ],
)
def test_the_first_and_the_last_rung_decide(rungs, code, words):
    found = made(*rungs)
    assert found.exit_code == code and words in found.summary()
    stock, last = rungs[0].legs, rungs[-1].legs
    assert f"stock B {stock['B']}, C {stock['C']} differ" in found.summary()
    assert f"all aligned B {last['B']}, C {last['C']}" in found.summary()


def test_a_leg_on_which_stock_agrees_is_named():
    found = made(rung("stock", 0, 7), rung("logprob"))
    assert found.exit_code == 0 and found.silent == ["B"]
    assert "Stock agrees on leg B" in record.block(found)


def test_costs_are_ratios_to_stock_and_a_missing_one_is_a_dash():
    found = made(rung("stock", 9, 9), rung("rope", decode=None, step=1.0))
    _, row = record.rows(found)
    assert row[-4:] == ["-", "1 (1.00)", "1 (1.00)", "1 (0.25)"]


# --- the page -------------------------------------------------------------------------------------


@pytest.fixture
def case(tmp_path, monkeypatch):
    """A copy of a case that tests may write to."""
    folder = tmp_path / "cases" / CASE
    shutil.copytree(recipes.load(CASE).folder, folder)
    (folder / "broke.md").write_text(PAGE)
    monkeypatch.setattr(recipes, "cases_folder", lambda: tmp_path / "cases")
    return recipes.load(CASE)


def test_the_table_is_replaced_and_hand_written_text_is_kept(case):
    page = case.folder / "broke.md"
    record.write_page(case, made(rung("stock", 5, 5), rung("rope")))
    first = page.read_text()
    record.write_page(case, made(rung("stock", 6, 6), rung("logprob")))
    second = page.read_text()
    for text in (first, second):
        head, rest = text.split("<!-- ladder: generated -->\n")
        block, tail = rest.split("<!-- end -->\n")
        assert head == "# qwen3-tiny: what broke\n\nBy hand.\n\n"
        assert tail == "\n## gemm: x\n\n- **Cause**: also by hand.\n"
    assert "| `rope` |" in first and "| `rope` |" not in second
    assert "| `logprob` | 0 of 40 | 0 of 40 |" in block


def test_what_stands_in_the_block_is_no_text_of_the_write_up(case):
    before = writeup.problems(case)
    found = made(rung("stock", 5, 5), rung("rope"))
    record.write_page(case, replace(found, chip="AMD EPYC <chip>"))
    assert "EPYC <chip>" in (case.folder / "broke.md").read_text()
    assert writeup.problems(case) == before


@pytest.mark.parametrize(
    "broken",
    [
        "<!-- ladder: generated -->\nmine, since the end is lost\n",
        "<!-- ladder: generated -->\n\n<!-- ladder: generated -->\n<!-- end -->\n",
        "text <!-- ladder: generated --> in a line <!-- end -->\n",
        "<!-- ladder: generated -->\n<!-- other: generated -->\n<!-- end -->\n",
    ],
)
def test_a_page_without_its_markers_is_refused_before_anything_runs(case, monkeypatch, broken):
    (case.folder / "broke.md").write_text(PAGE + broken)
    monkeypatch.setattr(prove, "locked_run", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(Refused, match="SB0929"):
        ladder.climb(CASE)
    assert (case.folder / "broke.md").read_text() == PAGE + broken


# --- a run ----------------------------------------------------------------------------------------


def streams(regions, every):
    """Stock differs everywhere; what is aligned takes some of it away, all of it nothing."""
    wrong = TOKENS - 1 if not regions else 0 if regions == every else len(every) - len(regions)
    found = {}
    for name in ("decode", "prefill", "trainer"):
        values = list(range(1, TOKENS + 1))
        if name != "prefill":
            values = [v + 1000 * (i < wrong) for i, v in enumerate(values)]
        found[name] = Stream()
        found[name].add(0, 1, [5] * TOKENS, [float(-v) for v in values])
    return found


@pytest.fixture
def measured(case, monkeypatch, tmp_path):
    """Sets of regions that were measured; no engine starts, and the run has a folder of its own."""
    seen = []
    every = set(registry.regions_of(case.architecture))

    def measure(run, size, requests, regions, engines):
        seen.append(regions)
        return Stage(streams(regions, every), {"ms_per_token": COSTS, "served": sorted(regions)})

    class Opened:
        recipe, contract, model = case, record.Contract.load(case.contract_path), tmp_path
        folder = tmp_path / "run"
        has, stage = prove.Run.has, prove.Run.stage

    Opened.folder.mkdir()
    monkeypatch.setattr(prove, "open_run", lambda case, size, prefix: Opened())
    monkeypatch.setattr(ladder, "_measure", measure)
    monkeypatch.setattr(record.Contract, "of", classmethod(lambda cls, recipe: Opened.contract))
    return seen


def test_a_ladder_is_recorded_with_what_it_belongs_to(case, measured, capsys):
    assert cli.run(["prove", CASE, "--ladder"]) == 0
    out = capsys.readouterr()
    assert out.out.splitlines()[-1] == (
        "qwen3-tiny ladder: 9 rungs, stock B 39 of 40, C 39 of 40 differ, all aligned B 0 of 40, "
        "C 0 of 40; first rung at 0: logprob"
    )
    assert "ladder 9 of 9, + logprob: B 0 of 40 differ" in out.err
    assert [len(regions) for regions in measured] == list(range(10))
    found = record.read(case)
    assert found is not None and record.stale(found, case) == []
    assert "| `logprob` | 0 of 40 | 0 of 40 |" in (case.folder / "broke.md").read_text()
    data = yaml.safe_load(case.path.read_text())
    data["engine"]["kv_blocks"] += 1
    assert record.stale(found, replace(case, data=data)) == ["recipe"]
    moved = replace(found, depends={**found.depends, "sources": {"hooks/vllm": "0"}})
    assert "hooks/vllm" in record.stale(moved, case)
    assert cli.run(["case", "show", CASE]) == 0
    shown = capsys.readouterr().out
    assert "first rung at 0: logprob" in shown and "ladder stale" not in shown
    record.write(moved, record.path_of(case))
    assert cli.run(["case", "show", CASE, "--json"]) == 0
    assert "hooks/vllm" in json.loads(capsys.readouterr().out)["ladder"]["stale"]


def test_a_rung_is_measured_once_whatever_the_order(case, measured):
    ladder.climb(CASE, quick=True)
    del measured[:]
    ladder.climb(CASE, quick=True)
    assert measured == []
    ladder.climb(CASE, quick=True, order=["logprob"])
    # Stock and all aligned are there already; every set between is another one.
    assert [len(regions) for regions in measured] == list(range(1, 9))
    del measured[:]
    ladder.climb(CASE, quick=True, fresh=True)
    assert len(measured) == 10


def test_a_quick_ladder_leaves_the_case_as_it_is(case, measured, tmp_path, capsys):
    before = {path: path.read_bytes() for path in case.folder.rglob("*") if path.is_file()}
    assert cli.run(["prove", CASE, "--ladder", "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"].endswith("--ladder --quick")
    assert (tmp_path / "run" / "ladder.json").is_file()
    after = {path: path.read_bytes() for path in case.folder.rglob("*") if path.is_file()}
    assert before == after


def test_both_engines_have_to_compute_what_a_rung_aligns():
    rows = {"rope": 3, "attention": 0}
    ladder._require_served(frozenset({"rope"}), {"rollout": rows, "trainer": rows})
    for regions in ({"rope", "attention"}, set()):
        with pytest.raises(Refused, match="SB0928") as refused:
            ladder._require_served(frozenset(regions), {"rollout": rows})
        assert refused.value.seen == "rollout: rows of rope"


def test_options_of_a_ladder_need_one(capsys):
    for options in (["--order", "rope"], ["--fresh"], ["--ladder", "--locate", "1"]):
        assert cli.run(["prove", CASE, *options]) == 2
        assert "SB1009" in capsys.readouterr().err


def test_a_run_that_judges_a_case_is_refused_in_the_process_of_a_control(monkeypatch):
    monkeypatch.setenv("SAMEBITS_ARITHMETIC", runtime.only(["rope"]))
    with pytest.raises(Refused, match="SB0930"):
        prove.open_run(CASE, sizes.Size())


def test_the_last_rung_is_the_aligned_arithmetic_itself(case):
    class Run:
        recipe = case

    every = frozenset(registry.regions_of(case.architecture))
    assert ladder._arithmetic(Run, frozenset()) == "stock"
    assert ladder._arithmetic(Run, every) == "aligned"
    assert ladder._arithmetic(Run, every - {"rope"}) == runtime.only(every - {"rope"})
    assert all("/" not in ladder._file(Run, r) for _, r in ladder.rungs(case.architecture))
