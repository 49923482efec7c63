"""Evidence: what a gate observed, as an in-toto statement whose verdict follows from its counts.

    statement = evidence.build(recipe, contract, comparisons=[...], limits=[...], ...)
    evidence.write(statement, recipe.evidence_path)
    result = evidence.verify(recipe.evidence_path)      # result.exit_code

Nothing here imports torch: a verdict can be checked on a machine that could not produce it.
"""

from samebits.evidence.difference import DifferenceReport, Side
from samebits.evidence.merge import merge
from samebits.evidence.statement import (
    Statement,
    build,
    comparison,
    control,
    number,
    oracle,
    rl,
    rl_step,
    write,
)
from samebits.evidence.verdict import Judgement, judge
from samebits.evidence.verify import Result, verify

__all__ = [
    "DifferenceReport",
    "Judgement",
    "Result",
    "Side",
    "Statement",
    "build",
    "comparison",
    "control",
    "judge",
    "merge",
    "number",
    "oracle",
    "rl",
    "rl_step",
    "verify",
    "write",
]
