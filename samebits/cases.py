"""The model cases of this checkout and what their evidence says now."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from samebits import recipe as recipes
from samebits.errors import NotObserved, SamebitsError


@dataclass(frozen=True)
class Status:
    """One row of the case table.

    verdict      EQUAL, DIFFERENT, NOT_OBSERVED, STALE, `not proved`, or the id of a refusal
    tokens       leg -> tokens compared; legs are never summed
    mismatches   leg -> mismatching tokens; leg O is not there, it compares distances, not bits
    not_shown    what the evidence itself says it does not cover
    reproductions   operators whose second run of this evidence holds
    platform     what the case computes on: `cpu` or `sm90`
    scope        what the verdict is less than (`Recipe.scope`)
    """

    case: str
    verdict: str
    tokens: dict[str, int]
    mismatches: dict[str, int]
    stale: list[str]
    not_shown: list[str]
    date: str | None
    reproductions: int = 0
    platform: str = "cpu"
    scope: str = ""

    def judged(self) -> str:
        """The verdict and the scope that it holds in."""
        return recipes.qualified(self.verdict, self.scope)

    def legs(self) -> list[str]:
        """One text per leg: `A 0 of 1,320`."""
        return [
            f"{leg} {self.mismatches[leg]:,} of {count:,}"
            if leg in self.mismatches
            else f"{leg} (distances of {count:,})"
            for leg, count in self.tokens.items()
        ]

    def as_dict(self) -> dict:
        """For `--json`."""
        return {**asdict(self), "legs": sorted(self.tokens)}


def status(case: str) -> Status:
    """What the recorded evidence of a case says, recomputed."""
    from samebits.evidence import verify

    platform = "-"  # of a recipe that cannot be read
    try:
        platform = recipes.load(case).platform
        result = verify(case)
    except NotObserved:
        return Status(case, "not proved", {}, {}, [], [], None, platform=platform)
    except SamebitsError as error:
        return Status(case, error.error_id, {}, {}, [], [], None, platform=platform)
    report, predicate = result.as_dict(), result.statement.predicate
    return Status(
        case=case,
        verdict=result.status,
        tokens={leg: row["tokens"] for leg, row in report["legs"].items()},
        mismatches={leg: row["mismatches"] for leg, row in report["legs"].items() if leg != "O"},
        stale=list(result.stale),
        not_shown=list(predicate["claim"]["not_covered"]),
        date=predicate["environment"]["happenstance"]["finished"][:10],
        reproductions=result.reproductions,
        platform=platform,
        scope=result.scope,
    )


def all_statuses() -> list[Status]:
    """Status of every case of `cases/`."""
    return [status(case) for case in recipes.known_cases()]
