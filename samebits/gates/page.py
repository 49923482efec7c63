"""The report page of a proving run: tables from the statement, plots from its streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samebits import files, report
from samebits.evidence import DifferenceReport
from samebits.evidence.statement import Statement
from samebits.evidence.verdict import judge
from samebits.gates.run import Stage
from samebits.gates.streams import Stream

_SENTENCES = {
    "EQUAL": "every compared log-probability has one bit pattern on both sides",
    "DIFFERENT": "rollout and trainer differ",
    "NOT_OBSERVED": "no difference was seen, but the claim was not fully exercised",
}


def sentence(statement: Statement) -> str:
    """One sentence: verdict, mismatches leg by leg (never summed), what the controls did."""
    rows = [*statement.predicate["comparisons"]]
    legs: dict[str, list[int]] = {}
    for row in rows:
        count = legs.setdefault(row["leg"], [0, 0])
        count[0] += row["mismatches"]
        count[1] += row["tokens"]
    counts = ", ".join(f"{leg} {wrong:,} of {tokens:,}" for leg, (wrong, tokens) in legs.items())
    controls = [row["control"] for row in rows if row["control"]]
    diverged = sum(control["mismatches"] > 0 for control in controls)
    return (
        f"{statement.case}: {statement.verdict}; mismatches per leg: {counts}; "
        f"{diverged} of {len(controls)} negative controls diverged"
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
            "control": record["control"]["name"] if record["control"] else "-",
            "control_mean": _shown(record["control"] and record["control"]["mean"]),
        }
        for record in predicate["oracle"]
    ]


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
) -> str:
    """HTML of a run."""
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
            "limits": predicate["limits"],
        }
    )


def write(
    statement: Statement,
    done: Mapping[str, Stage],
    chip: str,
    path: Path,
    differences: Sequence[DifferenceReport] = (),
) -> Path:
    """Write `report.html` atomically and return its path."""
    files.write_atomic(path, render(statement, done, chip, differences).encode())
    return path
