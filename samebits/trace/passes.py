"""One forward pass of an engine, while it is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samebits.trace import digests
from samebits.trace.rows import Piece

# Regions that see a padded batch sequence by sequence; the others see [tokens, batch, features].
_BY_SEQUENCE = (
    *("embedding", "attention", "norm.gated"),
    *("gdn.conv", "gdn.l2_norm", "gdn.gate", "gdn.core"),
)


@dataclass
class Pass:
    """One forward pass over a batch of `batch` padded sequences, or over rows without padding.

    ids    one row of the pass for each, sequence by sequence
    rows   those of the sequence; None until attention says which rows are whose
    """

    ids: np.ndarray
    batch: int
    number: int
    calls: int = 0
    waiting: list[tuple[str, dict[str, np.ndarray]]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    rows: np.ndarray | None = None
    positions: np.ndarray | None = None
    normed: Any = None  # output of the latest norm: the last one goes to the output layer
    projected: set[int] = field(default_factory=set)  # rows that the output layer had

    def of(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Where a call of a region has `rows`: token by token, if the batch is padded."""
        if self.batch == 1 or name in _BY_SEQUENCE:
            return rows
        length = len(self.ids) // self.batch
        return rows % length * self.batch + rows // length


def projected(step: Pass, given: np.ndarray) -> np.ndarray:
    """Rows of the pass that a call of the output layer was given, by what the last norm returned.

    An engine that samples projects the last row of every piece, one that scores any others.
    ValueError for rows that the last norm did not return.
    """
    whole = np.arange(len(step.ids))
    normed = digests.of_rows(digests.rows_of(step.normed, len(whole)))[step.of("norm.rms", whole)]
    ends = np.array([piece.row + piece.count - 1 for piece in step.pieces])
    if np.array_equal(normed[ends], given):
        return ends
    places: dict[int, list[int]] = {}
    for row, digest in enumerate(normed.tolist()):
        places.setdefault(digest, []).append(row)
    found: list[int] = []
    for digest in given.tolist():
        # Requests with one prompt have equal rows: each is taken once.
        free = [row for row in places.get(digest, ()) if row not in step.projected]
        if not free:
            raise ValueError("the output layer was given rows that the last norm did not return")
        found.append(free[0])
        step.projected.add(free[0])
    return np.array(found)
