"""The report page: complete in itself, with and without an RL run."""

import re
from html import escape as html_escape
from html.parser import HTMLParser

import pytest

from samebits.evidence import DifferenceReport, Side
from samebits.evidence.verdict import judge
from samebits.gates import page, prove

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


def _html(run, done):
    statement = prove.state(run, done, quick=True, started="2025-01-01T00:00:00+00:00")
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

    monkeypatch.setattr(page.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        page.write(statement, done, "a chip", path)
    assert path.read_text() == "old"
