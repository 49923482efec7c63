"""One report for each comparison, or pair of arms, that differs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samebits import files
from samebits.errors import Refused, SamebitsError
from samebits.evidence import DifferenceReport, Side, Statement
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

ELSEWHERE = "red in the run, with its first difference in another sequence; this one agrees"
# Notes of a difference that the run saw and that computing again does not show.
GONE = (AGREE, ELSEWHERE, refit.STALE)

ON_REQUEST = "not traced: on a GPU that takes a run of its own, by the command below"


# Runs of agreeing positions that a report names.
_RUNS = 8
RECORD = " --record"


def command(run: Run, sequence: int, comparison: str) -> str:
    """The command that computes `sequence` by the arms behind `comparison`, and nothing else."""
    return f"samebits prove {run.recipe.case}{run.flag} --locate {sequence} --pair {comparison}"


# --- one sequence, on request ---------------------------------------------------------------------


def one_sequence(run: Run, sequence: int, comparison: str | None = None) -> list[DifferenceReport]:
    """`samebits prove CASE --locate SEQUENCE`: one report for each pair of arms that differs.

    comparison   look for what stands behind this comparison of the evidence instead of all pairs
                 that the sequence alone has

    Where all agree and the run was red, a report with one of the notes GONE says so.
    """
    subject, found = _arms(run, sequence, comparison)
    if comparison is None:
        outcomes = {f"{left}/{right}": pair(found, left, right) for left, right in PAIRS}
    else:
        outcomes = {comparison: _searched(run, found, comparison)}
    if not any(located.differs or located.note for located in outcomes.values()):
        return _gone(run, sequence, comparison)
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


def _searched(
    run: Run, found: Arms | Mapping[str, Arm], comparison: str, position: int | None = None
) -> Located:
    located = search(found, _behind(run, comparison), position)
    if comparison == REFITS and not located.differs and located.note is None:
        assert isinstance(found, Mapping)
        if first := refit.stale(found):
            return Located(refit.AS_RUN, "padded-batch", first, None, refit.STALE)
    return located


def _gone(run: Run, sequence: int, comparison: str | None) -> list[DifferenceReport]:
    """What the statement of the run says about a sequence that agrees when it is computed again:
    its comparisons that differ, of which `comparison` asks for one."""
    recorded, name = run.recipe.evidence_path, comparison
    path = recorded if run.flag == RECORD else run.folder / recorded.name
    if not path.is_file():
        return []
    reports = []
    for record in Statement.load(path).predicate["comparisons"]:
        first = record["first_difference"]
        if first is None or record["name"] != (name or record["name"]):
            continue
        here = first["sequence"] == sequence
        if here or comparison is not None:
            reports.append(
                DifferenceReport(**_outside(run, record), note=AGREE if here else ELSEWHERE)
            )
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
        required=f"one of 0 to {count - 1}"
        if count
        else f"a run of this state that decoded its sequences (samebits prove {run.recipe.case}"
        f"{run.flag}); after a change of sources the hint below is the short look, without a run",
        hint=f"samebits prove {run.recipe.case}{run.flag}"
        if count
        else f"samebits trace {run.recipe.case}",
    )


# --- all comparisons of a run ---------------------------------------------------------------------

# Legs whose differences a red leg before them explains until it is green: one rank differs already,
# or the engines do before any refit, or rows whose log-probabilities differ.
_EXPLAINED = {"D": ("C",), "E": ("C",), "F": ("B", "C")}
# Legs of the same two arms, the rollout's: one that was followed to a region comes first.
_LOCATED = {"B": ("A",)}


def reports(run: Run, comparisons: Sequence[Mapping]) -> Iterator[DifferenceReport]:
    """One report for each comparison with a mismatch, as it is done; an arm is computed once for
    all of them. Traced is the first of each leg, and of leg B only where leg A, which compares the
    rollout with itself too, led to no region; the others name the one that comes before them."""
    known: dict[tuple[int, bool], Arms | Mapping[str, Arm]] = {}
    red = [record for record in comparisons if record["first_difference"] is not None]
    traced: list[tuple[Mapping, DifferenceReport]] = []
    for record in red:
        report = _outside(run, record)
        if note := _covered(record, traced):
            yield DifferenceReport(**report, note=note)
            continue
        if run.recipe.platform != "cpu":
            yield DifferenceReport(**report, note=ON_REQUEST)
            continue
        found = _traced(run, record, report, known)
        traced.append((record, found))
        yield found


def _covered(record: Mapping, traced: Sequence[tuple[Mapping, DifferenceReport]]) -> str | None:
    """Why a comparison is not traced: one that was comes before it, or differs there as well."""
    for other, _ in traced:
        if _same(record, other):
            return f"same first difference as leg {other['leg']}, {other['name']}"
    legs = (record["leg"], *_EXPLAINED.get(record["leg"], ()))
    for other, report in traced:
        name = f"leg {other['leg']}, {other['name']}"
        if other["leg"] in legs:
            return f"not traced: {name}, comes before it; the command below traces this one"
        if report.region is not None and other["leg"] in _LOCATED.get(record["leg"], ()):
            return (
                f"not traced: {name}, compares the rollout with itself too and led to "
                f"{report.region}; mend that, or trace this one by the command below"
            )
    return None


def _same(one: Mapping, other: Mapping) -> bool:
    """Whether two first differences are one. Leg F shows digests of rows, so there the place
    decides."""
    keys = ["sequence", "position", "token"]
    if "F" not in (one["leg"], other["leg"]):
        keys += ["left", "right"]
    a, b = one["first_difference"], other["first_difference"]
    return all(a[key] == b[key] for key in keys)


def _outside(run: Run, record: Mapping) -> dict[str, Any]:
    """The fields of a report that the statement has."""
    first, name = record["first_difference"], record["name"]
    left, _, right = name.partition("/")
    return {
        "leg": record["leg"],
        "comparison": name,
        **{key: first[key] for key in ("sequence", "position", "token")},
        "left": Side(left, first["left"]),
        "right": Side(right, first["right"]),
        "command": command(run, first["sequence"], name),
        "step": _step(first["sequence"], name),
    }


def _traced(
    run: Run,
    record: Mapping,
    report: dict[str, Any],
    known: dict[tuple[int, bool], Arms | Mapping[str, Arm]],
) -> DifferenceReport:
    name, sequence = record["name"], report["sequence"]
    try:
        say(f"{name} differs in sequence {sequence}: computing it again, traced")
        key = sequence, name == REFITS
        if key not in known:
            _, known[key] = _arms(run, sequence, name)
        return _with_region(report, _searched(run, known[key], name, report["position"]))
    except SamebitsError as error:  # it must not hide the difference
        note = f"not traced: {error.error_id}, {error.seen}"
    except ValueError as error:
        note = f"not traced: {error}"
    return DifferenceReport(**report, note=note)


def _with_region(report: dict[str, Any], located: Located) -> DifferenceReport:
    region = located.region
    if located.first is not None and located.note != refit.STALE:
        report = {**report, "agree": _agree(*located.agree)}
    if region is None:
        if located.note or located.first is None:
            return DifferenceReport(**report, note=located.note or AGREE)
        # Every traced output up to the logits has one bit pattern; the last step does not.
        first = located.first
        return DifferenceReport(
            **report,
            region="logprob",
            element=(first.position - 1, first.token),
            element_left=Side(who(located.left), first.left),
            element_right=Side(who(located.right), first.right),
            operands=dict(located.last),
        )
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


def _agree(positions: Sequence[int], tokens: int) -> str:
    """`1 of 82 tokens: position 1`, with runs of positions put together."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:_RUNS]]
    shown += ["..."] if len(runs) > _RUNS else []
    what = f": position {', '.join(shown)}" if shown else ""
    return f"{len(positions)} of {tokens} tokens of the sequence{what}"


def write(found: Sequence[DifferenceReport], path: Path) -> None:
    """Write the reports as JSON beside the evidence; without any, an older file is removed."""
    if not found:
        path.unlink(missing_ok=True)
        return
    text = json.dumps([asdict(report) for report in found], indent=1) + "\n"
    files.write_atomic(path, text.encode())
