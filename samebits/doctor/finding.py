"""One finding of the doctor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from samebits.errors import EXIT_EQUAL, EXIT_REFUSED


@dataclass(frozen=True)
class Finding:
    """severity: `ok`, `note` (worth knowing), `warning` (can move bits of native kernels), or
    `problem` (the job would stop, or its bits would be wrong). `fix` is one command; for a setting
    in a file of the user, that which shows its line. Empty for ok.
    """

    check: str
    severity: str
    seen: str
    required: str = ""
    fix: str = ""


def exit_code(findings: Iterable[Finding]) -> int:
    """2 where there is a problem, else 0."""
    return EXIT_REFUSED if any(f.severity == "problem" for f in findings) else EXIT_EQUAL
