#!/usr/bin/env python3
"""Check the guides under `skill/`, or link them into the folder that a tool reads.

    scripts/skills.py check             all of skill/
    scripts/skills.py check FOLDER      another folder of skills
    scripts/skills.py link FOLDER       a relative link in FOLDER for every skill, replacing nothing

Checked: front matter (agent-skill format), sizes, `references/` one level deep and each of them
used, links, files named in backticks, and that every skill has evals, one of which is to stop.

Exit codes: 0 nothing found or linked, 1 something found, 2 no such folder, or a link that would
replace something.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
SKILLS = ROOT / "skill"
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
KEYS = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
NAME_MAX, DESCRIPTION_MAX, COMPATIBILITY_MAX, LINES_MAX = 64, 1024, 500, 500
BODY_MAX = 20_000  # characters; about 5,000 tokens
# What a backticked name starts with when it is a file of this repository.
_TOP = ("samebits/", "tests/", "patches/", "scripts/", "cases/", "skill/")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_OUTCOMES = ("done", "stop")


def front_matter(text: str) -> tuple[dict[str, Any], str]:
    """Front matter and body; ValueError when there is none that can be read."""
    found = re.match(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL)
    if not found:
        raise ValueError("no front matter between two lines of `---`")
    try:
        values = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        raise ValueError(f"front matter is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError("front matter is no mapping")
    return values, found[2]


def _about_front_matter(folder: Path, values: dict[str, Any]) -> Iterator[str]:
    name, description = values.get("name"), values.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > NAME_MAX:
        yield f"name {name!r} is not {NAME_MAX} lower-case letters, digits and single hyphens"
    elif name != folder.name:
        yield f"name {name} is not that of its folder"
    if not isinstance(description, str) or not 1 <= len(description.strip()) <= DESCRIPTION_MAX:
        yield f"description has not 1 to {DESCRIPTION_MAX} characters"
    elif not re.search(r"\buse (?:when|to|for)\b", description, re.IGNORECASE):
        yield "description does not say when to use it (`Use when ...`)"
    if len(str(values.get("compatibility", ""))) > COMPATIBILITY_MAX:
        yield f"compatibility has more than {COMPATIBILITY_MAX} characters"
    for key in sorted(values.keys() - KEYS):
        yield f"front matter has the unknown key {key}"


def _about_text(path: Path, text: str) -> Iterator[str]:
    """Links and named files of one page."""
    for target in _LINK.findall(text):
        if "://" not in target and not (path.parent / target).exists():
            yield f"link to {target}, which is not there"
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`\n]+)`", outside):
        named = span.partition("::")[0]
        if not named.startswith(_TOP) or re.search(r"[\s<>*{}()]|[A-Z]{4}", named):
            continue  # a command, a pattern, or a name with a placeholder
        if not (ROOT / named).exists():
            yield f"`{span}` is not in the repository"


def _about_references(folder: Path, body: str) -> Iterator[str]:
    used = {(folder / target).resolve() for target in _LINK.findall(body)}
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        if path.is_dir() or place.parts[0] not in ("references", "scripts", "assets"):
            continue
        if len(place.parts) != 2:
            yield f"{place} is more than one level deep"
        elif place.parts[0] == "references" and path.resolve() not in used:
            yield f"{place} is not linked from SKILL.md"


def _about_evals(folder: Path) -> Iterator[str]:
    path = folder / "evals" / "evals.yaml"
    if not path.is_file():
        yield "no evals/evals.yaml"
        return
    data = yaml.safe_load(path.read_text())
    if not isinstance(data, dict) or data.get("skill") != folder.name:
        yield f"evals: `skill` is not {folder.name}"
        return
    tasks = data.get("tasks") or []
    ids = [task.get("id") for task in tasks]
    if len(tasks) < 3 or len(set(ids)) != len(ids):
        yield "evals: fewer than three tasks, or an id twice"
    for task in tasks:
        yield from (f"evals, {task.get('id')}: {what}" for what in _about_task(task))
    if not any((task.get("expect") or {}).get("outcome") == "stop" for task in tasks):
        yield "evals: no task whose right outcome is `stop`"


def _about_task(task: dict[str, Any]) -> Iterator[str]:
    if set(task) - {"id", "prompt", "setup", "expect"}:
        yield f"unknown keys {sorted(set(task) - {'id', 'prompt', 'setup', 'expect'})}"
    if not NAME.fullmatch(str(task.get("id"))):
        yield "id is not lower case with hyphens"
    if len(str(task.get("prompt") or "")) < 20:
        yield "no prompt"
    expect = task.get("expect")
    if not isinstance(expect, dict) or set(expect) - {"outcome", "exit", "says", "does", "never"}:
        yield "expect holds outcome, says, does, never, and perhaps exit"
        return
    if expect.get("outcome") not in _OUTCOMES:
        yield f"outcome is none of {', '.join(_OUTCOMES)}"
    for name in ("says", "does", "never"):
        entries = expect.get(name, [])
        if not isinstance(entries, list) or not all(isinstance(e, str) and e for e in entries):
            yield f"{name} is no list of sentences"
    if not expect.get("says") or not expect.get("never"):
        yield "says and never each need a sentence, or nobody can judge an answer"


def problems(folder: Path) -> list[str]:
    """What is wrong with one skill, each with the page that it is in."""
    path = folder / "SKILL.md"
    if not path.is_file():
        return [f"{folder.name}: no SKILL.md"]
    text = path.read_text()
    try:
        values, body = front_matter(text)
    except ValueError as error:
        return [f"{folder.name}/SKILL.md: {error}"]
    found = [*_about_front_matter(folder, values), *_about_references(folder, body)]
    if len(body) > BODY_MAX:
        found.append(f"the body has more than {BODY_MAX} characters")
    found = [f"SKILL.md: {what}" for what in [*found, *_about_evals(folder)]]
    for page in sorted(folder.rglob("*.md")):
        name, content = page.relative_to(folder), page.read_text()
        if content.count("\n") >= LINES_MAX:
            found.append(f"{name}: {LINES_MAX} lines or more")
        found += [f"{name}: {what}" for what in _about_text(page, content)]
    return [f"{folder.name}/{what}" for what in found]


def check(root: Path) -> list[str]:
    """What is wrong with all skills of a folder and with its README."""
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()]
    found = [what for folder in folders for what in problems(folder)]
    readme = root / "README.md"
    text = readme.read_text() if readme.is_file() else ""
    found += [f"README.md: {what}" for what in _about_text(readme, text)]
    linked = {(root / target).parent.name for target in _LINK.findall(text)}
    found += [f"README.md: no link to {f.name}" for f in folders if f.name not in linked]
    return found


def link(target: Path) -> list[str]:
    """Link every skill into `target`; returns what stood in the way, and then links nothing."""
    wanted = {
        target / folder.name: os.path.relpath(folder, target)
        for folder in sorted(SKILLS.iterdir())
        if (folder / "SKILL.md").is_file()
    }
    blocked = [
        str(path)
        for path, to in wanted.items()
        if os.path.lexists(path) and not (path.is_symlink() and os.readlink(path) == to)
    ]
    if not blocked:
        target.mkdir(parents=True, exist_ok=True)
        for path, to in wanted.items():
            if not path.is_symlink():
                path.symlink_to(to)
    return blocked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("check", "link"))
    parser.add_argument("folder", nargs="?", type=Path)
    given = parser.parse_args()
    if given.what == "link":
        if given.folder is None:
            parser.error("link needs a folder")
        blocked = link(given.folder)
        for path in blocked:
            print(f"{path} is there already and is something else", file=sys.stderr)
        return 2 if blocked else 0
    root = given.folder or SKILLS
    if not root.is_dir():
        print(f"{root}: no such folder", file=sys.stderr)
        return 2
    found = check(root)
    print("\n".join(found) if found else f"{root.name}: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
