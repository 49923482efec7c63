"""Finds quoted commands in pages and hints, and says what is wrong with them."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
from pathlib import Path

import typer

from samebits import cli

ROOT = Path(__file__).resolve().parents[1]
# Programs a hint may start with, besides our own. `head`, `df` and the like are on every Linux.
PROGRAMS = {
    *("git", "pip", "python", "make", "unset", "export", "df", "head", "tar", "mv", "cp", "touch"),
    *("fuser", "apt-get", "nvidia-smi", "rm"),
}
_SHELL = {";", "&&", "||", "|", ">", "<", "2>"}


def fenced(text: str) -> list[str]:
    """Lines of fenced blocks of a Markdown page, comments and continuations resolved."""
    blocks = re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].partition(" # ")[0].strip() for line in lines]


def inline(text: str) -> list[str]:
    """What stands between single backticks, newlines folded."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", outside)]


@functools.cache
def make_targets() -> set[str]:
    rules = re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(rules)


def problem(command: str, *, prose: bool = False) -> str | None:
    """Why `command` cannot be run as it stands, or None. Values are not looked at, names are.

    `prose` lets arguments be missing: a sentence may name a verb alone.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        return str(error)
    for number, word in enumerate(words):
        if word in _SHELL:
            more = word in ("&&", ";", "|")
            rest = problem(shlex.join(words[number + 1 :]), prose=prose) if more else None
            return problem(shlex.join(words[:number]), prose=prose) or rest
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words:
        return "no program"
    program = words[0].rpartition("/")[2] if words[0].startswith(".venv/bin/") else words[0]
    if program == "samebits":
        return _verb_problem(words[1:], prose)
    if program == "make":
        named = [word for word in words[1:] if "=" not in word]
        unknown = [word for word in named if word not in make_targets()]
        return f"no make target {unknown[0]}" if unknown else None
    if program.startswith("scripts/") or (program == "python" and words[1:2] != ["-m"]):
        script = program if program.startswith("scripts/") else next(iter(words[1:]), "")
        return None if script.startswith("-") or (ROOT / script).exists() else f"no file {script}"
    return None if program in PROGRAMS or shutil.which(program) else f"unknown program {program}"


def _verb_problem(words: list[str], prose: bool) -> str | None:
    root = cli._group()
    context = typer.Context(root, info_name="samebits")
    command, trail = root, "samebits"
    while hasattr(command, "commands"):
        words = _drop_group_options(command, context, words)
        if not words:
            return None  # a group alone prints its help
        if words[0] not in command.commands:
            return f"{trail} has no verb {words[0]}"
        name, found, words = command.resolve_command(context, words)
        trail += f" {name}"
        context = typer.Context(found, info_name=name, parent=context)
        command = found
    if "--help" in words:
        return None
    try:
        given, extra, _ = command.make_parser(context).parse_args(list(words))
    except Exception as error:  # of typer's own copy of click: unknown option, value missing
        return f"{trail}: {error}"
    if extra:
        return f"{trail}: unexpected {' '.join(extra)}"
    missing = [
        parameter.name
        for parameter in command.params
        if parameter.required and given.get(parameter.name) in (None, (), [])
    ]
    return f"{trail}: {', '.join(missing)} missing" if missing and not prose else None


def _drop_group_options(command, context, words: list[str]) -> list[str]:
    if not words or not words[0].startswith("-"):
        return words
    parser = command.make_parser(context)
    parser.allow_interspersed_args = False
    return parser.parse_args(list(words))[1]
