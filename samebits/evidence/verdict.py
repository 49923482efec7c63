"""The verdict of a statement, from its counts alone, and the contradictions that refuse it.

DIFFERENT     a compared token differs, the oracle is further away than allowed, or a repeat of
              the run gave other streams
NOT_OBSERVED  no difference, but the claim was not exercised: too few tokens, a required hazard
              that never fired, a control that is missing, too short, not finite or did not diverge,
              a planted fault in the measured arm, a leg, comparison, layout or shard that did not
              run
EQUAL         otherwise

A NaN is never equal, not even to the NaN of the same bits: it is a mismatch of the measured arm,
and no difference of a control.
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
from samebits.evidence import pairs

EQUAL, DIFFERENT, NOT_OBSERVED = "EQUAL", "DIFFERENT", "NOT_OBSERVED"
CLAIM = "rollout-equals-trainer"
# A row or control that compares fewer tokens than this could agree, or diverge, by chance.
CONTROL_TOKENS = 32
# How many times further from the oracle than stock the aligned arm may be.
ORACLE_FACTOR = 1.0
# Numbers that may be below zero: the estimator k3 is, by rounding, where differences are tiny.
_SIGNED = ("reward", "k3_kl")
# Slack of checks between numbers that were rounded one by one.
_ROUNDING = 1e-9
_TREES = frozenset(f"tree/{upstream}" for upstream in ("vllm", "megatron", "verl"))
# Clocks of two machines may differ by so much.
_CLOCK_SKEW = datetime.timedelta(days=1)
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
    yield from _judge_divergence(control, label)


def _judge_divergence(control: Mapping[str, Any], label: str) -> Iterator[str]:
    """A control differs by finite numbers, in CONTROL_TOKENS tokens: one NaN says nothing of the
    order of a sum. Where whole rows are compared, producers count rows with finite values only."""
    distance = control["max_abs"]
    if distance is not None and not math.isfinite(_value(distance)):
        yield f"{label}: control {control['name']} holds numbers that are not finite"
    elif control["mismatches"] == 0 or (distance is not None and _value(distance) == 0.0):
        yield f"{label}: control {control['name']} did not diverge"
    elif control["mismatches"] < CONTROL_TOKENS:
        yield (
            f"{label}: control {control['name']} did not diverge in {CONTROL_TOKENS} tokens, "
            f"but in {control['mismatches']}"
        )


def diverged(control: Mapping[str, Any]) -> bool:
    """Whether a control of a comparison shows what it is there to show."""
    return not any(_judge_divergence(control, ""))


def _judge_length(control: Mapping[str, Any], label: str) -> Iterator[str]:
    if control["tokens"] < CONTROL_TOKENS:
        yield (
            f"{label}: control {control['name']} compared {control['tokens']} tokens "
            f"of the {CONTROL_TOKENS} that a control needs"
        )


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
        elif record["tokens"] < CONTROL_TOKENS:
            missing.append(
                f"{label}: {record['tokens']} tokens of the {CONTROL_TOKENS} that a row needs"
            )
        missing += _judge_control(record, label, wanted["control"])
    if all(record["control"] is None for record in found):
        missing.append(f"leg {leg}: no negative control")
    missing += _judge_coverage(leg, wanted, found)
    return _verdict(different, missing)


def _judge_pairs(
    leg: str, predicate: Mapping[str, Any], found: list[Mapping[str, Any]]
) -> Iterator[str]:
    """Every comparison of the leg ran, and no other; leg D is judged by its layouts."""
    ran, wanted = {record["name"] for record in found}, set(pairs.of(leg, predicate))
    for name in sorted(wanted - ran):
        yield f"leg {leg}: {name} was not compared"
    for name in sorted(ran - wanted):
        yield f"leg {leg}: {name} is no comparison of this case"


def _judge_oracle(leg: str, wanted: Mapping[str, Any], found: list[Mapping[str, Any]]) -> Judgement:
    different, missing = [], []
    for record in found:
        label = f"leg {leg}, {record['name']}"
        limit = ORACLE_FACTOR * _value(record["stock_mean"])
        aligned = _value(record["aligned_mean"])
        if not math.isfinite(limit):
            missing.append(f"{label}: the stock arm holds numbers that are not finite")
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
        if not limit < _value(control["mean"]) < math.inf:
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
    for step in record["stock"]:
        if not math.isfinite(_value(step["max_abs"])):
            yield f"RL: stock step {step['step']} holds numbers that are not finite"
    differing = sum(step["mismatches"] for step in record["stock"] if _differs(step))
    if differing < CONTROL_TOKENS:
        yield (f"RL: the stock run did not diverge in {CONTROL_TOKENS} tokens, but in {differing}")


def _differs(step: Mapping[str, Any]) -> bool:
    """Whether every number of an RL step shows finite differences."""
    distances = [_value(step[name]) for name in ("max_abs", "mean_abs", "k3_kl")]
    ratio = _value(step["is_ratio_max"])
    return all(math.isfinite(x) and x != 0.0 for x in distances) and ratio != 1.0


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
            missing = [*judged[leg].reasons]
            if leg != "D":
                missing += _judge_pairs(leg, predicate, found)
            elif "layouts" in parameters:
                missing += _judge_layouts(parameters["layouts"], found)
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
        value, signed = _value(record), where.rsplit("/", 1)[-1] in _SIGNED
        if value < 0.0 and not signed:
            yield f"{where}: {record['decimal']} is negative"
        if value == 0.0 and math.copysign(1.0, value) < 0.0:
            yield f"{where}: negative zero"
    seen = set()
    for record in [*predicate["comparisons"], *predicate["oracle"]]:
        key = (record["leg"], record["name"])
        if key in seen:
            yield f"leg {key[0]}, {key[1]} is listed twice"
        seen.add(key)
    for record in predicate["oracle"]:
        if _value(record["factor"]) != ORACLE_FACTOR:
            yield f"leg O, {record['name']}: factor {record['factor']['decimal']} is not 1"
        for arm in ("aligned", "stock"):
            if _above(record[f"{arm}_mean"], record[f"{arm}_max"]):
                yield f"leg O, {record['name']}: mean distance of {arm} is above the largest"
    for record in predicate["comparisons"]:
        yield from _contradictions_of(record, f"leg {record['leg']}, {record['name']}")
    for arm in ("aligned", "stock"):
        steps = (predicate["rl"] or {}).get(arm, [])
        if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
            yield f"RL {arm}: steps are not 1, 2, 3 and so on"
        for step in steps:
            yield from _contradictions_of_step(step, f"RL {arm}, step {step['step']}")
    yield from _contradictions_of_refits(predicate)


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
            entry["name"] in _TREES and set(entry["digest"]) == {"gitTree"}
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
    if moments[1] > datetime.datetime.now(datetime.UTC) + _CLOCK_SKEW:
        yield f"finished {times['finished']}, which is still to come"


def _contradictions_of(record: Mapping[str, Any], label: str) -> Iterator[str]:
    for part in (record, record["control"] or record):
        if part["mismatches"] > part["tokens"]:
            yield f"{label}: more mismatches than tokens"
        exact = part["max_abs"] is None or _value(part["max_abs"]) == 0.0
        if part["mismatches"] == 0 and not exact:
            yield f"{label}: no mismatch, and yet a difference"
    if (record["compared"] == "row") != (record["leg"] == "F"):
        yield f"{label}: whole rows belong to leg F, and to it only"
    layouts = record["layouts"]
    if record["leg"] == "D":
        if record["name"] != pairs.of_layouts(layouts["left"], layouts["right"]):
            yield f"{label}: compares {layouts['left']} with {layouts['right']}"
    elif layouts != {"left": "tp1", "right": "tp1"}:
        yield f"{label}: other layouts than one rank belong to leg D"
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

    yield from _impossible(step, label)


def _impossible(step: Mapping[str, Any], label: str) -> Iterator[str]:
    """Numbers that no log-probabilities give together: d of `tokens` tokens, most of them 0.

    max |d| / tokens <= mean |d| <= max |d| * mismatches / tokens; with g(d) = exp(d) - 1 - d, which
    is least at 0, convex, and larger on the right, g(-mean |d|) <= k3 <= g(max |d|); every ratio is
    between exp(-max |d|) and exp(max |d|), and 1 for the majority where the majority agrees.
    """
    names = ("max_abs", "mean_abs", "k3_kl", "is_ratio_max", "is_ratio_median")
    largest, mean, k3, ratio, median = (_value(step[name]) for name in names)
    tokens, wrong = step["tokens"], step["mismatches"]
    if math.isfinite(largest) != math.isfinite(mean):
        yield f"{label}: one of max_abs and mean_abs is finite"
    if not math.isfinite(largest) or not tokens:
        return
    up, down = 1.0 + _ROUNDING, 1.0 - _ROUNDING
    if not largest * down <= mean * tokens <= largest * wrong * up:
        yield f"{label}: mean_abs {mean} does not fit max_abs {largest}"
    if not _g(-mean) * down - _ROUNDING <= k3 <= _g(largest) * up + _ROUNDING:
        yield f"{label}: k3_kl {k3} does not fit max_abs {largest}"
    if not _exp(-largest) * down <= ratio <= _exp(largest) * up:
        yield f"{label}: is_ratio_max {ratio} does not fit max_abs {largest}"
    if not _exp(-largest) * down <= median <= ratio:
        yield f"{label}: is_ratio_median {median} does not fit is_ratio_max {ratio}"
    if 2 * wrong < tokens and median != 1.0:
        yield f"{label}: most tokens agree, and yet is_ratio_median is {median}"


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _g(d: float) -> float:
    return _exp(d) - 1.0 - d


def _above(mean: Mapping[str, str], largest: Mapping[str, str]) -> bool:
    """A mean above the largest of its numbers, or only one of the two that is NaN or infinite."""
    a, b = _value(mean), _value(largest)
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) != math.isfinite(b)
    return a > b * (1.0 + _ROUNDING)


def _contradictions_of_refits(predicate: Mapping[str, Any]) -> Iterator[str]:
    """Leg E is the RL run without its first step, in the aligned arm and in its control."""
    for record in predicate["comparisons"]:
        if record["leg"] != "E":
            continue
        label = f"leg E, {record['name']}"
        if predicate["rl"] is None:
            yield f"{label}: no RL run"
            return
        for arm, part in (("aligned", record), ("stock", record["control"])):
            if part is None:
                continue
            late = predicate["rl"][arm][1:]
            for count in ("tokens", "mismatches"):
                total = sum(step[count] for step in late)
                if part[count] != total:
                    yield f"{label}, {arm}: {part[count]} {count}, {total} in the RL steps"
            if not _is_largest(part["max_abs"], [step["max_abs"] for step in late]):
                yield f"{label}, {arm}: max_abs is not that of the RL steps"


def _is_largest(given: Mapping[str, str] | None, found: list[Mapping[str, str]]) -> bool:
    if given is None:
        return False
    values = [_value(record) for record in found]
    if math.isnan(_value(given)) or any(math.isnan(value) for value in values):
        return math.isnan(_value(given)) and any(math.isnan(value) for value in values)
    return _value(given) == max(values, default=0.0)


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
