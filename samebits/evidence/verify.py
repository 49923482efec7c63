"""Recompute what a statement claims, and say whether it still describes this checkout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits import recipe as recipes
from samebits.contract import Contract
from samebits.contract.fits import misfits, sizes_of
from samebits.errors import (
    EXIT_DIFFERENT,
    EXIT_EQUAL,
    EXIT_NOT_OBSERVED,
    NotObserved,
    Refused,
    word,
)
from samebits.evidence import current, required
from samebits.evidence.statement import VERIFIER, Statement, required_legs
from samebits.evidence.verdict import DIFFERENT, EQUAL, Judgement, judge, judge_legs


@dataclass(frozen=True)
class Result:
    """Outcome of `verify`: recomputed judgement, and what changed since the run.

    reproductions   operators whose second run of this evidence holds; 0 for a file elsewhere
    scope           what the verdict is less than (`Recipe.scope`)
    """

    path: Path
    statement: Statement
    judgement: Judgement
    legs: dict[str, Judgement]
    stale: tuple[str, ...]
    reproductions: int = 0
    scope: str = ""

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
            "scope": self.scope,
            "reasons": list(self.judgement.reasons),
            "stale": list(self.stale),
            "reproduced": self.reproductions > 0,
            "reproductions": self.reproductions,
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
            seen=f"{target} has no {recipe.evidence_path.name}",
            required="a recorded run of its gates",
            hint=f"samebits prove {word(target)} --record",
        )
    return recipe.evidence_path, recipe


def _check_parameters(statement: Statement, recipe: recipes.Recipe) -> None:
    """With an unchanged recipe, evidence must ask what the recipe asks."""
    parameters = statement.predicate["parameters"]
    wanted = {
        "legs": required_legs(recipe.legs),
        "layouts": sizes_of(recipe),
        "rl_steps": int((recipe.rl or {}).get("steps", 0)),
    }
    wrong = [name for name, value in wanted.items() if parameters.get(name) != value]
    if not wrong:
        return
    raise Refused(
        "SB0807",
        seen=f"{' and '.join(wrong)} that the evidence asks for",
        required=f"those of {recipe.path}",
        hint=f"samebits prove {recipe.case} --record",
    )


def _check_sources(statement: Statement, contract: Contract | None) -> None:
    """Evidence stands on all hooks, and on exactly what the contract that it names binds.

    `contract` is None where that contract is no longer there to compare with.
    """
    recorded = statement.predicate["sources"]
    hooks = {f"hooks/{engine}" for engine in current.HOOKS}
    bound = [source for source in recorded if source["name"] not in hooks]
    missing = sorted(hooks - {source["name"] for source in recorded})
    covered = statement.predicate["claim"]["covered"]
    if contract is not None:
        wanted = current.bound_sources(contract)
        missing += [source["name"] for source in wanted if source not in bound]
        missing += [source["name"] for source in bound if source not in wanted]
        if covered != list(contract.data["cases"]):
            missing.append(f"claim of {', '.join(covered)}")
    if missing:
        raise Refused(
            "SB0809",
            seen=f"missing, or not what the contract binds: {', '.join(dict.fromkeys(missing))}",
            required="the contract's implementations and cases, and the hooks of every engine",
            hint=f"samebits prove {statement.case} --record",
        )


def stale_reasons(statement: Statement, recipe: recipes.Recipe) -> list[str]:
    """What changed since a statement was written; refuses one that leaves something out."""
    predicate = statement.predicate
    reasons = []
    if predicate["verifier"] != VERIFIER:
        reasons.append(f"written for version {predicate['verifier']['version']} of the verifier")
    if predicate["parameters"]["recipe"] != recipe.digest:
        reasons.append("recipe changed")
    elif not reasons:
        _check_parameters(statement, recipe)
        required.check(statement, recipe)
    return reasons + changes(statement, recipe)


def changes(statement: Statement, recipe: recipes.Recipe) -> list[str]:
    """What a statement stands on, beside the recipe itself, that is another now.

    Also fit for an unrecorded run, which may ask for fewer tokens than the recipe does.
    """
    predicate = statement.predicate
    reasons = []
    recorded = {s["name"]: s["digest"].get("gitTree") for s in statement.data["subject"]}
    for upstream, tree in current.trees(recipe).items():
        if tree is None or recorded.get(f"tree/{upstream}") != tree:
            reasons.append(f"tree of {upstream} changed")
    reasons += [f"{name} changed" for name in current.changed_sources(predicate["sources"])]
    reasons += _changed_dependencies(predicate["resolvedDependencies"], recipe)
    return reasons + _changed_contract(statement, recipe)


def _changed_dependencies(recorded: list[dict[str, Any]], recipe: recipes.Recipe) -> list[str]:
    """Weights and prompts that are others now, with those that the evidence does not name."""
    named = {(entry["uri"], entry["digest"].get("sha256")) for entry in recorded}
    now = set(current.dependencies(recipe).items())
    known = {uri for uri, _ in named}
    return [
        f"{uri} changed" if uri in known else f"{uri} is not recorded"
        for uri in sorted({uri for uri, _ in named ^ now})
    ]


def _changed_contract(statement: Statement, recipe: recipes.Recipe) -> list[str]:
    if not recipe.contract_path.is_file():
        _check_sources(statement, None)
        return ["contract is gone"]
    contract = Contract.load(recipe.contract_path)
    if contract.identity != statement.predicate["parameters"]["contract"]["identity"]:
        _check_sources(statement, None)
        return ["contract changed"]
    _check_sources(statement, contract)
    if statement.predicate["parameters"]["recipe"] != recipe.digest:
        return []  # said already
    return [f"contract does not fit the recipe ({f})" for f, _, _ in misfits(contract.data, recipe)]


def verify(target: str | Path) -> Result:
    """Check an evidence file, or the one of a case. Needs no torch.

    Refuses (exit 2) what is truncated, forged, of another schema or case, at odds with its own
    counts, or silent about a part of what its recipe and contract ask for; the result's `exit_code`
    is 0 for EQUAL, 1 for DIFFERENT, 3 for NOT_OBSERVED or STALE.
    """
    path, recipe = _locate(target)
    statement = Statement.load(path)
    if recipe is None:
        recipe = recipes.load(statement.case)
    if recipe.case != statement.case:
        raise Refused(
            "SB0810",
            seen=f"{path}: evidence of {statement.case}",
            required=f"evidence of {recipe.case} ({recipe.path})",
            hint=f"samebits prove {recipe.case} --record",
        )
    predicate = statement.predicate
    from samebits.evidence import reproduction  # which checks evidence by this module

    recorded = path.resolve() == recipe.evidence_path.resolve()
    return Result(
        path=path,
        statement=statement,
        judgement=judge(predicate),
        legs=judge_legs(predicate),
        stale=tuple(stale_reasons(statement, recipe)),
        reproductions=reproduction.count(recipe) if recorded else 0,
        scope=recipe.scope,
    )
