"""Record what every aligned region returned for one sequence, and find where two engines part.

Both engines call the same operators for one sequence. A driver names it with `start`, in the folder
that SAMEBITS_TRACE names to the engine; while that folder exists, every call leaves one file in it
with the rows of that sequence, whatever else is in the batch:

    0003-0017.attention.npz    pass and call; with several ranks in a folder of each rank

`position` [rows], `output` [rows, features] as bit patterns, and digests of the operands. `load`
brings the calls of both engines and of any number of ranks into one order of calls and columns.
"""

from __future__ import annotations

from samebits.trace.columns import Columns
from samebits.trace.compare import RegionDifference, first_difference
from samebits.trace.operators import Operator, Scored, load_scored
from samebits.trace.operators import load as load_operators
from samebits.trace.read import Call, load
from samebits.trace.record import install, start

__all__ = [
    "Call",
    "Columns",
    "Operator",
    "RegionDifference",
    "Scored",
    "first_difference",
    "install",
    "load",
    "load_operators",
    "load_scored",
    "start",
]
