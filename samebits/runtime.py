"""The one contract, the one platform and the one mode of this process.

Environment (the only switches; none of them weakens a check):

    SAMEBITS_CONTRACT    path of a contract file; both engines load the same bytes
    SAMEBITS_PLATFORM    `cpu` (default) or `sm90`: the kind of chip that the case's recipe names;
                         a contract of another platform is refused
    SAMEBITS_ARITHMETIC  `aligned` (default) or `stock`: stock leaves each engine's own modules
                         and torch's native operators in place and serves as negative control.
                         `only:REGION,REGION` aligns these regions and leaves all others stock: a
                         rung of a ladder (`samebits.gates.ladder`), and a control like stock
    SAMEBITS_FAULT       name of a planted fault (`samebits.faults`), for negative controls only;
                         evidence records it, and a run that carries one can never be EQUAL
    SAMEBITS_TRACE       folder of a trace (`samebits.trace`); while it exists, every aligned call
                         is recorded in it. Slow; moves no bit
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import Refused

if TYPE_CHECKING:
    from samebits.contract import Contract


PLATFORMS = ("cpu", "sm90")
_ONLY = "only:"


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


def only(regions: Iterable[str]) -> str:
    """The value of SAMEBITS_ARITHMETIC under which these regions are aligned and no other is."""
    return _ONLY + ",".join(sorted(regions))


def arithmetic() -> str:
    """`aligned`, `stock`, or `only:` and regions; Refused SB0301 for anything else."""
    value = os.environ.get("SAMEBITS_ARITHMETIC", "aligned")
    _regions_of(value)
    return value


def aligned(region: str | None = None) -> bool:
    """Whether this process computes `region` with its shared operator; without one, every region.

    Where only some regions are aligned the process is a control, whatever they are.
    """
    value = arithmetic()
    return value == "aligned" if region is None else region in _regions_of(value)


def regions() -> frozenset[str]:
    """The regions that this process computes with the shared operators; none when it is stock."""
    return _regions_of(arithmetic())


@functools.cache
def _regions_of(value: str) -> frozenset[str]:
    from samebits.ops.registry import REGIONS, TOGETHER

    if value in ("aligned", "stock"):
        return frozenset(REGIONS if value == "aligned" else ())
    named = frozenset(value.removeprefix(_ONLY).split(","))
    parted = named & set(TOGETHER) and set(TOGETHER) - named
    if not value.startswith(_ONLY) or named - set(REGIONS) or parted:
        raise Refused(
            "SB0301",
            seen=f"SAMEBITS_ARITHMETIC={value}",
            required=f"aligned, stock, or {_ONLY} and some of {', '.join(REGIONS)}"
            + (f"; all of {', '.join(TOGETHER)} or none" if parted else ""),
            hint="unset SAMEBITS_ARITHMETIC",
        )
    return named


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
