"""Error ids: raised and listed, and every hint is a command that can be run."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from quoted import ROOT, inline, problem

from samebits.errors import catalog

ID = re.compile(r"SB\d{4}")
FILLER = "smollm2-135m"  # stands for whatever an f-string puts in


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "samebits/*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]


def raised() -> dict[str, str]:
    """Id -> a place that names it as a whole string (a docstring is not one)."""
    found = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and ID.fullmatch(node.value)
            ):
                found[node.value] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return found


def text_of(node: ast.expr) -> str | None:
    """A string expression with FILLER for what is only known at run time."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else FILLER for p in node.values]
        return "".join(map(str, parts))
    return None


def hints() -> Iterator[tuple[str, str]]:
    """(place, command) of every literal hint: `hint=`, `fix=`, and variables of these names."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str | None] = []
            if isinstance(node, ast.keyword):
                names = [node.arg]
            elif isinstance(node, ast.Assign):
                names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            if {"hint", "fix"} & set(names):
                value = node.value
                choices = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                for choice in choices:
                    if text := text_of(choice):
                        place = f"{path.relative_to(ROOT)}:{choice.lineno}"
                        yield place, text


def test_every_id_in_the_code_is_in_the_catalog():
    unknown = {key: place for key, place in raised().items() if key not in catalog()}
    assert not unknown
    assert len(raised()) > 50  # the scan sees the code


def test_every_id_in_the_catalog_is_raised():
    assert sorted(catalog().keys() - raised().keys()) == []


def test_every_entry_says_title_why_and_fix():
    for key, entry in catalog().items():
        assert ID.fullmatch(key)
        assert set(entry) == {"title", "why", "fix"}, key
        assert all(isinstance(text, str) and text.strip() for text in entry.values()), key
        assert "\n" not in entry["title"] and not entry["title"].endswith("."), key


def test_every_hint_is_a_command():
    found = list(hints())
    assert len(found) > 80  # the scan sees the code
    wrong = {place: (text, why) for place, text in found if (why := problem(text))}
    assert not wrong


def test_every_explained_id_exists():
    unknown = {
        place: key for place, text in hints() for key in ID.findall(text) if key not in catalog()
    }
    assert not unknown


def test_commands_in_the_catalog_exist():
    wrong = [
        (key, span, why)
        for key, entry in catalog().items()
        for text in entry.values()
        for span in inline(text)
        if span.startswith(("samebits ", "make ", ".venv/bin/"))
        and (why := problem(span, prose=True)) is not None
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("samebits prove", "missing"),
        ("samebits prove smollm2-135m --no-such-option", "no-such-option"),
        ("samebits patch shake", "no verb shake"),
        ("samebits verify a b c d", "unexpected"),
        ("make no-such-target", "no make target"),
        ("python scripts/no_such.py", "no file"),
        ("frobnicate now", "unknown program"),
        ("samebits patch check && samebits nothing", "no verb nothing"),
    ],
)
def test_a_command_that_cannot_run_is_seen(command, why):
    assert why in (problem(command) or "")
