"""Which schedule the contract names for the core of gated delta nets."""

from __future__ import annotations

from samebits import runtime
from samebits.errors import Refused
from samebits.ops import gdn


def contracted_schedule(key_dim: int, value_dim: int) -> str:
    """The schedule that the contract names; SB0614 for one, or heads, that the core lacks."""
    constants = runtime.contract().constants("gdn.core")
    schedule, chunk = str(constants["schedule"]), constants["chunk"]
    if schedule not in gdn.SCHEDULES or chunk != gdn.CHUNK or key_dim % 16 or value_dim % 16:
        raise Refused(
            "SB0614",
            seen=f"schedule {schedule}, chunks of {chunk}, heads of {key_dim} and {value_dim}",
            required=f"{' or '.join(gdn.SCHEDULES)}, chunks of {gdn.CHUNK}, heads in sixteens",
            hint="samebits explain SB0614",
        )
    return schedule
