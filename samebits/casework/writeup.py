"""Whether `recipe.md` and `broke.md` of a case are whole. Says nothing of whether they are true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from samebits import markdown
from samebits.patching.workspace import Workspace
from samebits.recipe import Recipe

# As the templates write them, or a word in capitals as the guides do (`MINUTES`, `WHY`); three
# letters are as often an abbreviation.
_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>]*>|\b[A-Z]{4,}\b|\b(?:TBD|WHY|XXX)\b")
# Words in capitals that mean something. Others stand between backquotes, as names of code do.
_WORDS = {
    *("BLAS", "CUDA", "EQUAL", "DIFFERENT", "GGUF", "GRPO", "HTML", "JSON", "LICENSE", "NCCL"),
    *("NUMA", "README", "SIMD", "STALE", "YAML"),
}
_CODE = re.compile(r"`[^`\n]+`")
_SECTION = re.compile(r"^## ", re.MULTILINE)
_NOTHING = "nothing new"
_ROWS = ("weights", "series", "layouts", "needs")


def problems(recipe: Recipe) -> list[str]:
    """What is missing, one sentence each: placeholders, sections, guards that name no file."""
    return [*_recipe_page(recipe), *_broke_page(recipe)]


def _read(path: Path) -> str:
    return markdown.by_hand(path.read_text()) if path.is_file() else ""


def _placeholders(text: str, name: str) -> Iterator[str]:
    left = [word for word in _PLACEHOLDER.findall(_CODE.sub("", text)) if word not in _WORDS]
    if left:
        yield f"{name}: {len(left)} placeholders left, first {left[0]}"


def _sections(text: str) -> dict[str, str]:
    """Heading of second level -> text below it."""
    parts = _SECTION.split(text)[1:]
    return {head.strip(): body for head, _, body in (part.partition("\n") for part in parts)}


def _recipe_page(recipe: Recipe) -> Iterator[str]:
    text = _read(recipe.folder / "recipe.md")
    yield from _placeholders(text, "recipe.md")
    sections = _sections(text)
    if f"samebits prove {recipe.case}" not in sections.get("Run it", ""):
        yield f"recipe.md: `## Run it` without `samebits prove {recipe.case}`"
    if not re.search(r"^- \S", sections.get("What is not shown", ""), re.MULTILINE):
        yield "recipe.md: `## What is not shown` lists nothing"
    lacking = [row for row in _ROWS if not re.search(rf"^\| {row} \| \S", text, re.MULTILINE)]
    if lacking:
        yield f"recipe.md: no table row for {', '.join(lacking)}"


def _broke_page(recipe: Recipe) -> Iterator[str]:
    text = _read(recipe.folder / "broke.md")
    yield from _placeholders(text, "broke.md")
    sections = _sections(text)
    if not sections:
        yield "broke.md: no section"
    for head, body in sections.items():
        if head.lower().startswith(_NOTHING):
            if not re.search(r"\]\([^)]+\)", body):
                yield f"broke.md, {head}: no link to the case that explains it"
            continue
        lacking = [name for name in ("Cause", "Fix", "Guard") if f"**{name}**" not in body]
        if lacking:
            yield f"broke.md, {head}: no {', '.join(lacking)}"
        yield from _guards(head, body)


def _guards(head: str, body: str) -> Iterator[str]:
    root = Workspace.find().root
    _, _, guard = body.partition("**Guard**")
    for name in re.findall(r"`(tests/[^`:\s]+)", guard):
        if not (root / name).exists():
            yield f"broke.md, {head}: guard {name} is no file"
