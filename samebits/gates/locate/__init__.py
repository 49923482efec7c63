"""Descend from a differing log-probability to the first layer, region and element that differ.

The sequence is computed by the arms behind the comparison (`arms`, `refit`), with every aligned
call on its rows recorded, alone first and in its batch where that shows nothing. Two arms are then
compared call by call (`pairs`), and the outcome is put into words (`reporting`).
"""

from __future__ import annotations

from samebits.gates.locate.pairs import PAIRS, REFITS
from samebits.gates.locate.reporting import GONE, command, one_sequence, reports, write

__all__ = ["GONE", "PAIRS", "REFITS", "command", "one_sequence", "reports", "write"]
