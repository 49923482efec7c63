"""The verdict of a statement, from its counts alone, and the contradictions that refuse it.

DIFFERENT     a compared token differs, the oracle is further away than allowed, or a repeat of
              the run gave other streams
NOT_OBSERVED  no difference, but the claim was not exercised: too few tokens, a required hazard
              that never fired, a control that is missing or did not diverge, a planted fault in
              the measured arm, a leg that did not run
EQUAL         otherwise
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from samebits.contract import canonical
from samebits.errors import Refused

EQUAL, DIFFERENT, NOT_OBSERVED = "EQUAL", "DIFFERENT", "NOT_OBSERVED"


@dataclass(frozen=True)
class Judgement:
    """A verdict and one sentence for each thing that kept it from being EQUAL."""

    verdict: str
    reasons: tuple[str, ...]


def streams_digest(predicate: Mapping[str, Any]) -> str:
    """Digest of all compared streams: what a repeat of the run must reproduce."""
    return canonical.digest([[c["leg"], c["name"], c["streams"]] for c in predicate["comparisons"]])


def _value(record: Mapping[str, str]) -> float:
    return canonical.from_bits(dict(record))


def _judge_control(record: Mapping[str, Any], label: str, allowed: str) -> Iterator[str]:
    control = record["control"]
    if control is None:
        return
    if control["name"] not in ("stock", allowed):
        yield f"{label}: control {control['name']} is not the one that the recipe names ({allowed})"
    if control["mismatches"] == 0 or control["tokens"] == 0:
        yield f"{label}: control {control['name']} did not diverge"


def _judge_leg(leg: str, wanted: Mapping[str, Any], found: list[Mapping[str, Any]]) -> Judgement:
    different, missing = [], []
    for record in found:
        label = f"leg {leg}, {record['name']}"
        if record["mismatches"]:
            different.append(f"{label}: {record['mismatches']} of {record['tokens']} tokens differ")
        if record["fault"] is not None:
            missing.append(f"{label}: planted fault {record['fault']} was active")
        if record["tokens"] == 0:
            missing.append(f"{label}: no token was compared")
        missing += _judge_control(record, label, wanted["control"])
    if all(record["control"] is None for record in found):
        missing.append(f"leg {leg}: no negative control")
    missing += _judge_coverage(leg, wanted, found)
    return _verdict(different, missing)


def _judge_oracle(leg: str, wanted: Mapping[str, Any], found: list[Mapping[str, Any]]) -> Judgement:
    different, missing = [], []
    for record in found:
        label = f"leg {leg}, {record['name']}"
        limit = _value(record["factor"]) * _value(record["stock_mean"])
        aligned = _value(record["aligned_mean"])
        if not aligned <= limit:  # also when one of them is NaN
            different.append(f"{label}: mean distance {aligned:.3g} is above {limit:.3g}")
        if record["fault"] is not None:
            missing.append(f"{label}: planted fault {record['fault']} was active")
        control = record["control"]
        if control is None:
            missing.append(f"{label}: no negative control")
        elif control["tokens"] == 0 or not _value(control["mean"]) > limit:
            missing.append(f"{label}: control {control['name']} did not diverge")
    missing += _judge_coverage(leg, wanted, found)
    return _verdict(different, missing)


def _judge_coverage(
    leg: str, wanted: Mapping[str, Any], found: list[Mapping[str, Any]]
) -> Iterator[str]:
    tokens = sum(record["tokens"] for record in found)
    if tokens < wanted["tokens"]:
        yield f"leg {leg}: {tokens} tokens of the {wanted['tokens']} that the recipe asks for"
    for hazard in wanted["hazards"]:
        if sum(record["hazards"].get(hazard, 0) for record in found) == 0:
            yield f"leg {leg}: hazard {hazard} never fired"


def _judge_rl(record: Mapping[str, Any], steps: int) -> Judgement:
    different, missing = [], []
    for step in record["aligned"]:
        if step["mismatches"]:
            different.append(
                f"RL step {step['step']}: {step['mismatches']} of {step['tokens']} tokens differ"
            )
        if step["tokens"] == 0:
            missing.append(f"RL step {step['step']}: no token was compared")
    if record["fault"] is not None:
        missing.append(f"RL: planted fault {record['fault']} was active")
    if len(record["aligned"]) < steps:
        missing.append(f"RL: {len(record['aligned'])} of {steps} steps")
    if sum(step["mismatches"] for step in record["stock"]) == 0:
        missing.append("RL: the stock run did not diverge")
    return _verdict(different, missing)


def _verdict(different: list[str], missing: list[str]) -> Judgement:
    if different:
        return Judgement(DIFFERENT, tuple(different + missing))
    return Judgement(NOT_OBSERVED if missing else EQUAL, tuple(missing))


def judge_legs(predicate: Mapping[str, Any]) -> dict[str, Judgement]:
    """Judgement of every leg that the recipe asks for, or that ran, and of `rl` where it ran."""
    parameters = predicate["parameters"]
    judged: dict[str, Judgement] = {}
    ran = {c["leg"] for c in predicate["comparisons"]} | {o["leg"] for o in predicate["oracle"]}
    for leg in sorted({*parameters["legs"], *ran}):
        wanted = parameters["legs"].get(leg, {"tokens": 1, "hazards": [], "control": "stock"})
        rows = predicate["oracle"] if leg == "O" else predicate["comparisons"]
        found = [record for record in rows if record["leg"] == leg]
        if not found:
            judged[leg] = Judgement(NOT_OBSERVED, (f"leg {leg} did not run",))
        else:
            judged[leg] = (_judge_oracle if leg == "O" else _judge_leg)(leg, wanted, found)
    if predicate["rl"] is not None or parameters["rl_steps"]:
        record = predicate["rl"] or {"aligned": [], "stock": [], "fault": None}
        judged["rl"] = _judge_rl(record, parameters["rl_steps"])
    return judged


def judge(predicate: Mapping[str, Any]) -> Judgement:
    """Verdict of a whole predicate."""
    different: list[str] = []
    missing: list[str] = []
    for judgement in judge_legs(predicate).values():
        (different if judgement.verdict == DIFFERENT else missing).extend(judgement.reasons)
    streams = streams_digest(predicate)
    different += [
        f"repeat {repeat['run']} gave other streams"
        for repeat in predicate["repeats"]
        if repeat["streams"] != streams
    ]
    return _verdict(different, missing)


def _numbers(value: Any, where: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    if isinstance(value, dict):
        if set(value) == {"decimal", "bits", "dtype"}:
            yield where, value
            return
        for name, item in value.items():
            yield from _numbers(item, f"{where}/{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{where}/{index}")


def _same_number(record: Mapping[str, str]) -> bool:
    try:
        decimal = float(record["decimal"])
    except ValueError:
        return False
    value = _value(record)
    return (math.isnan(decimal) and math.isnan(value)) or (
        canonical.float_bits(decimal, "float64")["bits"] == record["bits"]
    )


def _contradictions(predicate: Mapping[str, Any]) -> Iterator[str]:
    for where, record in _numbers(predicate, ""):
        if not _same_number(record):
            yield f"{where}: decimal {record['decimal']} is not bits {record['bits']}"
    seen = set()
    for record in [*predicate["comparisons"], *predicate["oracle"]]:
        key = (record["leg"], record["name"])
        if key in seen:
            yield f"leg {key[0]}, {key[1]} is listed twice"
        seen.add(key)
    for record in predicate["comparisons"]:
        yield from _contradictions_of(record, f"leg {record['leg']}, {record['name']}")
    for arm in ("aligned", "stock"):
        steps = (predicate["rl"] or {}).get(arm, [])
        if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
            yield f"RL {arm}: steps are not 1, 2, 3 and so on"
        for step in steps:
            yield from _contradictions_of_step(step, f"RL {arm}, step {step['step']}")


def _contradictions_of(record: Mapping[str, Any], label: str) -> Iterator[str]:
    for part in (record, record["control"] or record):
        if part["mismatches"] > part["tokens"]:
            yield f"{label}: more mismatches than tokens"
        exact = part["max_abs"] is None or _value(part["max_abs"]) == 0.0
        if part["mismatches"] == 0 and not exact:
            yield f"{label}: no mismatch, and yet a difference"
    if (record["max_abs"] is None) != (record["compared"] == "row"):
        yield f"{label}: max_abs belongs to logprob comparisons, and to them only"
    same_streams = all(stream["left"] == stream["right"] for stream in record["streams"])
    first = record["first_difference"]
    if (record["mismatches"] == 0) != same_streams:
        yield f"{label}: {record['mismatches']} mismatches, but streams say otherwise"
    if (record["mismatches"] == 0) != (first is None):
        yield f"{label}: {record['mismatches']} mismatches, but first_difference says otherwise"
    control = record["control"]
    if control is not None and (control["kind"] == "stock") != (control["name"] == "stock"):
        yield f"{label}: control {control['name']} cannot be of kind {control['kind']}"


def _contradictions_of_step(step: Mapping[str, Any], label: str) -> Iterator[str]:
    if step["mismatches"] > step["tokens"]:
        yield f"{label}: more mismatches than tokens"
    exact = {"max_abs": 0.0, "mean_abs": 0.0, "k3_kl": 0.0, "is_ratio_max": 1.0}
    for name, value in (exact | {"is_ratio_median": 1.0}).items():
        if step["mismatches"] == 0 and _value(step[name]) != value:
            yield f"{label}: no mismatch, and yet {name} is {step[name]['decimal']}"


def check_consistent(predicate: Mapping[str, Any], what: str) -> None:
    """Refuse counts that contradict each other; no honest run writes such a file.

    A NaN on both sides is a mismatch although the streams agree, so a run that meets one writes
    digests that differ (`comparison` sees to it).
    """
    for problem in _contradictions(predicate):
        raise Refused(
            "SB0804",
            seen=f"{what}: {problem}",
            required="counts, digests and numbers that agree",
            hint="samebits explain SB0804",
        )
