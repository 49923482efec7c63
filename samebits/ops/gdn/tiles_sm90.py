"""Launch geometry of the Hopper kernels of `gdn`: pinned, nothing is tuned at run time.

None of it may move a bit; a change is admitted by comparing bits on the chip.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Columns of the value dimension in one block, warps, stages of the pipelined loop."""

    columns: int
    warps: int
    stages: int = 1


PREPARE = Tile(columns=0, warps=4)
SCAN = Tile(columns=32, warps=8, stages=2)
ROWS = Tile(columns=64, warps=4)
RECUR = Tile(columns=32, warps=4)
DECODE_ROW = Tile(columns=0, warps=4)
DECODE_STATE = Tile(columns=32, warps=4)
DECODE_RECUR = Tile(columns=32, warps=4)
REVERSE = Tile(columns=32, warps=4)
GRADIENTS = Tile(columns=32, warps=8)
