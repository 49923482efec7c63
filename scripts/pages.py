#!/usr/bin/env python3
"""Write the generated parts of pages from evidence, ledgers, recorded rows and pins.

    scripts/pages.py            rewrite what stands between `<!-- NAME: generated -->` and its end
    scripts/pages.py --check    change nothing

Exit codes: 0 pages say what they should, 1 a page differs (or has lost a marker).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from samebits import bench, cases, markdown, recipe
from samebits.bench import pages as gpu_pages
from samebits.casework import ladder, steps
from samebits.errors import NotObserved
from samebits.patching import pins
from samebits.patching.workspace import Workspace

ROOT = Path(__file__).resolve().parents[1]
MANY_ROWS = 24
LEGS = {
    "A": "a row alone = the row in any batch",
    "B": "decode = prefill, under splits, prefix hits, preemption",
    "C": "trainer = prefill, padded and packed",
    "D": "every claimed layout = one rank",
    "E": "still equal after optimizer steps and refits",
    "F": "whole logit rows, by digest",
    "O": "mean distance to an fp32 oracle no larger than that of stock; distances, not bits",
    "rl": "RL run, all steps",
}


def case_table() -> str:
    """Per case: platform and verdict, then tokens and mismatches of each leg."""
    rows = []
    for status in cases.all_statuses():
        rows.append(
            [
                f"[{status.case}](cases/{status.case}/recipe.md)",
                status.platform,
                status.judged(),
                ", ".join(status.legs()) or "-",
                "; ".join(status.not_shown) or "-",
                status.date or "-",
                str(status.reproductions),
            ]
        )
    legend = "\n".join(f"- **{leg}**: {text}" for leg, text in LEGS.items())
    columns = ["case", "platform", "verdict", "mismatches of tokens, per leg", "not shown", "date"]
    table = markdown.table([*columns, "reproduced"], rows)
    return f"{table}\n\n{legend}"


def step_table() -> str:
    """What each case has shown of the steps to a proven case, and what is put out of scope."""
    found = {name: steps.progress(name, local=False).states for name in recipe.known_cases()}
    columns = [dict((state.step, state.state) for state in states) for states in found.values()]
    rows = [
        [f"`{step.name}`", step.title, *(column[step.name] for column in columns)]
        for step in steps.STEPS
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, states in found.items():
        for state in states:
            if state.state in (steps.OUT, steps.BLOCKED):
                reasons.setdefault((name, state.why), []).append(f"`{state.step}`")
    table = markdown.table(["step", "shows", *found], rows)
    notes = [f"- {name} leaves out {', '.join(of)}: {why}" for (name, why), of in reasons.items()]
    return "\n".join([table, "", *notes]).rstrip()


def control_table() -> str:
    """Every recorded comparison beside its negative control."""
    rows = []
    for case in recipe.known_cases():
        path = recipe.load(case).evidence_path
        if not path.exists():
            continue
        for record in json.loads(path.read_text())["predicate"]["comparisons"]:
            control = record["control"]
            if control is None:
                continue
            rows.append(
                [
                    case,
                    record["leg"],
                    record["name"],
                    f"{record['mismatches']:,} of {record['tokens']:,}",
                    control["name"],
                    f"{control['mismatches']:,} of {control['tokens']:,}",
                ]
            )
    return markdown.table(["case", "leg", "pair", "mismatches", "control", "its mismatches"], rows)


def blind_table() -> str:
    """What each case with a contract does not have, so that a fault of it is invisible there."""
    rows = []
    for name in recipe.known_cases():
        case = recipe.load(name)
        if not case.contract_path.exists():
            continue
        absent = [leg for leg in "ABCDEFO" if leg not in case.legs]
        parts = [f"leg {', '.join(absent)}"] if absent else []
        parts += [] if case.rl else ["optimizer steps, refits, RL"]
        parts += [] if case.gdn_schedule else ["recurrent layers"]
        head = "tied" if case.config["tie_word_embeddings"] else "untied"
        ranks = max(*case.trainer_tp, *case.rollout_tp)
        rows.append([name, "; ".join(parts) or "-", case.config["rms_norm_eps"], head, str(ranks)])
    columns = ["case", "legs and parts it does not have", "eps", "output layer", "most ranks"]
    return markdown.table(columns, rows)


def _benchmark(row: dict) -> list[str]:
    """Columns of one recorded row."""
    target = "-" if row["target"] is None else f"{row['target']:.2f}"
    met = {None: "-", True: "yes", False: "no"}[row["met"]]
    ours = f"{row['ours']:,} {row['unit']}"
    return [row["work"], ours, bench.beside(row), bench.ratio(row), target, met]


def _kinds(rows: list[dict]) -> list[list[str]]:
    """Columns for each operator and what it is compared with: ratios, and targets met."""
    found: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        if row["ratio"] is not None and "passes" not in row:  # of a row beside them
            found.setdefault((row["work"].split()[0], row["against"]["name"]), []).append(row)
    lines = []
    for (work, against), group in found.items():
        ratios = sorted(row["ratio"] for row in group)
        judged = [row["met"] for row in group if row["met"] is not None]
        spread = f"{ratios[0]:.2f} .. {ratios[-1]:.2f}"
        middle = f"{statistics.median(ratios):.2f}"
        met = f"{sum(judged)} of {len(judged)}" if judged else "-"
        lines.append([work, against, str(len(group)), middle, spread, met])
    return lines


def bench_table() -> str:
    """One table per machine: each row, or a line per operator where there are many."""
    try:
        recorded = bench.recorded()
    except NotObserved:
        return "Nothing recorded yet."
    machines: dict[str, list[dict]] = {}
    for row in recorded:
        machines.setdefault(row["hardware"], []).append(row)
    parts = []
    for hardware, rows in machines.items():
        if len(rows) <= MANY_ROWS:
            header = ["work", "ours", "against", "ratio", "target", "met"]
            table = markdown.table(header, [_benchmark(row) for row in rows])
        else:
            header = ["operator", "against", "rows", "median ratio", "ratios", "targets met"]
            table = markdown.table(header, _kinds(rows))
        parts.append(f"On {hardware}, {max(row['date'] for row in rows)}:\n\n{table}")
    return "\n\n".join(parts)


def ladder_table() -> str:
    """What each region costs and mends, for every case that has a ladder."""
    parts = []
    for name in recipe.known_cases():
        case = recipe.load(name)
        found = ladder.read(case)
        if found is not None:
            state = "; STALE" if ladder.stale(found, case) else ""
            table = markdown.table(ladder.COLUMNS, ladder.rows(found))
            head = f"`{found.command}`, {found.date}, on {found.chip}{state}:"
            parts.append(f"{head}\n\n{table}\n\n{found.summary()}.")
    return "\n\n".join(parts) or "Nothing recorded yet."


def pin_table() -> str:
    workspace = Workspace.find()
    rows = []
    for pin in pins.load(workspace).values():
        order = workspace.patches / pin.name / "order"
        count = 0
        if order.exists():
            lines = (line.strip() for line in order.read_text().splitlines())
            count = sum(bool(line) and not line.startswith("#") for line in lines)
        rows.append([pin.name, f"{pin.distribution} {pin.version}", pin.tag, str(count)])
    return markdown.table(["upstream", "release", "tag", "patches"], rows)


def _on_gpu(make: Callable[..., str], *more: str) -> Callable[[], str]:
    """A table of the rows that were recorded on a GPU."""
    return lambda: make([row for row in bench.recorded() if "NVIDIA" in row["hardware"]], *more)


PARTS: dict[str, Callable[[], str]] = {
    "cases": case_table,
    "steps": step_table,
    "controls": control_table,
    "blind": blind_table,
    "bench": bench_table,
    "ladders": ladder_table,
    "pins": pin_table,
    "gpu-products": _on_gpu(gpu_pages.products),
    "gpu-rates": _on_gpu(gpu_pages.rates),
    "gpu-attention": _on_gpu(gpu_pages.attention),
    "gpu-window": _on_gpu(gpu_pages.windowed),
    "gpu-head": _on_gpu(gpu_pages.head),
    "gpu-engines": _on_gpu(gpu_pages.engines),
    "gpu-chunk-row": _on_gpu(gpu_pages.gdn, "chunk_row"),
    "gpu-cpr": _on_gpu(gpu_pages.gdn, "cpr"),
    "gpu-gdn-passes": _on_gpu(gpu_pages.gdn_passes),
    "gpu-gdn-ceilings": _on_gpu(gpu_pages.gdn_ceilings),
}
PAGES = {
    "README.md": ("cases", "steps", "controls", "bench", "ladders", "pins"),
    "samebits/ops/GPU.md": (
        "gpu-products",
        "gpu-rates",
        "gpu-attention",
        "gpu-window",
        "gpu-head",
        "gpu-engines",
    ),
    "samebits/ops/gdn/README.md": (
        "gpu-chunk-row",
        "gpu-cpr",
        "gpu-gdn-passes",
        "gpu-gdn-ceilings",
    ),
    "skill/prove-zero/references/legs.md": ("blind",),
}


def rendered(text: str, names: tuple[str, ...], page: str) -> str:
    for name in names:
        made = markdown.replaced(text, name, PARTS[name](), page)
        if made is None:
            sys.exit(f"{page} has no `<!-- {name}: generated -->` .. `<!-- end -->`")
        text = made
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit 1 on a difference"
    )
    check = parser.parse_args().check
    stale = []
    for page, names in PAGES.items():
        path = ROOT / page
        text = path.read_text()
        wanted = rendered(text, names, page)
        if wanted != text:
            stale.append(page)
            if not check:
                path.write_text(wanted)
    if stale and check:
        print(
            f"differs: {', '.join(stale)}\n\nhint: .venv/bin/python scripts/pages.py",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
