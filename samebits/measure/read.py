"""Read dumps: JSON Lines (`.gz` too), one line per sequence.

    {"id": "7", "rollout_logprobs": [..], "trainer_logprobs": [..], "tokens": [..], "mask": [..]}

`id`, `tokens` and `mask` are optional in one file. Two files (rollout first, trainer second) hold
one side each and are joined by `id`. Other spellings are in the tables below; verl's
`rollout_log_probs`, `old_log_probs`, `responses` and `response_mask` are among them. Where a line
has a mask, only its ones count, so padded rows may stay padded.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from samebits.errors import Refused, word

ROLLOUT = (
    "rollout_logprobs",
    "rollout_log_probs",
    "sampling_logprobs",
    "inference_logprobs",
    "generation_logprobs",
    "vllm_logprobs",
)
TRAINER = (
    "trainer_logprobs",
    "trainer_log_probs",
    "old_log_probs",
    "old_logprobs",
    "actor_log_probs",
    "train_log_probs",
    "policy_log_probs",
    "megatron_logprobs",
)
EITHER = ("logprobs", "log_probs", "token_logprobs")  # in a file that holds one side
TOKENS = ("tokens", "token_ids", "responses", "response_ids", "response_tokens", "output_ids")
MASK = ("mask", "response_mask", "loss_mask")
ID = ("id", "uid", "request_id", "sample_id", "index")

# A log-probability is at most 0; a little above it comes from rounding.
_LARGEST = 1e-2
_LARGE = 8 << 20  # bytes of a file that takes long enough to show how far it is read
_KINDS = {
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


@dataclass(frozen=True)
class Sequence:
    """Masked streams of one sequence, float64 as written. A missing id is `file:line`."""

    id: str
    rollout: np.ndarray
    trainer: np.ndarray
    rollout_tokens: np.ndarray | None = None
    trainer_tokens: np.ndarray | None = None


@dataclass(frozen=True)
class Dump:
    """Sequences of both sides, and the files they came from."""

    sequences: tuple[Sequence, ...]
    files: tuple[str, ...]


def read(paths: Many[Path]) -> Dump:
    """Read one file with both sides, or a rollout file and a trainer file; `-` is stdin.

    A byte-order mark is skipped. Raises Refused SB1001 (file cannot be read), SB0306 (a key twice
    in one object), SB1002 (a line lacks a field or lengths differ),
    SB1003 (values are no log-probabilities), SB1004 (ids do not join).
    """
    if len(paths) not in (1, 2):
        raise Refused(
            "SB1004",
            seen=f"{len(paths)} files",
            required="one file with both sides, or a rollout file and a trainer file",
            hint="samebits measure --help",
        )
    names = tuple(str(path) for path in paths)
    if len(paths) == 1:
        found = [_both_sides(where, row) for where, row in _rows(paths[0])]
    else:
        found = _join(paths[0], paths[1])
    return Dump(tuple(found), names)


@contextlib.contextmanager
def _lines(path: Path) -> Iterator[Iterable[bytes]]:
    """Lines of a dump as bytes; how much of a large file is read is shown on stderr."""
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress

    columns = ("{task.description}", BarColumn(), DownloadColumn())
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        with Progress(*columns, console=Console(stderr=True), disable=size < _LARGE) as progress:
            read = progress.wrap_file(file, total=size, description=escape(path.name))
            yield gzip.GzipFile(fileobj=read) if path.suffix == ".gz" else read


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    count = number = 0
    try:
        with _lines(path) as lines:
            for number, line in enumerate(lines, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                where = f"{path.name}:{number}"
                row = json.loads(text, object_pairs_hook=functools.partial(_once, where))
                if not isinstance(row, dict):
                    raise _bad_line(where, _KINDS[type(row)], "an object")
                count += 1
                yield where, row
    except json.JSONDecodeError as problem:
        raise _unreadable(path, f"{problem.msg} at column {problem.colno}", number) from None
    # ValueError: not UTF-8, or a number of thousands of digits
    except (ValueError, RecursionError) as problem:
        raise _unreadable(path, str(problem), number) from None
    except (OSError, EOFError, zlib.error) as problem:
        raise _unreadable(path, str(problem)) from None
    if count == 0:
        raise _unreadable(path, "no line")


def _once(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in row if names.count(name) > 1)
        raise Refused(
            "SB0306",
            seen=f"{where}: `{twice}` {names.count(twice)} times in one object",
            required="every key once",
            hint="samebits explain SB0306",
        )
    return row


def _both_sides(where: str, row: dict[str, Any]) -> Sequence:
    names = {"rollout": _field(row, ROLLOUT, where), "trainer": _field(row, TRAINER, where)}
    rollout, trainer = (_numbers(where, name, row[name]) for name in names.values())
    tokens = _tokens(where, row)
    keep = _mask(where, row, rollout.size)
    _same_length(where, names["rollout"], rollout, names["trainer"], trainer)
    if tokens is not None:
        _same_length(where, names["rollout"], rollout, "tokens", tokens)
        tokens = tokens[keep]
    left = _checked(where, names["rollout"], rollout[keep])
    right = _checked(where, names["trainer"], trainer[keep])
    return Sequence(str(_value(row, ID, where)), left, right, tokens, tokens)


def _join(rollout: Path, trainer: Path) -> list[Sequence]:
    left = _one_side(rollout, (*ROLLOUT, *EITHER))
    right = _one_side(trainer, (*TRAINER, *EITHER))
    missing = [key for key in left if key not in right] + [key for key in right if key not in left]
    if missing:
        raise Refused(
            "SB1004",
            seen=f"{len(missing)} ids in one file only, first {missing[0]!r}",
            required="the same ids in both files",
            hint="samebits explain SB1004",
        )
    found = []
    for key, (values, tokens) in left.items():
        others, other_tokens = right[key]
        _same_length(f"id {key}", rollout.name, values, trainer.name, others)
        found.append(Sequence(key, values, others, tokens, other_tokens))
    return found


def _one_side(
    path: Path, spellings: tuple[str, ...]
) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    found = {}
    for where, row in _rows(path):
        key = _value(row, ID, None)
        if key is None or str(key) in found:
            raise Refused(
                "SB1004",
                seen=f"{where}: " + ("no id" if key is None else f"id {key!r} a second time"),
                required=f"one of {', '.join(ID)}, different on every line",
                hint="samebits explain SB1004",
            )
        name = _field(row, spellings, where)
        values = _numbers(where, name, row[name])
        keep = _mask(where, row, values.size)
        tokens = _tokens(where, row)
        if tokens is not None:
            _same_length(where, name, values, "tokens", tokens)
            tokens = tokens[keep]
        found[str(key)] = (_checked(where, name, values[keep]), tokens)
    return found


# --- fields ---------------------------------------------------------------------------------


def _field(row: dict[str, Any], spellings: tuple[str, ...], where: str) -> str:
    present = [name for name in spellings if row.get(name) is not None]
    if len(present) != 1:
        seen = " and ".join(present) if present else f"the fields {', '.join(row) or '(none)'}"
        raise _bad_line(where, seen, f"exactly one of {', '.join(spellings)}")
    return present[0]


def _value(row: dict[str, Any], spellings: tuple[str, ...], default: Any) -> Any:
    return next((row[name] for name in spellings if row.get(name) is not None), default)


def _numbers(where: str, name: str, values: Any) -> np.ndarray:
    """float64; null (as APIs give for a first token) becomes NaN and must be masked, and what
    fp32 cannot hold becomes an infinity, as both engines would have it."""
    if not isinstance(values, list) or not all(
        value is None or type(value) in (int, float) for value in values
    ):
        raise _bad_line(where, f"{name} is not a list of numbers", "one number per token")
    try:
        found = np.array([np.nan if value is None else value for value in values], np.float64)
    except OverflowError:
        seen = f"{name} holds an integer that no floating-point number reaches"
        raise _bad_line(where, seen, "natural logarithms of probabilities") from None
    return np.where(np.abs(found) > np.finfo(np.float32).max, np.copysign(np.inf, found), found)


def _tokens(where: str, row: dict[str, Any]) -> np.ndarray | None:
    values = _value(row, TOKENS, None)
    if not isinstance(values, list):
        return None  # text, as some dumps keep it
    if not all(type(value) is int for value in values):
        raise _bad_line(where, "tokens are not integers", "one token id per log-probability")
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise _bad_line(where, "a token id beyond 64 bits", "token ids") from None


def _mask(where: str, row: dict[str, Any], length: int) -> np.ndarray:
    values = _value(row, MASK, None)
    if values is None:
        return np.ones(length, bool)
    if not isinstance(values, list) or not all(value in (0, 1) for value in values):
        raise _bad_line(where, "a mask of other values than 0 and 1", "one 0 or 1 per token")
    if len(values) != length:
        raise _bad_line(where, f"a mask of {len(values)} for {length} tokens", "equal lengths")
    return np.array(values, bool)


def _same_length(where: str, left: str, a: np.ndarray, right: str, b: np.ndarray) -> None:
    if a.size != b.size:
        seen = f"{left} has {a.size} entries, {right} has {b.size}"
        raise _bad_line(where, seen, "one entry per token on both sides")


def _checked(where: str, name: str, values: np.ndarray) -> np.ndarray:
    largest = values.max(initial=-np.inf, where=~np.isnan(values))
    if largest > _LARGEST:
        raise Refused(
            "SB1003",
            seen=f"{where}: {name} holds {largest:g}",
            required="natural logarithms of probabilities: at most 0",
            hint="samebits explain SB1003",
        )
    return values


def _bad_line(where: str, seen: str, required: str) -> Refused:
    return Refused(
        "SB1002", seen=f"{where}: {seen}", required=required, hint="samebits measure --help"
    )


def _unreadable(path: Path, problem: str, line: int = 0) -> Refused:
    """SB1001; `line` is that of the problem, 0 where it is of the whole file."""
    packed = path.suffix == ".gz"
    if str(path) == "-":
        hint = "samebits measure --help"
    elif not path.is_file():
        hint = f"ls {word(path if path.is_dir() else path.parent)}"
    elif packed and line:
        hint = f"zcat {word(path)} | sed -n {line}p | tail -c 300"
    elif packed:
        hint = f"zcat {word(path)} | head -c 300"
    elif line:
        hint = f"sed -n {line}p {word(path)} | tail -c 300"
    else:
        hint = f"head -c 300 {word(path)}"
    place = f"{path}:{line}" if line else str(path)
    return Refused("SB1001", seen=f"{place}: {problem}", required="JSON Lines", hint=hint)
