"""The report page: complete in itself, with and without an RL run."""

import re
from html import escape as html_escape
from html.parser import HTMLParser

import numpy as np
import pytest

from samebits import files
from samebits.evidence import DifferenceReport, Side, control, number
from samebits.evidence.statement import Statement
from samebits.evidence.verdict import judge
from samebits.gates import page, prove
from samebits.gates.run import Stage
from samebits.gates.streams import Stream

# What makes a browser fetch: attributes with an address, and style sheets' own references.
_FETCHING = {"src", "href", "srcset", "data", "action", "poster", "background", "xlink:href"}


class _Addresses(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.found += [value or "" for name, value in attrs if name in _FETCHING]


def external(html: str) -> list[str]:
    """Addresses that a browser would have to fetch."""
    parser = _Addresses()
    parser.feed(html)
    styles = re.findall(r"url\(([^)]*)\)|@import\s+([^;]*)", html)
    found = [a for a in parser.found if not a.startswith("data:image/png;base64,")]
    found += [part for style in styles for part in style if part]
    found += re.findall(r"(?<![\w+/])(?:https?|ftp|wss?|file)://\S+", html)
    return found + sorted(parser.tags & {"script", "iframe", "object", "embed", "link", "base"})


def _statement(run, stages_of):
    done = stages_of(run.recipe)
    return prove.state(run, done, quick=True, started="2025-01-01T00:00:00+00:00")


def _html(run, done):
    statement = _statement(run, lambda _: done)
    return page.render(statement, done, "a chip")


@pytest.mark.parametrize(("case", "plots"), [("qwen3-tiny", 0), ("smollm2-135m", 3)])
def test_the_page_holds_no_external_address(run_of, stages_of, case, plots):
    run = run_of(case)
    html = _html(run, stages_of(run.recipe))
    assert external(html) == []
    assert html.count("<img ") == plots
    assert case in html and "Limits" in html


@pytest.mark.parametrize(
    "bad",
    [
        '<img src="https://example.com/a.png">',
        '<img src="//host/a.png">',
        '<a href="page.html">x</a>',
        "<style>@import 'x.css';</style>",
        "<style>p { background: url(x.png) }</style>",
        "<script>1</script>",
        "<p>http://example.com</p>",
    ],
)
def test_an_external_address_would_be_seen(bad):
    assert external(f"<html><body>{bad}</body></html>")


def test_numbers_and_names_of_the_run_are_shown_and_escaped(run_of, stages_of):
    run = run_of("qwen3-tiny")
    done = stages_of(run.recipe)
    statement = prove.state(run, done, quick=True, started="2025-01-01T00:00:00+00:00")
    html = page.render(statement, done, "<b>chip</b>")
    assert "&lt;b&gt;chip" in html and "<b>chip" not in html
    for record in statement.predicate["comparisons"]:
        assert record["name"] in html and f"{record['tokens']:,}" in html
    assert statement.verdict in html


def test_reasons_oracle_hazards_and_differences_are_shown(run_of, stages_of):
    run = run_of("smollm2-135m")
    done = stages_of(run.recipe)
    statement = prove.state(run, done, quick=False, started="2025-01-01T00:00:00+00:00")
    sides = Side("rollout", "bf800000"), Side("trainer", "bf800001")
    report = DifferenceReport("C", "trainer-padded/prefill", 4, 9, 7, *sides, "samebits prove x")
    html = page.render(statement, done, "a chip", [report])
    reasons = judge(statement.predicate).reasons
    assert reasons and all(html_escape(reason) in html for reason in reasons)
    assert "rope_base_doubled" in html and "fp32 oracle" in html
    assert "sequence 4, position 9" in html and "bf800001" in html
    assert html.count("<td>batch_16</td>") == 1  # two pairs of leg A count the same events
    assert "0 of 0" not in html


def test_a_failed_write_leaves_the_old_page(run_of, stages_of, tmp_path, monkeypatch):
    run = run_of("qwen3-tiny")
    done = stages_of(run.recipe)
    statement = prove.state(run, done, quick=True, started="2025-01-01T00:00:00+00:00")
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        page.write(statement, done, "a chip", path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.glob("*report*")] == ["report.html"]


def test_the_sentence_counts_each_leg_and_the_controls_that_diverged(run_of, stages_of):
    statement = _statement(run_of("qwen3-tiny"), stages_of)
    good, silent, nan = (
        control("stock", 99, *counts) for counts in ((50, 0.5), (0, 0.0), (99, float("nan")))
    )
    changed = [
        {"leg": "A", "mismatches": 1, "tokens": 1000, "control": good},
        {"leg": "A", "mismatches": 2, "tokens": 500, "control": silent},
        {"leg": "B", "mismatches": 0, "tokens": 0, "control": nan},
        {"leg": "B", "mismatches": 0, "tokens": 7, "control": None},
    ]
    predicate = dict(statement.predicate) | {"comparisons": changed}
    statement = Statement(b"", dict(statement.data) | {"predicate": predicate})
    assert page.sentence(statement, "not claimed: D") == (
        f"qwen3-tiny: {statement.verdict} (not claimed: D); mismatches per leg: "
        "A 3 of 1,500, B 0 of 7; 1 of 3 negative controls diverged"
    )


def test_a_hazard_of_two_pairs_of_a_leg_is_shown_once_at_its_largest():
    rows = [
        {"leg": "A", "hazards": {"splits": 5, "hits": 0}},
        {"leg": "A", "hazards": {"splits": 9, "hits": 0}},
        {"leg": "A", "hazards": {"splits": 7}},
        {"leg": "B", "hazards": {"splits": 2}},
    ]
    shown = page._hazards({"comparisons": rows})
    assert shown == [("A", "splits", 9), ("A", "hits", 0), ("B", "splits", 2)]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0, "0"), (-0.0, "0"), (1.23456e-7, "1.23e-07"), (2, "2")]
)
def test_a_number_is_shown_with_three_digits(value, text):
    assert page._shown(None if value is None else number(value)) == text


def test_a_leg_shows_its_own_counts_and_those_of_its_control():
    record = {
        "leg": "B",
        "name": "decode/prefill",
        "sentence": "S",
        "tokens": 9,
        "mismatches": 4,
        "max_abs": number(0.5),
        "control": {"name": "stock", "mismatches": 2345, "tokens": 6789},
    }
    controlled, bare = page._legs({"comparisons": [record, record | {"control": None}]})
    assert controlled == {
        "name": "B",
        "sentence": "S (decode/prefill)",
        "tokens": 9,
        "mismatches": 4,
        "max_abs": "0.5",
        "control": "stock",
        "control_mismatches": "2,345 of 6,789",
    }
    assert bare == controlled | {"control": "-", "control_mismatches": "-"}


def test_an_oracle_without_a_control_shows_none():
    record = {"aligned_mean": number(0.25), "stock_mean": number(0.5), "control": None}
    record |= {"aligned_max": number(4), "stock_max": number(2)}
    with_control = record | {"control": {"name": "rope", "mean": number(3)}}
    bare, shown = page._oracles({"oracle": [record, with_control]})
    assert (bare["aligned"], bare["stock"]) == ("0.25", "0.5")
    assert (bare["aligned_max"], bare["stock_max"]) == ("4", "2")
    assert (bare["control"], bare["control_mean"]) == ("-", "-")
    assert (shown["control"], shown["control_mean"]) == ("rope", "3")


def test_plots_get_distances_of_tokens_and_steps_of_both_arms(make, monkeypatch):
    from samebits.report import plots

    got = {}
    for name in ("difference_per_step", "difference_histogram", "reward_curve"):
        monkeypatch.setattr(plots, name, lambda *a, name=name: got.setdefault(name, a) and name)
    left, right = Stream(), Stream()
    for stream, values in ((left, [-1.0, -2.0]), (right, [-1.5, -1.75])):
        patterns = np.array(values, np.float32).view(np.uint32)
        stream.add(0, 1, [5, 6], patterns, np.zeros((2, 2), np.uint64))
    done = {
        "rl_aligned": Stage({"rollout": left, "trainer": left}, {}),
        "rl_stock": Stage({"rollout": left, "trainer": right}, {}),
    }
    steps = {
        "aligned": [{"max_abs": number(0), "reward": number(0.25)}],
        "stock": [{"max_abs": number(0.5), "reward": number(0.75)}],
    }
    uris = [plot["uri"] for plot in page._plots(done, steps)]
    assert uris == ["difference_per_step", "difference_histogram", "reward_curve"]
    assert got == {
        "difference_per_step": ([0.0], [0.5]),
        "difference_histogram": ({"aligned": [0.0, 0.0], "stock": [0.5, 0.25]},),
        "reward_curve": ([0.25], [0.75]),
    }


def test_rows_of_rl_steps_name_their_arm(run_of, stages_of, monkeypatch):
    run = run_of("smollm2-135m")
    done = stages_of(run.recipe)
    given = {}
    monkeypatch.setattr(page.report, "render", lambda fields: given.update(fields) or "")
    page.render(_statement(run, lambda _: done), done, "a chip")
    steps = run.recipe.rl["steps"]
    arms = [(row["arm"], row["step"]) for row in given["steps"]]
    assert arms == [(arm, step + 1) for arm in ("aligned", "stock") for step in range(steps)]
    assert {row["max_abs"] for row in given["steps"][:steps]} == {"0"}
    assert "0" not in {row["max_abs"] for row in given["steps"][steps:]}


def test_the_rl_run_is_one_row_for_each_arm(run_of, stages_of):
    run = run_of("smollm2-135m")
    predicate = _statement(run, stages_of).predicate
    aligned, stock = page.rl_rows(predicate)
    steps = len(predicate["rl"]["aligned"])
    tokens = sum(step["tokens"] for step in predicate["rl"]["aligned"])
    assert aligned == ("aligned", str(steps), f"{tokens:,}", "0", "0", "0", "0", "1", "1")
    assert stock[0] == "stock" and int(stock[3].replace(",", "")) > 0
    largest = max(float(step["max_abs"]["decimal"]) for step in predicate["rl"]["stock"])
    assert stock[4] == f"{largest:.3g}" and len(stock) == len(page.RL_COLUMNS)


def test_the_mean_of_an_arm_weighs_steps_by_their_tokens():
    steps = []
    for step, tokens, mean in ((1, 10, 0.5), (2, 30, 0.1)):
        numbers = {"max_abs": 1, "mean_abs": mean, "k3_kl": mean, "is_ratio_max": 2}
        numbers |= {"is_ratio_median": mean, "reward": 0}
        found = {name: number(value) for name, value in numbers.items()}
        steps.append({"step": step, "tokens": tokens, "mismatches": 3, **found})
    (arm,) = page.rl_arms({"rl": {"aligned": steps, "stock": []}})
    assert arm["mean_abs"] == arm["k3_kl"] == pytest.approx(0.2)
    assert (arm["tokens"], arm["mismatches"], arm["is_ratio_median"]) == (40, 6, (0.1, 0.5))


def test_the_total_counts_the_rl_run_once(run_of, stages_of):
    predicate = _statement(run_of("smollm2-135m"), stages_of).predicate
    legs = sum(row["tokens"] for row in predicate["comparisons"] if row["leg"] != "E")
    steps = sum(step["tokens"] for step in predicate["rl"]["aligned"])
    assert page.in_total(predicate).startswith(f"in total: 0 of {legs + steps:,} comparisons")
