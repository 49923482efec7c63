"""The region inventory of a case, as `samebits trace` leaves it: read without engines or torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samebits.contract import Contract

FILE = "inventory.json"  # beside the case's runs
# What it must not find; each is a list of names in the file.
PROBLEMS = ("unbound", "uncalled", "unwatched", "uncovered", "differing")


def read(runs: Path, contract: Contract) -> dict[str, Any] | None:
    """The inventory in the folder of a case's runs, None where none says all of this contract."""
    path = runs / FILE
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    whole = found.keys() >= {"contract", *PROBLEMS}
    return found if whole and found["contract"] == contract.identity else None
