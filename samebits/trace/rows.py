"""Which rows of a forward pass belong to one sequence, from the tables that attention was given."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one sequence in a pass.

    row, count  first row of the pass, and how many
    position    of the first row in its sequence
    blocks      pages of the sequence's cache, in order; none where it is computed whole
    """

    row: int
    count: int
    position: int
    blocks: Sequence[int] = ()


def _integers(x) -> list:
    return x.detach().cpu().tolist()


def paged(block_table, query_start, seq_lens, block_size: int) -> list[Piece]:
    """Pieces of a pass of `attention.paged`; requests without rows are left out."""
    starts, pieces = _integers(query_start), []
    rows = zip(_integers(block_table), _integers(seq_lens), strict=True)
    for index, (blocks, length) in enumerate(rows):
        count = starts[index + 1] - starts[index]
        if count:
            used = blocks[: -(-length // block_size)]
            pieces.append(Piece(starts[index], count, length - count, used))
    return pieces


def packed(cu_seqlens) -> list[Piece]:
    """Pieces of a pass of `attention.varlen`: whole sequences."""
    starts = _integers(cu_seqlens)
    return [Piece(a, b - a, 0) for a, b in itertools.pairwise(starts) if b > a]


class Finder:
    """Follows one sequence through the passes of an engine.

    A request is the sequence, or shares its beginning, when its tokens so far are those of the
    sequence: it starts at position 0, or goes on behind a page that holds such tokens. That
    survives splitting, preemption and a hit of the prefix cache. A row that is found twice
    (computed again, or for another request with the same beginning) has the same operands.
    """

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens
        self._held: dict[int, int] = {}  # page -> its place in the sequence

    def find(
        self, ids: np.ndarray, pieces: Sequence[Piece], block_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows and positions of the sequence in a pass over `ids` [T]."""
        rows, positions = [], []
        for piece in pieces:
            # A whole sequence may have padding behind it, which it does not see.
            count = piece.count if piece.blocks else min(piece.count, len(self._tokens))
            span = np.arange(piece.position, piece.position + count)
            ours = self._continues(piece, block_size) and np.array_equal(
                ids[piece.row : piece.row + count], self._tokens[span[0] : span[-1] + 1]
            )
            for place in sorted({p // block_size for p in span.tolist()}) if piece.blocks else ():
                if ours:
                    self._held[piece.blocks[place]] = place
                else:
                    self._held.pop(piece.blocks[place], None)
            if ours:
                rows.append(piece.row + np.arange(count))
                positions.append(span)
        empty = np.zeros(0, np.int64)
        return np.concatenate([empty, *rows]), np.concatenate([empty, *positions])

    def _continues(self, piece: Piece, block_size: int) -> bool:
        if piece.position == 0:
            return True
        place = (piece.position - 1) // block_size
        return self._held.get(piece.blocks[place]) == place
