"""`ledger.json` of a case: what people decided about its steps, with reasons.

It holds no state. Where a case stands follows from its recipe, contract and evidence
(`samebits.casework.steps`), so nothing written here can turn a step green: "done" is no decision.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samebits import files
from samebits.contract import canonical
from samebits.errors import Refused
from samebits.recipe import Recipe

NAME = "ledger.json"


def schema() -> dict[str, Any]:
    """The JSON schema of a ledger."""
    return canonical.load_schema("samebits.casework", "ledger.schema.json")


def step_names() -> list[str]:
    """All steps, in order."""
    return list(schema()["properties"]["decisions"]["properties"])


def optional_steps() -> list[str]:
    """The steps that may be put out of scope."""
    steps = schema()["properties"]["decisions"]["properties"]
    return [name for name, entry in steps.items() if entry == {"$ref": "#/$defs/any"}]


def empty(case: str) -> dict[str, Any]:
    """A ledger without a decision."""
    return {"schema_version": 1, "case": case, "decisions": {}, "notes": []}


def load(recipe: Recipe) -> dict[str, Any]:
    """The ledger beside a recipe, or an empty one; SB0917 for anything but what its schema says."""
    path = recipe.folder / NAME
    if not path.is_file():
        return empty(recipe.case)
    raw = canonical.read(path, "ledger", "samebits explain SB0917")
    data = canonical.decode(raw, str(path), canonical=False)
    _check(data, str(path))
    if data["case"] != recipe.case:
        raise Refused(
            "SB0917",
            seen=f"{path}: case {data['case']}",
            required=f"case {recipe.case}",
            hint="samebits explain SB0917",
        )
    return data


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Write a ledger that fits its schema, in one piece."""
    _check(data, str(path))
    files.write_atomic(path, (json.dumps(data, indent=2) + "\n").encode())


def _check(data: Mapping[str, Any], what: str) -> None:
    canonical.check_schema(data, schema(), "SB0917", what)
    for step, entry in data["decisions"].items():
        _check_text(entry["reason"], f"{what}, reason of {step}")
    for note in data["notes"]:
        _check_text(note["text"], f"{what}, a note", "note")


def _check_text(text: str, what: str, kind: str = "text") -> None:
    """Refuse a text that says nothing, is a page of its own, or would steer a terminal."""
    bounds = schema()["$defs"][kind]
    least, most = bounds["minLength"], bounds["maxLength"]
    seen = None
    if not text.isprintable():
        strange = next(letter for letter in text if not letter.isprintable())
        seen = f"the character {strange!a}, which does not print"
    elif not least <= len(text.strip()) or len(text) > most:
        seen = f"{len(text.strip())} letters" if text.strip() else "no text"
    if seen is not None:
        raise Refused(
            "SB0917",
            seen=f"{what}: {seen}",
            required=f"one line of {least} to {most} printable letters",
            hint="samebits explain SB0917",
        )


def decide(recipe: Recipe, step: str, decision: str, reason: str | None) -> dict[str, Any]:
    """Record a decision, or take one back (`clear`); returns the new ledger.

    The decision that was there before is kept as a note. Refuses SB0921 (no such step), SB0918 (a
    step that every case has to show) and SB0917 (no reason, or one that is no line of text).
    """
    if step not in step_names():
        raise Refused(
            "SB0921",
            seen=f"step {step}",
            required=f"one of {', '.join(step_names())}",
            hint=f"samebits case status {recipe.case}",
        )
    if decision == "out-of-scope" and step not in optional_steps():
        raise Refused(
            "SB0918",
            seen=f"{step} of {recipe.case} out of scope",
            required=f"one of {', '.join(optional_steps())}; every case has to show the others",
            hint=f"samebits case status {recipe.case}",
        )
    if decision != "clear":
        _check_text(reason or "", f"reason of {step} (--reason)")
    data = load(recipe)
    today = datetime.date.today().isoformat()
    before = data["decisions"].pop(step, None)
    if before is not None:
        text = f"{step} was {before['decision']} since {before['date']}: {before['reason']}"
        data["notes"].append({"date": today, "text": text})
    if decision != "clear":
        entry = {"decision": decision, "reason": reason or "", "date": today}
        data["decisions"][step] = entry
    write(recipe.folder / NAME, data)
    return data
