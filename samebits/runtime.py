"""The one contract, the one platform and the one mode of this process.

Environment (the only switches; none of them weakens a check):

    SAMEBITS_CONTRACT    path of a contract file; both engines load the same bytes
    SAMEBITS_PLATFORM    `cpu` (default) or `sm90`: the kind of chip that the case's recipe names;
                         a contract of another platform is refused
    SAMEBITS_ARITHMETIC  `aligned` (default) or `stock`: stock leaves each engine's own modules
                         and torch's native operators in place and serves as negative control
    SAMEBITS_FAULT       name of a planted fault (`samebits.faults`), for negative controls only;
                         evidence records it, and a run that carries one can never be EQUAL
    SAMEBITS_TRACE       folder of a trace (`samebits.trace`); while it exists, every aligned call
                         is recorded in it. Slow; moves no bit
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import Refused

if TYPE_CHECKING:
    from samebits.contract import Contract


PLATFORMS = ("cpu", "sm90")


def platform() -> str:
    """`cpu` or `sm90`: what this process computes on."""
    value = os.environ.get("SAMEBITS_PLATFORM", "cpu")
    if value not in PLATFORMS:
        raise Refused(
            "SB0326",
            seen=f"SAMEBITS_PLATFORM={value}",
            required=" or ".join(PLATFORMS),
            hint="unset SAMEBITS_PLATFORM",
        )
    return value


def arithmetic() -> str:
    """`aligned` or `stock`."""
    value = os.environ.get("SAMEBITS_ARITHMETIC", "aligned")
    if value not in ("aligned", "stock"):
        raise Refused(
            "SB0301",
            seen=f"SAMEBITS_ARITHMETIC={value}",
            required="aligned or stock",
            hint="unset SAMEBITS_ARITHMETIC",
        )
    return value


def aligned() -> bool:
    """Whether this process computes with the shared operators."""
    return arithmetic() == "aligned"


def fault() -> str | None:
    """Name of the planted fault of this process, or None."""
    return os.environ.get("SAMEBITS_FAULT") or None


@functools.cache
def contract() -> Contract:
    """The contract that SAMEBITS_CONTRACT names, validated once per process."""
    path = os.environ.get("SAMEBITS_CONTRACT")
    if not path:
        raise Refused(
            "SB0302",
            seen="SAMEBITS_CONTRACT is not set",
            required="the path of the case's contract file",
            hint="samebits contract build CASE",
        )
    from samebits.contract import Contract

    return Contract.load(Path(path))
