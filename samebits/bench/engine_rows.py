"""Rows of a benchmark of whole engines, from what every configuration measured."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from samebits.bench.engine_arm import MODES, PASS, PROMPT, REQUESTS, RESPONSE, Arm, median

# Time allowed beside stock's: 0.95 of its tokens in a second, and 0.97 with recurrent states.
THROUGHPUT, HYBRID_THROUGHPUT = 1.053, 1.031
STEP = 1.10
STATE = 2.0  # states with an open chunk, beside the states of vLLM's own in fp32

Found = Mapping[str, Any]


def left_out(name: str) -> dict[str, Any]:
    """A configuration that was not asked for."""
    return {"name": name, "failed": "not run"}


def rollout_rows(case: str, found: Sequence[Found]) -> list[dict[str, Any]]:
    """Ours against the fastest of vLLM's own, with the same seeds and with none.

    Microseconds for each sampled token of all requests. `others` are the configurations that were
    slower or are not to be compared with, and those that were not measured with the reason.
    `differ`: of how many decoded tokens a prefill of the same tokens has other bits, by the gate's
    small run. `peak_gib`: of the process's tensors on the GPU.
    """
    ours, *own = found
    failed = [
        {"name": arm["name"], "not_measured": arm["failed"]} for arm in own if "failed" in arm
    ]
    ran = [arm for arm in own if "failed" not in arm and _rated(arm)]
    also = [arm for arm in own if "failed" not in arm and arm not in ran]
    hybrid = bool(_states(ours))
    table = []
    for mode in MODES if ran else ():
        best, *slower = sorted(ran, key=functools.partial(median, mode=mode))
        seeds = "the same seeds" if mode == "seeded" else "no seeds"
        work = f"rollout, {REQUESTS} requests of {PROMPT} + {_response(ours)} tokens, {case}"
        table.append(
            {
                "work": work.replace(", ", f" against {seeds}, ", 1),
                "ours": _per_token(ours, "seeded"),
                **_peak(ours),
                "against": _beside(best, mode),
                "ratio": round(median(ours, "seeded") / median(best, mode), 3),
                "unit": "us/token",
                "target": HYBRID_THROUGHPUT if hybrid else THROUGHPUT,
                "others": [
                    *(_beside(arm, mode) for arm in slower),
                    *(_beside(arm, mode if mode in arm["seconds"] else "seeded") for arm in also),
                    *failed,
                ],
            }
        )
    return table


def _rated(arm: Found) -> bool:
    return "unseeded" in arm["seconds"] and ("arm" not in arm or Arm(**arm["arm"]).rated)


def _response(arm: Found) -> int:
    return arm["arm"]["response"] if "arm" in arm else RESPONSE


def _beside(arm: Found, mode: str) -> dict[str, Any]:
    """One other configuration in a row."""
    differ = f"{arm['mismatches']} of {arm['gated']}"
    return {"name": arm["name"], "time": _per_token(arm, mode), "differ": differ, **_peak(arm)}


def _per_token(arm: Found, mode: str) -> float:
    return round(median(arm, mode) * 1e6 / (REQUESTS * _response(arm)), 2)


def _peak(arm: Found) -> dict[str, float]:
    if "memory" not in arm:
        return {}
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
        ("states, keys and values of a cached prefix", _prefix, "KiB/token", None),
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
    return arm["memory"]["groups"] if "memory" in arm else []


def _states(arm: Found) -> float:
    return sum(g["layers"] * g["sequence"] for g in _groups(arm) if g["state"])


def _sequence(arm: Found) -> float:
    return sum(g["layers"] * g["sequence"] for g in _groups(arm))


def _prefix(arm: Found) -> float:
    """A page of every layer for as many tokens as one of keys and values holds: with a cached
    prefix vLLM keeps states at the ends of those."""
    (tokens,) = {g["tokens"] for g in _groups(arm) if not g["state"]}
    return sum(g["layers"] * g["page"] for g in _groups(arm)) / tokens


# --- trainer --------------------------------------------------------------------------------


def trainer_rows(case: str, passes: Mapping[str, Found]) -> Iterator[dict[str, Any]]:
    """Ours against Megatron's local spec, milliseconds of a pass; none where one did not run."""
    if any("failed" in found for found in passes.values()):
        return
    ours, theirs = (passes[arithmetic] for arithmetic in ("aligned", "stock"))
    work = f"trainer forward and backward, {PASS[0]} x {PASS[1]} tokens"
    if ours.get("sequences", PASS[0]) < PASS[0]:
        work += f" in micro-batches of {ours['sequences']}"
    seconds = [statistics.median(found["seconds"]) for found in (ours, theirs)]
    yield {
        "work": f"{work}, {case}",
        "ours": round(seconds[0] * 1e3, 2),
        **_peak(ours),
        "against": {
            "name": "Megatron's local spec",
            "time": round(seconds[1] * 1e3, 2),
            **_peak(theirs),
        },
        "ratio": round(seconds[0] / seconds[1], 3),
        "unit": "ms",
        "target": STEP,
    }
