"""The verdict of a statement, from its counts alone, and the contradictions that refuse it.

DIFFERENT     a compared token differs, the oracle is further away than allowed, or a repeat of
              the run gave other streams
NOT_OBSERVED  no difference, but the claim was not exercised: too few tokens, a required hazard
              that never fired, a control that is missing, too short or did not diverge, a planted
              fault in the measured arm, a leg, layout or shard that did not run
EQUAL         otherwise
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from samebits import faults
from samebits.contract import canonical
from samebits.errors import Refused

EQUAL, DIFFERENT, NOT_OBSERVED = "EQUAL", "DIFFERENT", "NOT_OBSERVED"
CLAIM = "rollout-equals-trainer"
# A control that compares fewer tokens than this could diverge, or agree, by chance.
CONTROL_TOKENS = 32
# How many times further from the oracle than stock the aligned arm may be.
ORACLE_FACTOR = 1.0
FAULTS = frozenset([*faults.PLANTED, *faults.ELSEWHERE])


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
    yield from _judge_length(control, label)
    if control["mismatches"] == 0 or _is_zero(control["max_abs"]):
        yield f"{label}: control {control['name']} did not diverge"


def _judge_length(control: Mapping[str, Any], label: str) -> Iterator[str]:
    if control["tokens"] < CONTROL_TOKENS:
        yield (
            f"{label}: control {control['name']} compared {control['tokens']} tokens "
            f"of the {CONTROL_TOKENS} that a control needs"
        )


def _is_zero(distance: Mapping[str, str] | None) -> bool:
    return distance is not None and _value(distance) == 0.0


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
        limit = ORACLE_FACTOR * _value(record["stock_mean"])
        aligned = _value(record["aligned_mean"])
        if not aligned <= limit:  # also when one of them is NaN
            different.append(f"{label}: mean distance {aligned:.3g} is above {limit:.3g}")
        if record["fault"] is not None:
            missing.append(f"{label}: planted fault {record['fault']} was active")
        control = record["control"]
        if control is None:
            missing.append(f"{label}: no negative control")
            continue
        missing += _judge_length(control, label)
        if control["name"] not in FAULTS:
            missing.append(f"{label}: control {control['name']} is no planted fault")
        if not _value(control["mean"]) > limit:
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
    missing += _judge_stock_rl(record)
    return _verdict(different, missing)


def _judge_stock_rl(record: Mapping[str, Any]) -> Iterator[str]:
    stock = {"name": "stock", "tokens": sum(step["tokens"] for step in record["stock"])}
    yield from _judge_length(stock, "RL")
    if not any(step["mismatches"] and not _is_zero(step["max_abs"]) for step in record["stock"]):
        yield "RL: the stock run did not diverge"


def _judge_layouts(sizes: Mapping[str, Any], found: list[Mapping[str, Any]]) -> Iterator[str]:
    """Leg D compares every claimed size of the trainer with every one of the rollout."""
    ran = {(record["layouts"]["left"], record["layouts"]["right"]) for record in found}
    wanted = {(f"tp{a}", f"tp{b}") for a in sizes["trainer_tp"] for b in sizes["rollout_tp"]}
    for trainer, rollout in sorted(wanted - ran):
        yield f"leg D: trainer {trainer} was not compared with rollout {rollout}"
    for trainer, rollout in sorted(ran - wanted):
        yield f"leg D: trainer {trainer} with rollout {rollout} is no layout of the recipe"


def _judge_shards(names: list[str]) -> Iterator[str]:
    """`all`, or every one of `1ofN` to `NofN`."""
    total = re.fullmatch(r"\d+of(\d{1,4})", names[0])
    whole = [f"{i}of{total[1]}" for i in range(1, int(total[1]) + 1)] if total else ["all"]
    if sorted(names) != sorted(whole):
        yield f"shards {', '.join(names)} are not one whole run"


def _judge_settings(predicate: Mapping[str, Any]) -> Iterator[str]:
    """A fault that was set for the whole run is in none of the records."""
    settings = predicate["parameters"]["switches"] | predicate["environment"]["intent"]
    for name, value in settings.items():
        text = f"{name}={value}"
        if "SAMEBITS_FAULT" in text.upper() or any(fault in text for fault in FAULTS):
            yield f"setting {text} speaks of a planted fault"


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
        if leg == "D" and "layouts" in parameters:
            missing = [*judged[leg].reasons, *_judge_layouts(parameters["layouts"], found)]
            worse = NOT_OBSERVED if missing and judged[leg].verdict == EQUAL else None
            judged[leg] = Judgement(worse or judged[leg].verdict, tuple(missing))
    if predicate["rl"] is not None or parameters["rl_steps"]:
        record = predicate["rl"] or {"aligned": [], "stock": [], "fault": None}
        judged["rl"] = _judge_rl(record, parameters["rl_steps"])
    return judged


def judge_controls(predicate: Mapping[str, Any]) -> Judgement:
    """Whether alignment off differs in every leg that the recipe asks for, whatever aligned did."""
    parameters = predicate["parameters"]
    missing: list[str] = []
    for leg, wanted in parameters["legs"].items():
        rows = predicate["oracle"] if leg == "O" else predicate["comparisons"]
        found = [record for record in rows if record["leg"] == leg]
        if all(record["control"] is None for record in found):
            missing.append(f"leg {leg}: no negative control")
        for record in found if leg != "O" else ():
            missing += _judge_control(record, f"leg {leg}, {record['name']}", wanted["control"])
        if leg == "O":
            missing += [r for r in _judge_oracle(leg, wanted, found).reasons if "control" in r]
    if parameters["rl_steps"]:
        missing += _judge_stock_rl(predicate["rl"] or {"stock": []})
    return _verdict([], list(dict.fromkeys(missing)))


def judge(predicate: Mapping[str, Any]) -> Judgement:
    """Verdict of a whole predicate."""
    different: list[str] = []
    missing: list[str] = []
    for judgement in judge_legs(predicate).values():
        (different if judgement.verdict == DIFFERENT else missing).extend(judgement.reasons)
    missing += [*_judge_shards(predicate["shards"]), *_judge_settings(predicate)]
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


def _contradictions(data: Mapping[str, Any]) -> Iterator[str]:
    predicate = data["predicate"]
    yield from _contradictions_of_subject(data["subject"], predicate)
    yield from _contradictions_of_claim(predicate)
    for where, record in _numbers(predicate, ""):
        if not _same_number(record):
            yield f"{where}: decimal {record['decimal']} is not bits {record['bits']}"
    seen = set()
    for record in [*predicate["comparisons"], *predicate["oracle"]]:
        key = (record["leg"], record["name"])
        if key in seen:
            yield f"leg {key[0]}, {key[1]} is listed twice"
        seen.add(key)
    for record in predicate["oracle"]:
        if _value(record["factor"]) != ORACLE_FACTOR:
            yield f"leg O, {record['name']}: factor {record['factor']['decimal']} is not 1"
    for record in predicate["comparisons"]:
        yield from _contradictions_of(record, f"leg {record['leg']}, {record['name']}")
    for arm in ("aligned", "stock"):
        steps = (predicate["rl"] or {}).get(arm, [])
        if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
            yield f"RL {arm}: steps are not 1, 2, 3 and so on"
        for step in steps:
            yield from _contradictions_of_step(step, f"RL {arm}, step {step['step']}")


def _contradictions_of_subject(
    subject: list[Mapping[str, Any]], predicate: Mapping[str, Any]
) -> Iterator[str]:
    """The subject names trees, contract, recipe and sources, each once and with its digest."""
    parameters, case = predicate["parameters"], predicate["parameters"]["case"]
    wanted = {
        f"contract/{case}": parameters["contract"]["identity"],
        f"recipe/{case}": parameters["recipe"],
        **{source["name"]: source["content_hash"] for source in predicate["sources"]},
    }
    if len(wanted) != 2 + len(predicate["sources"]):
        yield "a source is listed twice"
    found: dict[str, Any] = {}
    for entry in subject:
        if entry["name"] in found:
            yield f"subject {entry['name']} is listed twice"
        found[entry["name"]] = entry["digest"]
        if entry["name"] not in wanted and not (
            entry["name"].startswith("tree/") and set(entry["digest"]) == {"gitTree"}
        ):
            yield f"subject {entry['name']} is none of tree, contract, recipe and source"
    for name, digest in wanted.items():
        if found.get(name) != {"sha256": digest}:
            yield f"subject {name} is not sha256 {digest[:16]}.."


def _contradictions_of_claim(predicate: Mapping[str, Any]) -> Iterator[str]:
    claim = f"{predicate['parameters']['case']}/{CLAIM}"
    if predicate["claim"]["id"] != claim:
        yield f"claim {predicate['claim']['id']} is not {claim}"
    times = predicate["environment"]["happenstance"]
    try:
        moments = [datetime.datetime.fromisoformat(times[name]) for name in ("started", "finished")]
    except ValueError as error:
        yield f"happenstance: {error}"
        return
    if moments[0] > moments[1]:
        yield f"finished {times['finished']}, before it started {times['started']}"


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
    if control is not None and (control["max_abs"] is None) != (record["compared"] == "row"):
        yield f"{label}: the control compared something else than the pair"
    if control is not None and (control["kind"] == "stock") != (control["name"] == "stock"):
        yield f"{label}: control {control['name']} cannot be of kind {control['kind']}"


def _contradictions_of_step(step: Mapping[str, Any], label: str) -> Iterator[str]:
    if step["mismatches"] > step["tokens"]:
        yield f"{label}: more mismatches than tokens"
    exact = {"max_abs": 0.0, "mean_abs": 0.0, "k3_kl": 0.0, "is_ratio_max": 1.0}
    for name, value in (exact | {"is_ratio_median": 1.0}).items():
        if step["mismatches"] == 0 and _value(step[name]) != value:
            yield f"{label}: no mismatch, and yet {name} is {step[name]['decimal']}"


def check_consistent(data: Mapping[str, Any], what: str) -> None:
    """Refuse a statement whose parts contradict each other; no honest run writes such a file.

    A NaN on both sides is a mismatch although the streams agree, so a run that meets one writes
    digests that differ (`comparison` sees to it).
    """
    for problem in _contradictions(data):
        raise Refused(
            "SB0804",
            seen=f"{what}: {problem}",
            required="counts, digests, numbers and names that agree",
            hint="samebits explain SB0804",
        )
