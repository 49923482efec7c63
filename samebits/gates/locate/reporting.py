"""One report for each comparison, or pair of arms, that differs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samebits import files
from samebits.errors import Refused, SamebitsError
from samebits.evidence import DifferenceReport, Side
from samebits.gates import capsule, rl
from samebits.gates.locate import refit
from samebits.gates.locate.arms import Arm, Arms, Subject
from samebits.gates.locate.pairs import PAIRS, REFITS, Located, behind, names, pair, search, who
from samebits.gates.run import Run, say
from samebits.gates.streams import FirstDifference

AGREE = (
    "computed again, both sides agree: the difference needs the batch that it was seen in, which "
    "depends on when requests arrive"
)

ON_REQUEST = "not traced: on a GPU that takes a run of its own, by the command below"


def command(run: Run, sequence: int, comparison: str) -> str:
    """The command that computes `sequence` by the arms behind `comparison`, and nothing else."""
    return f"samebits prove {run.recipe.case}{run.flag} --locate {sequence} --pair {comparison}"


# --- one sequence, on request ---------------------------------------------------------------------


def one_sequence(run: Run, sequence: int, comparison: str | None = None) -> list[DifferenceReport]:
    """`samebits prove CASE --locate SEQUENCE`: one report for each pair of arms that differs.

    comparison   look for what stands behind this comparison of the evidence instead of all pairs
                 that the sequence alone has
    """
    subject, found = _arms(run, sequence, comparison)
    if comparison is None:
        outcomes = {f"{left}/{right}": pair(found, left, right) for left, right in PAIRS}
    else:
        outcomes = {comparison: search(found, _behind(run, comparison))}
    reports = []
    for name, located in outcomes.items():
        if not located.differs and located.note is None:
            continue
        region = located.region
        first = located.first
        if first is None:  # a difference inside that no log-probability shows, or none to see
            position = min((region.element[0] if region else 0) + 1, len(subject.tokens) - 1)
            first = FirstDifference(sequence, position, subject.tokens[position], "-", "-")
        report = {
            "leg": "locate",
            "comparison": name,
            "sequence": sequence,
            "position": first.position,
            "token": first.token,
            "left": Side(who(located.left), first.left),
            "right": Side(who(located.right), first.right),
            "command": command(run, sequence, name),
            "step": _step(sequence, name),
        }
        reports.append(_with_region(report, located))
    return reports


def _behind(run: Run, comparison: str):
    left, _, right = comparison.partition("/")
    pairs = behind(comparison) or [p for p in PAIRS if p == (left, right)]
    if not pairs:
        raise Refused(
            "SB0926",
            seen=f"--pair {comparison}",
            required=f"a comparison of the evidence: {names()}",
            hint=f"samebits prove {run.recipe.case}{run.flag}",
        )
    return pairs


def _step(sequence: int, comparison: str) -> int | None:
    return sequence // rl.STRIDE if comparison == REFITS else None


def _arms(
    run: Run, sequence: int, comparison: str | None
) -> tuple[Subject, Arms | Mapping[str, Arm]]:
    if comparison is not None:
        _behind(run, comparison)  # refuses an unknown one before anything is started
    if comparison == REFITS:
        return refit.arms(run, sequence)
    subject = _subject(run, sequence)
    return subject, Arms(subject)


def _subject(run: Run, sequence: int) -> Subject:
    stress, requests = run.folder / "rollout_stress.json", run.folder / "capsule.json"
    count = 0
    if stress.exists() and requests.exists():
        whole = json.loads(stress.read_text())["sequences"]
        count = len(whole)
        if 0 <= sequence < count:
            return Subject(run, sequence, whole[sequence], capsule.read(requests), whole)
    raise Refused(
        "SB0911",
        seen=f"sequence {sequence}, and {count} sequences of this state of the sources",
        required=f"one of 0 to {count - 1}" if count else "a run that decoded its sequences",
        hint=f"samebits prove {run.recipe.case}{run.flag}",
    )


# --- all comparisons of a run ---------------------------------------------------------------------


def reports(run: Run, comparisons: Sequence[Mapping]) -> list[DifferenceReport]:
    """One report for each comparison with a mismatch; an arm is computed once for all of them."""
    known: dict[tuple[int, bool], Arms | Mapping[str, Arm]] = {}
    found = []
    for record in comparisons:
        first = record["first_difference"]
        if first is None:
            continue
        name, sequence = record["name"], first["sequence"]
        left, _, right = name.partition("/")
        report = {
            "leg": record["leg"],
            "comparison": name,
            **{key: first[key] for key in ("sequence", "position", "token")},
            "left": Side(left, first["left"]),
            "right": Side(right, first["right"]),
            "command": command(run, sequence, name),
            "step": _step(sequence, name),
        }
        if run.recipe.platform != "cpu":
            found.append(DifferenceReport(**report, note=ON_REQUEST))
            continue
        try:
            say(f"{name} differs in sequence {sequence}: computing it again, traced")
            key = sequence, name == REFITS
            if key not in known:
                _, known[key] = _arms(run, sequence, name)
            located = search(known[key], _behind(run, name), first["position"])
            found.append(_with_region(report, located))
        except SamebitsError as error:  # it must not hide the difference
            note = f"not traced: {error.error_id}, {error.seen}"
            found.append(DifferenceReport(**report, note=note))
        except ValueError as error:
            found.append(DifferenceReport(**report, note=f"not traced: {error}"))
    return found


def _with_region(report: dict[str, Any], located: Located) -> DifferenceReport:
    region = located.region
    if region is None:
        if located.note or located.first is None:
            return DifferenceReport(**report, note=located.note or AGREE)
        # Every traced output up to the logits has one bit pattern; the last step does not.
        return DifferenceReport(**report, region="logprob")
    return DifferenceReport(
        **report,
        layer=region.layer,
        region=region.region,
        element=region.element,
        element_left=Side(who(located.left), region.left),
        element_right=Side(who(located.right), region.right),
        differing=region.differing,
        elements=region.elements,
        operands=region.operands,
    )


def write(found: Sequence[DifferenceReport], path: Path) -> None:
    """Write the reports as JSON beside the evidence; without any, an older file is removed."""
    if not found:
        path.unlink(missing_ok=True)
        return
    text = json.dumps([asdict(report) for report in found], indent=1) + "\n"
    files.write_atomic(path, text.encode())
