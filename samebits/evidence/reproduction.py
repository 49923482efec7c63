"""A reproduction: somebody ran a recorded case again, and says what came out.

The statement holds the whole evidence of the second run, so that its verdict is recomputed from
counts like any other, and a summary of the recorded run that it repeats.

REPRODUCED    the same inputs, the same verdict, and the same number of mismatches in every
              comparison; on the platform of the recorded run the same streams, too
DIFFERENT     the second run shows a difference that the first does not, or gave other bits on the
              same platform
NOT_OBSERVED  the second run had other inputs, or showed too little
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits import files
from samebits import recipe as recipes
from samebits.contract import canonical
from samebits.errors import (
    EXIT_DIFFERENT,
    EXIT_EQUAL,
    EXIT_NOT_OBSERVED,
    NotObserved,
    Refused,
    SamebitsError,
)
from samebits.evidence.statement import STATEMENT_TYPE, UNSIGNED, Statement, integrity, unsealed
from samebits.evidence.verdict import DIFFERENT, NOT_OBSERVED, streams_digest
from samebits.evidence.verify import stale_reasons, verify

PREDICATE_TYPE = "urn:samebits:reproduction:v1"
REPRODUCED = "REPRODUCED"
FOLDER = "reproductions"
VERIFIER = {"id": "samebits.reproduction", "version": "1"}
LIMITS = (
    "Who ran it, and on whose machine, is as the operator says.",
    "Bits are compared across the two runs only where both platforms are the same.",
    UNSIGNED,
)


def schema() -> dict[str, Any]:
    """The JSON schema of a reproduction; the evidence inside has its own."""
    return canonical.load_schema("samebits.evidence", "reproduction.schema.json")


def summary(statement: Statement) -> dict[str, Any]:
    """What is compared of a run: inputs, platform, verdict, streams, counts.

    Inputs are subject, parameters and what was read; a contract counts by its identity, because
    admitting a platform changes its file and nothing that is computed.
    """
    predicate = statement.predicate
    parameters = dict(predicate["parameters"])
    parameters["contract"] = parameters["contract"]["identity"]
    counts = [
        {name: row[name] for name in ("leg", "name", "tokens", "mismatches")}
        for row in predicate["comparisons"]
    ]
    counts += [
        {"leg": "O", "name": row["name"], "tokens": row["tokens"], "mismatches": None}
        for row in predicate["oracle"]
    ]
    counts += [
        {
            "leg": "rl",
            "name": f"step-{step['step']}",
            "tokens": step["tokens"],
            "mismatches": step["mismatches"],
        }
        for step in (predicate["rl"] or {"aligned": []})["aligned"]
    ]
    return {
        "statement": statement.digest,
        "inputs": canonical.digest(
            {
                "subject": statement.data["subject"],
                "parameters": parameters,
                "resolvedDependencies": predicate["resolvedDependencies"],
            }
        ),
        "platform": canonical.digest(predicate["environment"]["intent"]),
        "verdict": predicate["verdict"],
        "streams": streams_digest(predicate),
        "counts": counts,
    }


def judge(recorded: Mapping[str, Any], rerun: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Verdict and reasons from two summaries."""
    different: list[str] = []
    missing: list[str] = []
    if rerun["verdict"] != recorded["verdict"]:
        reason = f"the second run is {rerun['verdict']}, the recorded one {recorded['verdict']}"
        (missing if rerun["verdict"] == NOT_OBSERVED else different).append(reason)
    if recorded["verdict"] == NOT_OBSERVED:
        missing.append("the recorded run shows too little to be reproduced")
    if rerun["inputs"] != recorded["inputs"]:
        missing.append("the second run had other inputs")
    rows = [
        {(row["leg"], row["name"]): row for row in side["counts"]} for side in (recorded, rerun)
    ]
    for key in sorted({*rows[0], *rows[1]}):
        label = f"leg {key[0]}, {key[1]}"
        first, second = (side.get(key) for side in rows)
        if first is None or second is None:
            missing.append(f"{label}: in one of the two runs only")
        elif first["mismatches"] != second["mismatches"]:
            different.append(
                f"{label}: {second['mismatches']} mismatches, {first['mismatches']} recorded"
            )
    comparable = rows[0].keys() == rows[1].keys() and rerun["platform"] == recorded["platform"]
    if comparable and rerun["streams"] != recorded["streams"]:
        different.append("other streams on the platform of the recorded run")
    if different and "the second run had other inputs" not in missing:
        return DIFFERENT, [*different, *missing]
    return (NOT_OBSERVED if missing else REPRODUCED), [*missing, *different]


@dataclass(frozen=True)
class Reproduction:
    """A validated reproduction, and the statement of the second run inside it."""

    raw: bytes
    data: Mapping[str, Any]
    rerun: Statement

    @classmethod
    def load(cls, path: Path) -> Reproduction:
        """Read and `parse` a file; SB0303 where it cannot be read."""
        return cls.parse(canonical.read(path, "reproduction", "samebits case list"), str(path))

    @classmethod
    def parse(cls, raw: bytes, what: str) -> Reproduction:
        """Refuse anything but what `build` could have written."""
        data = unsealed(raw, what, schema())
        predicate = data["predicate"]
        inner = f"{what}, evidence of the second run"
        rerun = Statement.parse(canonical.encode(predicate["evidence"], inner), inner)
        _check(data, rerun, what)
        return cls(raw, data, rerun)

    @property
    def digest(self) -> str:
        """sha256 of the file."""
        return canonical.sha256(self.raw)

    @property
    def predicate(self) -> Mapping[str, Any]:
        """The statement's predicate."""
        return self.data["predicate"]

    @property
    def case(self) -> str:
        """Name of the model case."""
        return self.predicate["case"]

    @property
    def verdict(self) -> str:
        """REPRODUCED, DIFFERENT or NOT_OBSERVED."""
        return self.predicate["verdict"]


def _check(data: Mapping[str, Any], rerun: Statement, what: str) -> None:
    """SB0803 for a verdict, SB0804 for anything else that the parts do not bear out."""
    predicate = data["predicate"]
    wrong = []
    if rerun.case != predicate["case"]:
        wrong.append(f"evidence of {rerun.case} in a reproduction of {predicate['case']}")
    if predicate["rerun"] != summary(rerun):
        wrong.append("summary of the second run is not that of its evidence")
    if predicate["recorded"]["statement"] == predicate["rerun"]["statement"]:
        wrong.append("the second run is the recorded one")
    subject = {
        "name": f"evidence/{predicate['case']}",
        "digest": {"sha256": predicate["recorded"]["statement"]},
    }
    if data["subject"] != [subject]:
        wrong.append("subject is not the recorded evidence")
    if wrong:
        raise Refused(
            "SB0804",
            seen=f"{what}: {wrong[0]}",
            required="a summary, a subject and an evidence that agree",
            hint="samebits explain SB0804",
        )
    verdict, reasons = judge(predicate["recorded"], predicate["rerun"])
    if (predicate["verdict"], predicate["reasons"]) != (verdict, reasons):
        raise Refused(
            "SB0803",
            seen=f"{what}: verdict {predicate['verdict']}",
            required=f"{verdict}, which follows from both runs",
            hint="samebits explain SB0803",
        )


def build(recorded: Statement, rerun: Statement, operator: str) -> Reproduction:
    """Reproduction of a recorded statement by a second run; the verdict is computed."""
    first, second = summary(recorded), summary(rerun)
    verdict, reasons = judge(first, second)
    predicate: dict[str, Any] = {
        "case": recorded.case,
        "operator": operator,
        "verdict": verdict,
        "reasons": reasons,
        "recorded": first,
        "rerun": second,
        "evidence": dict(rerun.data),
        "verifier": dict(VERIFIER),
        "limits": list(LIMITS),
    }
    data: dict[str, Any] = {
        "_type": STATEMENT_TYPE,
        "predicateType": PREDICATE_TYPE,
        "subject": [{"name": f"evidence/{recorded.case}", "digest": {"sha256": recorded.digest}}],
        "predicate": predicate,
    }
    predicate["integrity"] = integrity(data)
    return Reproduction.parse(canonical.encode(data, "reproduction"), "reproduction")


def default_path(recipe: recipes.Recipe, made: Reproduction) -> Path:
    """Where a reproduction belongs: its day, and its digest."""
    day = made.rerun.predicate["environment"]["happenstance"]["finished"][:10]
    return recipe.folder / FOLDER / f"{day}-{made.digest[:12]}.json"


def refuse_existing(path: Path) -> None:
    """SB0811 for a file that is there: a reproduction never replaces another."""
    if path.exists():
        raise Refused(
            "SB0811",
            seen=f"{path} is there",
            required="a name that no file has",
            hint="samebits reproduce --help",
        )


def write(made: Reproduction, path: Path) -> None:
    """Write a reproduction in one piece, where no file is yet."""
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, made.raw)


# --- checking -------------------------------------------------------------------------------------


def is_one(path: Path) -> bool:
    """Whether a JSON file says that it is a reproduction; everything else is left to `load`."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("predicateType") == PREDICATE_TYPE


@dataclass(frozen=True)
class Checked:
    """Outcome of `check`: the reproduction, and what has changed since."""

    path: Path
    reproduction: Reproduction
    stale: tuple[str, ...]

    @property
    def status(self) -> str:
        """REPRODUCED, DIFFERENT, NOT_OBSERVED, or STALE."""
        return "STALE" if self.stale else self.reproduction.verdict

    @property
    def exit_code(self) -> int:
        """0 REPRODUCED, 1 DIFFERENT, 3 NOT_OBSERVED or STALE."""
        codes = {REPRODUCED: EXIT_EQUAL, DIFFERENT: EXIT_DIFFERENT}
        return codes.get(self.status, EXIT_NOT_OBSERVED)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        predicate = self.reproduction.predicate
        return {
            "case": predicate["case"],
            "file": str(self.path),
            "statement": self.reproduction.digest,
            "status": self.status,
            "verdict": predicate["verdict"],
            "reasons": list(predicate["reasons"]),
            "stale": list(self.stale),
            "operator": predicate["operator"],
            "recorded": dict(predicate["recorded"]),
            "rerun": dict(predicate["rerun"]),
        }


def check(path: Path) -> Checked:
    """Check a reproduction as `verify` checks evidence. Needs no torch.

    Refuses (exit 2) what is truncated, forged, of another schema, or speaks of another case than
    its folder. STALE: the recorded evidence is another now, or what the second run stands on.
    """
    made = Reproduction.load(path)
    near = path.resolve().parents[1] / "recipe.yaml"
    of_case = path.resolve().parent.name == FOLDER and near.is_file()
    recipe = recipes.load(near if of_case else made.case)
    if recipe.case != made.case:
        raise Refused(
            "SB0810",
            seen=f"{path}: a reproduction of {made.case}",
            required=f"one of {recipe.case} ({recipe.path})",
            hint=f"samebits reproduce {recipe.case}",
        )
    return Checked(path, made, tuple(_stale(made, recipe)))


def _stale(made: Reproduction, recipe: recipes.Recipe) -> list[str]:
    if not recipe.evidence_path.is_file():
        return ["the recorded evidence is gone"]
    recorded = Statement.load(recipe.evidence_path)
    if recorded.digest != made.predicate["recorded"]["statement"]:
        return ["the recorded evidence is another now"]
    if summary(recorded) != made.predicate["recorded"]:
        raise Refused(
            "SB0804",
            seen="summary of the recorded run is not that of its evidence",
            required="the counts, streams and inputs of the recorded evidence",
            hint="samebits explain SB0804",
        )
    return stale_reasons(made.rerun, recipe)


def of_case(recipe: recipes.Recipe) -> list[Checked | tuple[Path, SamebitsError]]:
    """All reproductions in the folder of a case, each checked or with what refuses it."""
    found: list[Checked | tuple[Path, SamebitsError]] = []
    for path in sorted((recipe.folder / FOLDER).glob("*.json")):
        try:
            found.append(check(path))
        except SamebitsError as error:
            found.append((path, error))
    return found


def count(recipe: recipes.Recipe) -> int:
    """Operators whose reproduction of the present evidence is REPRODUCED and not stale."""
    return len(
        {
            item.reproduction.predicate["operator"]
            for item in of_case(recipe)
            if isinstance(item, Checked) and item.status == REPRODUCED
        }
    )


def recorded_run(recipe: recipes.Recipe) -> Statement:
    """The evidence that can be reproduced now; SB0805 without any, SB0812 when it is stale."""
    result = verify(recipe.folder)
    if result.stale:
        raise NotObserved(
            "SB0812",
            seen=f"evidence of {recipe.case}: {result.stale[0]}",
            required="evidence of the present sources, recipe and contract",
            hint=f"samebits prove {recipe.case} --record",
        )
    return result.statement
