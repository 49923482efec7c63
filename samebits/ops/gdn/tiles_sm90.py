"""Launch geometry of the Hopper kernels of `gdn`: pinned, nothing is tuned at run time.

Where one tile is not best for every shape, a function picks it by the shapes of a launch. None of
it may move a bit; a change is admitted by comparing bits on the chip.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Warps, columns of the value dimension, heads in one block at most, stages of a loop."""

    warps: int
    columns: int = 0
    heads: int = 1
    stages: int = 1

    def fitted(self, size: int) -> int:
        """Columns in a value dimension of `size`, which may be smaller than the tile."""
        return min(self.columns, size)


BEGIN = Tile(heads=4, warps=1)
LOWER = Tile(warps=4)
SOLVE = Tile(warps=1)
ODD = Tile(columns=32, warps=4)
WHOLE = Tile(columns=32, warps=4, stages=3)
ROWS = Tile(columns=128, warps=4)
RECUR = Tile(columns=32, warps=4)
DECODE_CLOSE = Tile(columns=64, warps=4, stages=3)
ODD_CLOSE = Tile(columns=32, warps=4)
DECODE_ROW = Tile(heads=2, warps=2)
DECODE_STATE = Tile(columns=64, warps=2)
FEW_PAIRS = 512  # of sequence and value head, up to which a decode step is one launch
DECODE_RECUR = Tile(columns=32, warps=4)
INNER = Tile(columns=128, warps=4)
REVERSE = Tile(columns=32, warps=4)
GRADIENTS = Tile(columns=32, warps=4)
SEGMENT = 8  # chunks at least between two states that training keeps
TABLE = 128  # sequences that the first pass looks at together
PROCESSORS = 132
CLOSING = PROCESSORS  # programs that close chunks
CLOSE_TABLE = 256  # sequences that such a program looks at together


def chain(chains: int, size: int) -> Tile:
    """Of a serial pass in Gluon, for this many pairs of sequence and value head: more stages
    where each of its programs has a processor to itself."""
    alone = chains * (size // 64) <= PROCESSORS
    return Tile(columns=64, warps=4, stages=3 if alone else 2)


def segment(chunks: int, heads: int, size: int) -> int:
    """Chunks between two states that training keeps: the backward goes through the pieces side by
    side, a few programs for each processor."""
    return max(SEGMENT, chunks * heads * (size // 64) // (4 * PROCESSORS))
