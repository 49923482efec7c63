"""Add up shards of one run: same claim, same sources, disjoint parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samebits.contract import canonical
from samebits.errors import Refused
from samebits.evidence.statement import Statement, seal

_SAME = ("claim", "sources", "verifier")
_SAME_PARAMETERS = ("case", "recipe", "contract", "layouts", "legs", "switches")
_SAME_COMPARISON = ("sentence", "compared", "layouts", "fault")


def _refuse(seen: str, required: str) -> Refused:
    return Refused("SB0806", seen=seen, required=required, hint="samebits explain SB0806")


def _larger(a: Mapping[str, str] | None, b: Mapping[str, str] | None) -> Mapping[str, str] | None:
    if a is None or b is None:
        return a or b
    left, right = canonical.from_bits(dict(a)), canonical.from_bits(dict(b))
    return b if right > left or right != right else a


def _add_control(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, Any] | None:
    if a is None or b is None:
        return a or b
    if a["name"] != b["name"]:
        raise _refuse(f"controls {a['name']} and {b['name']}", "one control for all shards")
    return a | {
        "tokens": a["tokens"] + b["tokens"],
        "mismatches": a["mismatches"] + b["mismatches"],
        "max_abs": _larger(a["max_abs"], b["max_abs"]),
    }


def _add_hazards(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in sorted({*a, *b})}


def _add_comparison(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    for name in _SAME_COMPARISON:
        if a[name] != b[name]:
            raise _refuse(f"{name} of leg {a['leg']}, {a['name']} differs", "shards of one run")
    return a | {
        "tokens": a["tokens"] + b["tokens"],
        "mismatches": a["mismatches"] + b["mismatches"],
        "max_abs": _larger(a["max_abs"], b["max_abs"]),
        "first_difference": a["first_difference"] or b["first_difference"],
        "streams": a["streams"] + b["streams"],
        "hazards": _add_hazards(a["hazards"], b["hazards"]),
        "control": _add_control(a["control"], b["control"]),
    }


def _add(a: Statement, b: Statement) -> Statement:
    left, right = a.predicate, b.predicate
    for name in _SAME:
        if left[name] != right[name]:
            raise _refuse(f"shards with another {name}", "shards of one run")
    for name in _SAME_PARAMETERS:
        if left["parameters"].get(name) != right["parameters"].get(name):
            raise _refuse(f"shards with another {name}", "shards of one run")
    if a.data["subject"] != b.data["subject"]:
        raise _refuse("shards of other trees or sources", "shards of one run")
    if left["environment"]["intent"] != right["environment"]["intent"]:
        raise _refuse("shards of other environments", "shards of one run")
    twice = sorted(set(left["shards"]) & set(right["shards"]))
    if twice:
        raise _refuse(f"shard {', '.join(twice)} given twice", "each shard once")
    once = {(o["leg"], o["name"]) for o in left["oracle"]}
    if (left["rl"] and right["rl"]) or any((o["leg"], o["name"]) in once for o in right["oracle"]):
        raise _refuse("two shards with the same RL or oracle run", "it in one shard")
    rows = {(c["leg"], c["name"]): c for c in left["comparisons"]}
    for record in right["comparisons"]:
        key = (record["leg"], record["name"])
        rows[key] = _add_comparison(rows[key], record) if key in rows else record
    times = [p["environment"]["happenstance"] for p in (left, right)]
    happenstance = times[0] | {
        "started": min(t["started"] for t in times),
        "finished": max(t["finished"] for t in times),
    }
    dependencies = {
        (d["uri"], *sorted(d["digest"].items())): d
        for d in [*left["resolvedDependencies"], *right["resolvedDependencies"]]
    }
    parameters = dict(left["parameters"]) | {
        "rl_steps": max(left["parameters"]["rl_steps"], right["parameters"]["rl_steps"]),
        "seeds": left["parameters"]["seeds"] | right["parameters"]["seeds"],
    }
    predicate = dict(left) | {
        "parameters": parameters,
        "resolvedDependencies": [dependencies[key] for key in sorted(dependencies, key=str)],
        "environment": {"intent": left["environment"]["intent"], "happenstance": happenstance},
        "comparisons": [rows[key] for key in sorted(rows)],
        "oracle": [*left["oracle"], *right["oracle"]],
        "rl": left["rl"] or right["rl"],
        "shards": [*left["shards"], *right["shards"]],
        # A repeat speaks of one shard's streams, and says nothing about their union.
        "repeats": [],
        "byproducts": [*left["byproducts"], *right["byproducts"]],
        "limits": list(dict.fromkeys([*left["limits"], *right["limits"]])),
    }
    return seal(dict(a.data) | {"predicate": predicate})


def merge(statements: Sequence[Statement]) -> Statement:
    """One statement of all shards, in any number; counts, hazards and streams add up.

    Refuses shards of other sources, recipes, contracts or environments, and a shard given twice.
    """
    if not statements:
        raise _refuse("no shard", "at least one")
    whole = statements[0]
    for part in statements[1:]:
        whole = _add(whole, part)
    return whole
