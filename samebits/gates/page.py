"""The report page of a proving run: tables from the statement, plots from its streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samebits import files, report
from samebits.evidence import DifferenceReport
from samebits.evidence.statement import Statement
from samebits.evidence.verdict import diverged, judge
from samebits.gates.run import Stage
from samebits.gates.streams import Stream
from samebits.recipe import qualified

_SENTENCES = {
    "EQUAL": "every compared log-probability has one bit pattern on both sides",
    "DIFFERENT": "rollout and trainer differ",
    "NOT_OBSERVED": "no difference was seen, but the claim was not fully exercised",
}


def sentence(statement: Statement, scope: str) -> str:
    """One sentence: verdict and `Recipe.scope`, mismatches of each leg, what the controls did."""
    rows = [*statement.predicate["comparisons"]]
    legs: dict[str, list[int]] = {}
    for row in rows:
        count = legs.setdefault(row["leg"], [0, 0])
        count[0] += row["mismatches"]
        count[1] += row["tokens"]
    counts = ", ".join(f"{leg} {wrong:,} of {tokens:,}" for leg, (wrong, tokens) in legs.items())
    controls = [row["control"] for row in rows if row["control"]]
    seen = sum(diverged(control) for control in controls)
    return (
        f"{statement.case}: {qualified(statement.verdict, scope)}; mismatches per leg: {counts}; "
        f"{seen} of {len(controls)} negative controls diverged"
    )


def _shown(record: Mapping[str, str] | None) -> str:
    if record is None:
        return "-"
    value = float(record["decimal"])
    return "0" if value == 0 else f"{value:.3g}"


def _legs(predicate: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for record in predicate["comparisons"]:
        control = record["control"]
        rows.append(
            {
                "name": record["leg"],
                "sentence": f"{record['sentence']} ({record['name']})",
                "tokens": record["tokens"],
                "mismatches": record["mismatches"],
                "max_abs": _shown(record["max_abs"]),
                "control": "-" if control is None else control["name"],
                "control_mismatches": "-"
                if control is None
                else f"{control['mismatches']:,} of {control['tokens']:,}",
            }
        )
    return rows


def _hazards(predicate: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """(leg, hazard, times); pairs of one leg may count the same events, so the largest is shown."""
    fired: dict[tuple[str, str], int] = {}
    for record in predicate["comparisons"]:
        for name, times in record["hazards"].items():
            key = (record["leg"], name)
            fired[key] = max(times, fired.get(key, 0))
    return [(leg, name, times) for (leg, name), times in fired.items()]


def _oracles(predicate: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            **record,
            "aligned": _shown(record["aligned_mean"]),
            "stock": _shown(record["stock_mean"]),
            "aligned_max": _shown(record["aligned_max"]),
            "stock_max": _shown(record["stock_max"]),
            "control": record["control"]["name"] if record["control"] else "-",
            "control_mean": _shown(record["control"] and record["control"]["mean"]),
        }
        for record in predicate["oracle"]
    ]


def rl_arms(predicate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry for each arm of the RL run, over all of its steps; none where no RL run was.

    mean_abs and k3_kl are means over all tokens. Medians cannot be added up: is_ratio_median holds
    the lowest and the highest of the steps.
    """
    arms = []
    for arm in ("aligned", "stock") if predicate["rl"] else ():
        steps = predicate["rl"][arm]
        if not steps:
            continue
        tokens = sum(step["tokens"] for step in steps)
        values = {name: [float(step[name]["decimal"]) for step in steps] for name in _OF_STEPS}
        weights = [step["tokens"] / max(1, tokens) for step in steps]
        medians = values["is_ratio_median"]
        arms.append(
            {
                "arm": arm,
                "steps": len(steps),
                "tokens": tokens,
                "mismatches": sum(step["mismatches"] for step in steps),
                "max_abs": float(np.max(values["max_abs"])),
                "mean_abs": float(np.dot(weights, values["mean_abs"])),
                "k3_kl": float(np.dot(weights, values["k3_kl"])),
                "is_ratio_max": float(np.max(values["is_ratio_max"])),
                "is_ratio_median": (float(np.min(medians)), float(np.max(medians))),
            }
        )
    return arms


_OF_STEPS = ("max_abs", "mean_abs", "k3_kl", "is_ratio_max", "is_ratio_median")


def rl_rows(predicate: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """`rl_arms` as cells of text: arm, steps, tokens, mismatches, max and mean |dlogp|, K3 KL, IS
    ratio max and median (lowest to highest of the steps, where they are not one)."""
    rows = []
    for arm in rl_arms(predicate):
        low, high = (f"{value:.6g}" for value in arm["is_ratio_median"])
        distances = (f"{arm[name]:.3g}" for name in ("max_abs", "mean_abs", "k3_kl"))
        counts = (f"{arm[name]:,}" for name in ("steps", "tokens", "mismatches"))
        median = low if low == high else f"{low} to {high}"
        rows.append((arm["arm"], *counts, *distances, f"{arm['is_ratio_max']:.6g}", median))
    return rows


RL_COLUMNS = (
    *("RL arm", "steps", "tokens", "mismatches", "max |dlogp|", "mean |dlogp|", "K3 KL"),
    *("IS ratio max", "IS ratio median"),
)


def in_total(predicate: Mapping[str, Any]) -> str:
    """One line on all comparisons of a token in the aligned arm: of every leg, and of the RL run.

    A token that two legs compare counts twice; leg E does not, because the RL run contains it.
    """
    arms = [arm for arm in rl_arms(predicate) if arm["arm"] == "aligned"]
    rows = [row for row in predicate["comparisons"] if row["leg"] != "E" or not arms] + arms
    tokens, wrong = (sum(row[count] for row in rows) for count in ("tokens", "mismatches"))
    return (
        f"in total: {wrong:,} of {tokens:,} comparisons of a token differ, over all legs and RL "
        "(comparisons, not tokens: what two legs compare counts twice)"
    )


def _differences(rollout: Stream, trainer: Stream) -> list[float]:
    left = rollout.columns()["bits"].view(np.float32).astype(np.float64)
    right = trainer.columns()["bits"].view(np.float32).astype(np.float64)
    return np.abs(left - right).tolist()


def _plots(done: Mapping[str, Stage], steps: Mapping[str, Any]) -> list[dict[str, str]]:
    from samebits.report import plots

    aligned, stock = done["rl_aligned"].streams, done["rl_stock"].streams

    def series(arm: str, name: str) -> list[float]:
        return [float(step[name]["decimal"]) for step in steps[arm]]

    return [
        {
            "uri": plots.difference_per_step(
                series("aligned", "max_abs"), series("stock", "max_abs")
            ),
            "caption": "Largest |dlogp| between rollout and trainer, per RL step",
        },
        {
            "uri": plots.difference_histogram(
                {
                    "aligned": _differences(aligned["rollout"], aligned["trainer"]),
                    "stock": _differences(stock["rollout"], stock["trainer"]),
                }
            ),
            "caption": "All response tokens of the run by |dlogp|",
        },
        {
            "uri": plots.reward_curve(series("aligned", "reward"), series("stock", "reward")),
            "caption": "Mean reward per RL step",
        },
    ]


def render(
    statement: Statement,
    done: Mapping[str, Stage],
    chip: str,
    differences: Sequence[DifferenceReport] = (),
    scope: str = "",
) -> str:
    """HTML of a run; `scope` as of its recipe."""
    predicate = statement.predicate
    steps = predicate["rl"]
    rows = []
    for arm in ("aligned", "stock") if steps else ():
        for step in steps[arm]:
            numbers = {k: _shown(v) for k, v in step.items() if isinstance(v, dict)}
            rows.append({**step, **numbers, "arm": arm})
    happened = predicate["environment"]["happenstance"]
    return report.render(
        {
            "case": statement.case,
            "verdict": statement.verdict,
            "qualified": qualified(statement.verdict, scope),
            "sentence": _SENTENCES[statement.verdict],
            "reasons": judge(predicate).reasons,
            "started": happened["started"],
            "finished": happened["finished"],
            "chip": chip,
            "contract": predicate["parameters"]["contract"]["identity"],
            "legs": _legs(predicate),
            "oracles": _oracles(predicate),
            "differences": [str(report) for report in differences],
            "hazards": _hazards(predicate),
            "plots": _plots(done, steps) if steps else [],
            "steps": rows,
            "rl_columns": RL_COLUMNS,
            "rl_rows": rl_rows(predicate),
            "in_total": in_total(predicate),
            "limits": predicate["limits"],
        }
    )


def write(
    statement: Statement,
    done: Mapping[str, Stage],
    chip: str,
    path: Path,
    differences: Sequence[DifferenceReport] = (),
    scope: str = "",
) -> Path:
    """Write `report.html` atomically and return its path."""
    files.write_atomic(path, render(statement, done, chip, differences, scope).encode())
    return path
