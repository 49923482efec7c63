"""Rows of a benchmark of whole engines, from what every configuration measured."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from samebits.bench.engine_arm import MODES, PASS, PROMPT, REQUESTS, Arm, median

# Time allowed beside stock's: 0.95 of its tokens in a second, and 0.97 with recurrent states.
THROUGHPUT, HYBRID_THROUGHPUT = 1.053, 1.031
STEP = 1.10
STATE = 2.0  # states with an open chunk, beside the states of vLLM's own in fp32

Found = Mapping[str, Any]


_NOT_RUN = "not run"


def left_out(arm: Arm) -> dict[str, Any]:
    """A configuration that was not asked for."""
    return {"name": arm.name, "failed": _NOT_RUN, "rated": arm.rated}


def rollout_rows(case: str, found: Sequence[Found]) -> list[dict[str, Any]]:
    """Ours against the fastest of vLLM's own, with the same seeds and with none.

    Microseconds for each sampled token of all requests. `others` are the configurations that were
    slower or are not to be compared with, and those that were not measured with the reason.
    `differ`: of how many decoded tokens a prefill of the same tokens has other bits, by the gate's
    small run. `runs`: how often it was timed. `peak_gib`: of the process's tensors on the GPU.
    Where a configuration that competes was not asked for, the work is named so and has no target:
    the fastest may be among those, and a row against all of them is another row.
    """
    ours, *own = found
    failed = [
        {"name": arm["name"], "not_measured": arm["failed"]} for arm in own if "failed" in arm
    ]
    ran = [arm for arm in own if "failed" not in arm and _rated(arm)]
    also = [arm for arm in own if "failed" not in arm and arm not in ran]
    target = HYBRID_THROUGHPUT if _states(ours) else THROUGHPUT
    chosen = any(arm["failed"] == _NOT_RUN and arm["rated"] for arm in own if "failed" in arm)
    table = []
    for mode in MODES if ran else ():
        best, *slower = sorted(ran, key=functools.partial(median, mode=mode))
        seeds = "the same seeds" if mode == "seeded" else "no seeds"
        if chosen:
            seeds += " and chosen configurations alone"
        work = f"rollout, {REQUESTS} requests of {PROMPT} + {_response(ours)} tokens, {case}"
        table.append(
            {
                "work": work.replace(", ", f" against {seeds}, ", 1),
                "ours": _per_token(ours, "seeded"),
                "runs": len(ours["seconds"]["seeded"]),
                **_peak(ours),
                "against": _beside(best, mode),
                "ratio": round(median(ours, "seeded") / median(best, mode), 3),
                "unit": "us/token",
                "target": None if chosen else target,
                "others": [
                    *(_beside(arm, mode) for arm in slower),
                    *(_beside(arm, mode if mode in arm["seconds"] else "seeded") for arm in also),
                    *failed,
                ],
            }
        )
    return table


def _rated(arm: Found) -> bool:
    return Arm(**arm["arm"]).rated


def _response(arm: Found) -> int:
    return Arm(**arm["arm"]).response


def _beside(arm: Found, mode: str) -> dict[str, Any]:
    """One other configuration in a row."""
    differ = f"{arm['mismatches']} of {arm['gated']}"
    runs = len(arm["seconds"][mode])
    return {
        "name": arm["name"],
        "time": _per_token(arm, mode),
        "runs": runs,
        "differ": differ,
        **_peak(arm),
    }


def _per_token(arm: Found, mode: str) -> float:
    return round(median(arm, mode) * 1e6 / (REQUESTS * _response(arm)), 2)


def _peak(arm: Found) -> dict[str, float]:
    return {"peak_gib": round(arm["memory"]["allocated"] / 2**30, 2)}


# --- memory ---------------------------------------------------------------------------------


def memory_rows(case: str, found: Sequence[Found]) -> Iterator[dict[str, Any]]:
    """Pages of a sequence of a model with recurrent states, from the caches that the engines hold:
    of its states alone, of all, and of a token of a cached prefix.

    Against the first of vLLM's own with fp32 states that ran, since they hold the same.
    """
    ours, *own = found
    ran = [arm for arm in own if "failed" not in arm and "unseeded" in arm["seconds"]]
    theirs = next((arm for arm in ran if _rated(arm)), None)
    if not _states(ours) or theirs is None:
        return
    other = [arm for arm in ran if not _rated(arm)]
    length = Arm(**ours["arm"]).length
    for what, size, unit, target in (
        ("states of a sequence, its open chunk included", _states, "MiB", STATE),
        (f"states, keys and values of a sequence of {length} tokens", _sequence, "MiB", None),
        ("states, keys and values of a cached prefix, by pages", _prefix, "KiB/token", None),
    ):
        yield {
            "work": f"memory of {what}, {case}",
            "ours": _shown(size(ours), unit),
            "against": {"name": theirs["name"], "time": _shown(size(theirs), unit)},
            "ratio": round(size(ours) / size(theirs), 3),
            "unit": unit,
            "target": target,
            "others": [{"name": a["name"], "time": _shown(size(a), unit)} for a in other],
        }


def _shown(value: float, unit: str) -> float:
    return round(value / (2**20 if unit == "MiB" else 2**10), 2)


def _groups(arm: Found) -> list[dict[str, Any]]:
    return arm["memory"]["groups"]


def _states(arm: Found) -> float:
    return sum(g["layers"] * g["sequence"] for g in _groups(arm) if g["state"])


def _sequence(arm: Found) -> float:
    return sum(g["layers"] * g["sequence"] for g in _groups(arm))


def _prefix(arm: Found) -> float:
    """A page of every layer for as many tokens as one of keys and values holds: with a prefix cache
    vLLM keeps a state at the end of each. Counted from the pages of engines that have none."""
    (tokens,) = {g["tokens"] for g in _groups(arm) if not g["state"]}
    return sum(g["layers"] * g["page"] for g in _groups(arm)) / tokens


# --- trainer --------------------------------------------------------------------------------


def trainer_rows(case: str, passes: Mapping[str, Found]) -> Iterator[dict[str, Any]]:
    """Ours against Megatron's local spec, milliseconds of a pass; none where ours did not run.

    Where the other did not, the row has its reason in place of a time, and no ratio.
    """
    ours, theirs = (passes[arithmetic] for arithmetic in ("aligned", "stock"))
    if "failed" in ours:
        return
    work = f"trainer forward and backward, {PASS[0]} x {PASS[1]} tokens"
    if ours["sequences"] < PASS[0]:
        work += f" in micro-batches of {ours['sequences']}"
    seconds = statistics.median(ours["seconds"])
    against: dict[str, Any] = {"name": "Megatron's local spec"}
    ratio = None
    if "failed" in theirs:
        against["not_measured"] = theirs["failed"]
    else:
        other = statistics.median(theirs["seconds"])
        against |= {"time": round(other * 1e3, 2), **_peak(theirs)}
        ratio = round(seconds / other, 3)
    yield {
        "work": f"{work}, {case}",
        "ours": round(seconds * 1e3, 2),
        **_peak(ours),
        "against": against,
        "ratio": ratio,
        "unit": "ms",
        "target": None if ratio is None else STEP,
    }
