"""Compare log-probabilities that a user dumped from a rollout engine and a trainer.

    report = measure(read([Path("dump.jsonl")]))

`read` accepts the field spellings of common dumps, `measure` counts and diagnoses. numpy only.
"""

from samebits.measure.read import Dump, Sequence, read
from samebits.measure.report import Report, measure

__all__ = ["Dump", "Report", "Sequence", "measure", "read"]
