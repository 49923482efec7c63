"""Pages for readers: every quoted command exists, every linked file is there."""

from __future__ import annotations

import re
import subprocess

import pytest
from quoted import ROOT, fenced, inline, problem

PAGES = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
OURS = ("samebits ", "make ", ".venv/bin/", "scripts/")


@pytest.mark.parametrize("page", PAGES)
def test_quoted_commands_exist(page):
    text = (ROOT / page).read_text()
    lines = [(line, False) for line in fenced(text)] + [(span, True) for span in inline(text)]
    wrong = {
        line: why
        for line, prose in lines
        if line.startswith(OURS) and "|" not in line
        if (why := problem(line, prose=prose)) is not None
    }
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_links_inside_the_repository_lead_somewhere(page):
    folder = (ROOT / page).parent
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text())
    gone = [t for t in targets if "://" not in t and not (folder / t).exists()]
    assert not gone


def test_the_pages_quote_commands_at_all():
    quoted = [line for page in PAGES for line in fenced((ROOT / page).read_text())]
    assert sum(line.startswith(OURS) for line in quoted) > 15
