"""Recompute what a statement claims, and say whether it still describes this checkout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits import recipe as recipes
from samebits.errors import (
    EXIT_DIFFERENT,
    EXIT_EQUAL,
    EXIT_NOT_OBSERVED,
    NotObserved,
    Refused,
)
from samebits.evidence import current
from samebits.evidence.statement import Statement, required_legs
from samebits.evidence.verdict import DIFFERENT, EQUAL, Judgement, judge, judge_legs


@dataclass(frozen=True)
class Result:
    """Outcome of `verify`: recomputed judgement, and what changed since the run."""

    path: Path
    statement: Statement
    judgement: Judgement
    legs: dict[str, Judgement]
    stale: tuple[str, ...]

    @property
    def status(self) -> str:
        """EQUAL, DIFFERENT, NOT_OBSERVED, or STALE: a stale record says nothing about now."""
        return "STALE" if self.stale else self.judgement.verdict

    @property
    def exit_code(self) -> int:
        """0 EQUAL, 1 DIFFERENT, 3 NOT_OBSERVED or STALE."""
        codes = {EQUAL: EXIT_EQUAL, DIFFERENT: EXIT_DIFFERENT}
        return codes.get(self.status, EXIT_NOT_OBSERVED)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`; counts are per leg and are never summed."""
        predicate = self.statement.predicate
        rows = [*predicate["comparisons"], *predicate["oracle"]]
        legs = {}
        for leg, judgement in self.legs.items():
            found = [row for row in rows if row["leg"] == leg]
            steps = (predicate["rl"] or {"aligned": []})["aligned"] if leg == "rl" else []
            legs[leg] = {
                "verdict": judgement.verdict,
                "tokens": sum(row["tokens"] for row in [*found, *steps]),
                "mismatches": sum(row.get("mismatches", 0) for row in [*found, *steps]),
                "reasons": list(judgement.reasons),
            }
        return {
            "case": self.statement.case,
            "file": str(self.path),
            "statement": self.statement.digest,
            "status": self.status,
            "verdict": self.judgement.verdict,
            "reasons": list(self.judgement.reasons),
            "stale": list(self.stale),
            "reproduced": bool(predicate["reproductions"]),
            "legs": legs,
        }


def _locate(target: str | Path) -> tuple[Path, recipes.Recipe | None]:
    """Evidence file, and the recipe beside or above it."""
    path = Path(target)
    if path.is_file() and path.suffix == ".json":
        near = [folder / "recipe.yaml" for folder in path.resolve().parents[:2]]
        found = next((file for file in near if file.is_file()), None)
        return path, recipes.load(found) if found else None
    recipe = recipes.load(target)
    if not recipe.evidence_path.is_file():
        raise NotObserved(
            "SB0805",
            seen=f"case {recipe.case} has no {recipe.evidence_path.name}",
            required="a recorded run of its gates",
            hint=f"samebits prove {recipe.case} --record",
        )
    return recipe.evidence_path, recipe


def _check_parameters(statement: Statement, recipe: recipes.Recipe) -> None:
    """With an unchanged recipe, evidence must ask what the recipe asks."""
    parameters = statement.predicate["parameters"]
    steps = (0, int((recipe.rl or {}).get("steps", 0)))
    if parameters["legs"] == required_legs(recipe.legs) and parameters["rl_steps"] in steps:
        return
    raise Refused(
        "SB0807",
        seen="the legs, tokens, hazards or RL steps that the evidence asks for",
        required=f"those of {recipe.path}",
        hint=f"samebits prove {recipe.case} --record",
    )


def _stale(statement: Statement, recipe: recipes.Recipe) -> list[str]:
    predicate = statement.predicate
    reasons = []
    if predicate["parameters"]["recipe"] != recipe.digest:
        reasons.append("recipe changed")
    else:
        _check_parameters(statement, recipe)
    recorded = {s["name"]: s["digest"].get("gitTree") for s in statement.data["subject"]}
    for upstream, tree in current.trees(recipe).items():
        if tree is None or recorded.get(f"tree/{upstream}") != tree:
            reasons.append(f"tree of {upstream} changed")
    reasons += [f"{name} changed" for name in current.changed_sources(predicate["sources"])]
    if recipe.contract_path.is_file():
        from samebits.contract import Contract

        if (
            Contract.load(recipe.contract_path).identity
            != (predicate["parameters"]["contract"]["identity"])
        ):
            reasons.append("contract changed")
    else:
        reasons.append("contract is gone")
    return reasons


def verify(target: str | Path) -> Result:
    """Check an evidence file, or the one of a case. Needs no torch.

    Refuses (exit 2) what is truncated, forged, of another schema, or at odds with its own counts;
    the result's `exit_code` is 0 for EQUAL, 1 for DIFFERENT, 3 for NOT_OBSERVED or STALE.
    """
    path, recipe = _locate(target)
    statement = Statement.load(path)
    if recipe is None or recipe.case != statement.case:
        recipe = recipes.load(statement.case)
    predicate = statement.predicate
    return Result(
        path=path,
        statement=statement,
        judgement=judge(predicate),
        legs=judge_legs(predicate),
        stale=tuple(_stale(statement, recipe)),
    )
