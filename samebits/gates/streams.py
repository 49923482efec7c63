"""Streams of log-probabilities keyed by (sequence, position), and their comparison.

A *token compared* is one (sequence, position) that both streams hold. `position` is the index of
the predicted token in its whole sequence, so decode, prefill and trainer rows meet on one key.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from samebits import mismatch
from samebits.errors import Refused

_COLUMNS = {
    "sequence": np.int32,
    "position": np.int32,
    "token": np.int32,
    "bits": np.uint32,
    "digest_low": np.uint64,
    "digest_high": np.uint64,
}


@dataclass(frozen=True)
class FirstDifference:
    """First differing token in (sequence, position) order, with both patterns in hex."""

    sequence: int
    position: int
    token: int
    left: str
    right: str


@dataclass(frozen=True)
class Counts:
    """Outcome of one comparison; `values` is None where whole-row digests were compared.

    A NaN on either side is a mismatch, also where both sides have its bits. `finite` counts the
    mismatches whose log-probabilities are finite on both sides: only they make a control diverge.
    """

    tokens: int
    mismatches: int
    finite: int
    values: mismatch.Mismatch | None
    first: FirstDifference | None
    left_digest: str
    right_digest: str


class Stream:
    """Growable table of scored tokens."""

    def __init__(self, columns: dict[str, np.ndarray] | None = None):
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
        if columns is not None:
            self._append(columns)

    def _append(self, columns: dict[str, np.ndarray]) -> None:
        for name, dtype in _COLUMNS.items():
            self._parts[name].append(np.asarray(columns[name]).astype(dtype, copy=False))

    def add(self, sequence: int, first_position: int, tokens, bits, digests=None) -> None:
        """Append tokens of one sequence at consecutive positions.

        tokens [n] ids; bits [n] uint32 patterns of fp32 log-probabilities; digests [n, 2] uint64
        (low, high) of the whole logit rows, or None where they were not collected.
        """
        tokens, bits = np.asarray(tokens), mismatch.as_bits(bits)
        if len(tokens) != len(bits) or (digests is not None and len(digests) != len(tokens)):
            raise ValueError(f"sequence {sequence}: {len(tokens)} tokens, {len(bits)} values")
        rows = np.zeros((len(tokens), 2), np.uint64) if digests is None else np.asarray(digests)
        self._append(
            {
                "sequence": np.full(len(tokens), sequence),
                "position": first_position + np.arange(len(tokens)),
                "token": tokens,
                "bits": bits,
                "digest_low": rows[:, 0],
                "digest_high": rows[:, 1],
            }
        )

    def extend(self, other: Stream) -> None:
        """Append all rows of another stream."""
        self._append(other.columns())

    def shifted(self, base: int) -> Stream:
        """The same rows with `base` added to every sequence number."""
        columns = self.columns()
        return Stream({**columns, "sequence": columns["sequence"] + base})

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts["token"])

    def columns(self) -> dict[str, np.ndarray]:
        """All rows in (sequence, position) order; a key that occurs twice is refused."""
        whole = {
            name: np.concatenate(parts) if parts else np.zeros(0, _COLUMNS[name])
            for name, parts in self._parts.items()
        }
        order = np.lexsort((whole["position"], whole["sequence"]))
        whole = {name: column[order] for name, column in whole.items()}
        keys = self._keys(whole)
        if len(np.unique(keys)) != len(keys):
            raise ValueError("a (sequence, position) occurs twice in one stream")
        return whole

    @staticmethod
    def _keys(columns: dict[str, np.ndarray]) -> np.ndarray:
        return columns["sequence"].astype(np.int64) << 32 | columns["position"].astype(np.int64)

    def save(self, path: Path) -> None:
        """Write the columns to an .npz file."""
        np.savez(path, **self.columns())  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Stream:
        """Read what `save` wrote."""
        with np.load(path) as stored:
            return cls({name: stored[name] for name in _COLUMNS})


def _sha(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def _nan(columns: dict[str, np.ndarray]) -> np.ndarray:
    return np.isnan(columns["bits"].view(np.float32))


def _finite(columns: dict[str, np.ndarray]) -> np.ndarray:
    return np.isfinite(columns["bits"].view(np.float32))


def _shown(columns: dict[str, np.ndarray], i: int, what: str) -> str:
    """What was compared of row `i`, in hex."""
    if what == "row":
        return f"{columns['digest_high'][i]:016x}{columns['digest_low'][i]:016x}"
    return f"{columns['bits'][i]:08x}"


def _to_first_other(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> np.ndarray:
    """Which rows come no later in their sequence than the first token that differs."""
    other = a["token"] != b["token"]
    keep = np.ones(len(other), bool)
    for i in np.flatnonzero(other):
        keep &= (a["sequence"] != a["sequence"][i]) | (a["position"] <= a["position"][i])
    return keep


def compare(left: Stream, right: Stream, what: str = "logprob", *, sampled: bool = False) -> Counts:
    """Compare what both streams hold. `what` is "logprob" (bits) or "row" (logit-row digests).

    Tokens at one key must be the same token: a difference there is a broken capsule, not a
    numerical result, and is refused. With `sampled` the two sides chose their tokens themselves:
    another token is a mismatch, and ends its sequence, as what follows answers to another text.
    """
    a, b = left.columns(), right.columns()
    _, ia, ib = np.intersect1d(Stream._keys(a), Stream._keys(b), return_indices=True)
    a = {name: column[ia] for name, column in a.items()}
    b = {name: column[ib] for name, column in b.items()}
    if sampled:
        keep = _to_first_other(a, b)
        a, b = ({name: column[keep] for name, column in side.items()} for side in (a, b))
    other_token = a["token"] != b["token"]
    wrong = np.flatnonzero(other_token)
    if wrong.size and not sampled:
        i = int(wrong[0])
        raise Refused(
            "SB0901",
            seen=f"sequence {a['sequence'][i]} position {a['position'][i]}: tokens "
            f"{a['token'][i]} and {b['token'][i]}",
            required="both sides score the same token ids",
            hint="samebits explain SB0901",
        )
    if what == "row":
        # A row that holds a NaN has a log-probability that is one, whatever its digest.
        have = (a["digest_low"] | a["digest_high"]) != 0
        have &= (b["digest_low"] | b["digest_high"]) != 0
        a = {name: column[have] for name, column in a.items()}
        b = {name: column[have] for name, column in b.items()}
        differs = (a["digest_low"] != b["digest_low"]) | (a["digest_high"] != b["digest_high"])
        differs |= _nan(a) | _nan(b)
        values = None
        digests = (
            _sha(np.stack([a["digest_high"], a["digest_low"]])),
            _sha(np.stack([b["digest_high"], b["digest_low"]])),
        )
    else:
        differs = (a["bits"] != b["bits"]) | _nan(a) | _nan(b)
        values = mismatch.measure(a["bits"], b["bits"])
        differs |= other_token
        digests = (_sha(a["bits"]), _sha(b["bits"]))
    first = None
    if differs.any():
        i = int(np.flatnonzero(differs)[0])
        first = FirstDifference(
            int(a["sequence"][i]),
            int(a["position"][i]),
            int(a["token"][i]),
            _shown(a, i, what),
            _shown(b, i, what),
        )
    finite = differs & _finite(a) & _finite(b)
    return Counts(len(differs), int(differs.sum()), int(finite.sum()), values, first, *digests)
