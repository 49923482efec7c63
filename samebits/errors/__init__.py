"""Errors with a stable id, what was seen, what was required, and one command that helps.

    raise Refused("SB0203", seen="vllm tree is 9c1e..", required="tree 41af..",
                  hint="samebits patch apply vllm --clean")

Ids live in `catalog/<area>.yaml` (title, why, fix); an id that no catalog lists is a
programming error. Exit codes, the same for every command:

    0 equal / done    1 different    2 bad input or refused    3 not observed or stale
    4 internal error  130 interrupted
"""

from __future__ import annotations

import functools
import shlex
from importlib import resources
from pathlib import Path

import yaml

EXIT_EQUAL = 0
EXIT_DIFFERENT = 1
EXIT_REFUSED = 2
EXIT_NOT_OBSERVED = 3
EXIT_INTERNAL = 4
EXIT_INTERRUPTED = 130


@functools.cache
def catalog() -> dict[str, dict[str, str]]:
    """All known ids -> {title, why, fix}, merged from `catalog/*.yaml`."""
    merged: dict[str, dict[str, str]] = {}
    for entry in sorted(resources.files(__package__).joinpath("catalog").iterdir(), key=str):
        if not entry.name.endswith(".yaml"):
            continue
        for key, record in (yaml.safe_load(entry.read_text()) or {}).items():
            if key in merged:
                raise RuntimeError(f"error id {key} is listed twice ({entry.name})")
            merged[key] = record
    return merged


def shown(path: Path) -> str:
    """`path` as the current folder sees it: relative inside of it and absolute elsewhere."""
    here, path = Path.cwd(), path.absolute()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def word(value: object) -> str:
    """`value` as one word of a hint: quoted where a shell needs it; a path as in `shown`."""
    text = str(value)
    if isinstance(value, Path):
        text = shown(value)
        text = f"./{text}" if text.startswith("-") else text
    return shlex.quote(text)


class SamebitsError(Exception):
    """Base of all errors that a command reports by id. `exit_code` is what the command returns."""

    exit_code = EXIT_REFUSED

    def __init__(self, error_id: str, *, seen: str, required: str, hint: str):
        if error_id not in catalog():
            raise RuntimeError(f"error id {error_id} is not in samebits/errors/catalog")
        self.error_id, self.seen, self.required, self.hint = error_id, seen, required, hint
        super().__init__(str(self))

    def __reduce__(self):  # keep id and fields across process boundaries
        return (_rebuild, (type(self), self.error_id, self.seen, self.required, self.hint))

    def __str__(self) -> str:
        title = catalog()[self.error_id]["title"]
        return (
            f"{self.error_id} {title}\n  seen:     {self.seen}\n"
            f"  required: {self.required}\n\nhint: {self.hint}"
        )


def _rebuild(cls, error_id, seen, required, hint):
    return cls(error_id, seen=seen, required=required, hint=hint)


class Refused(SamebitsError):
    """Bad input, or a configuration nobody has proved: exit 2."""


class Different(SamebitsError):
    """A bit claim is false: exit 1."""

    exit_code = EXIT_DIFFERENT


class NotObserved(SamebitsError):
    """The claim was not exercised, its control did not diverge, or its record is stale: exit 3."""

    exit_code = EXIT_NOT_OBSERVED
