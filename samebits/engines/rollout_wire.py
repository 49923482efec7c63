"""What travels between a rollout driver and the process that runs vLLM. Imports no engine.

Errors cross three process borders (worker, engine core, front end), and vLLM carries only their
text. A worker therefore also writes one marked line to its standard error, and the driver, which
owns that stream, rebuilds the error from it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from samebits import errors
from samebits.errors import SamebitsError

MARK = "samebits-error: "


@dataclass(frozen=True)
class Request:
    """One prompt to continue: token ids in, token ids out.

    seed        of this request alone; samples of one prompt take distinct seeds
    ignore_eos  sample exactly `max_tokens` tokens
    """

    prompt: Sequence[int]
    max_tokens: int
    seed: int
    ignore_eos: bool = False


@dataclass(frozen=True)
class Completion:
    """tokens [n]; logprob_bits uint32 [n], fp32 bit patterns, one per sampled token.

    cached_tokens  prompt tokens that came from the prefix cache
    request_id     key of this request in `RolloutEngine.row_digests`
    """

    tokens: tuple[int, ...]
    logprob_bits: np.ndarray
    cached_tokens: int
    finish_reason: str
    request_id: str


@dataclass(frozen=True)
class Score:
    """logprob_bits uint32 [n - 1]: of tokens 1 .. n - 1, each given the tokens before it."""

    logprob_bits: np.ndarray
    request_id: str


def bits_of(values: Sequence[float]) -> np.ndarray:
    """fp32 bit patterns of Python floats that came from fp32 (the way back is exact)."""
    return np.asarray(values, dtype=np.float64).astype(np.float32).view(np.uint32)


def encode(error: SamebitsError) -> dict[str, str]:
    """A refusal as a JSON record."""
    return {
        "type": type(error).__name__,
        "id": error.error_id,
        "seen": error.seen,
        "required": error.required,
        "hint": error.hint,
    }


def decode(record: dict[str, str]) -> SamebitsError:
    """The error of `encode`, raised by the caller."""
    kind = getattr(errors, record["type"])
    return kind(record["id"], seen=record["seen"], required=record["required"], hint=record["hint"])


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Let a `SamebitsError` pass on, and leave its marked line on standard error."""
    try:
        yield
    except SamebitsError as error:
        print(MARK + json.dumps(encode(error)), file=sys.stderr, flush=True)
        raise


def find(log: str) -> SamebitsError | None:
    """The first error that a process reported in its output; vLLM may prefix lines."""
    for line in log.splitlines():
        _, mark, record = line.partition(MARK)
        if mark:
            with contextlib.suppress(ValueError, KeyError, AttributeError):
                return decode(json.loads(record))
    return None
