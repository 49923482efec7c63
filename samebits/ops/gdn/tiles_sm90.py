"""Launch geometry of the Hopper kernels of `gdn`: pinned, nothing is tuned at run time.

None of it may move a bit; a change is admitted by comparing bits on the chip.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Warps, columns of the value dimension or heads in one block, stages of a pipelined loop."""

    warps: int
    columns: int = 0
    heads: int = 1
    stages: int = 1


BEGIN = Tile(heads=8, warps=1)
LOWER = Tile(warps=4)
SOLVE = Tile(warps=1)
SCAN = Tile(columns=64, warps=4, stages=3)
ROWS = Tile(columns=128, warps=4, stages=2)
RECUR = Tile(columns=32, warps=4)
DECODE_ROW = Tile(warps=4, heads=2)
DECODE_STATE = Tile(columns=32, warps=4)
DECODE_CLOSE = Tile(columns=32, warps=4)
DECODE_RECUR = Tile(columns=32, warps=4)
REVERSE = Tile(columns=32, warps=4)
GRADIENTS = Tile(columns=32, warps=8)
TABLE = 128  # sequences that the first pass looks at together
CLOSING = 264  # programs that close chunks
