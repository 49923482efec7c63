"""Tables of rows recorded on a GPU, which `scripts/pages.py` puts beside the kernels.

A ratio is our time by the other's; one in bold misses its target.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from samebits import markdown
from samebits.bench import gdn_cost

Row = dict[str, Any]
_PRODUCT = re.compile(r"gemm (\w+) (\d+) x (\d+) x (\d+) bf16(?:, (\d) leaves)?")
_GDN = re.compile(r"gdn (\w+), (.+), (\d+) heads")
_FLA = re.compile(r"\bfla\b")
_BYTES = "bytes / 4.3 TB/s"
BANDWIDTH, _PEAK = 4.3e6, 989e6  # bytes and bf16 FLOPs in a microsecond, dense
_STEP = re.compile(r"(prefill|train|decode) (\d+) x (\d+)(?:, (middle|closing))?")


def _bold(text: str, met: bool | None) -> str:
    return f"**{text}**" if met is False else text


def _ratio(row: Row) -> str:
    return _bold(f"{row['ratio']:.2f}", row["met"])


def _target(rows: Iterable[Row]) -> str:
    """The targets of rows beside one another: one where they agree."""
    found = ["-" if row["target"] is None else f"{row['target']:.2f}" for row in rows]
    return found[0] if len(set(found)) == 1 else ", ".join(found)


def _about(rows: Sequence[Row]) -> str:
    """Where and when."""
    dates = sorted({row["date"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{', '.join(sorted({row['hardware'] for row in rows}))}, {when}:"


def products(rows: Sequence[Row]) -> str:
    """Matrix products: a line for each shape and number of leaves, a column for each M."""
    found: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in rows:
        parts = _PRODUCT.fullmatch(row["work"])
        if parts:
            name, m, k, n, leaves = parts.groups()
            line = (name + (f", {leaves} leaves" if leaves else ""), f"{n} x {k}")
            found.setdefault(line, {})[int(m)] = row
    sizes = sorted({m for line in found.values() for m in line})
    header = ["product", "N x K", "target", *(f"M = {m}" for m in sizes)]
    lines = [
        [*name, _target(line.values()), *(_ratio(line[m]) if m in line else "-" for m in sizes)]
        for name, line in found.items()
    ]
    used = [row for line in found.values() for row in line.values()]
    return f"{_about(used)}\n\n{markdown.table(header, lines)}"


def rates(rows: Sequence[Row]) -> str:
    """Operators that are bound by memory: microseconds, and the share of its rate."""
    used = [row for row in rows if row["against"]["name"] == _BYTES]
    lines = [
        [
            row["work"],
            f"{row['ours']:,}",
            "-" if row["target"] is None else f"{1 / row['target']:.2f}",
            _bold(f"{1 / row['ratio']:.2f}", row["met"]),
        ]
        for row in used
    ]
    header = ["work", "microseconds", "target", "share of 4.3 TB/s"]
    return f"{_about(used)}\n\n{markdown.table(header, lines)}"


def _beside(rows: Sequence[Row], kind: str) -> tuple[list[Row], str]:
    """(rows, table) of works that start with a word: a column for each thing compared with."""
    used = [row for row in rows if row["work"].split()[0] == kind]
    names = list(dict.fromkeys(row["against"]["name"] for row in used))
    works: dict[str, dict[str, Row]] = {}
    for row in used:
        works.setdefault(row["work"], {})[row["against"]["name"]] = row
    lines = [
        [
            work,
            f"{next(iter(line.values()))['ours']:,} {used[0]['unit']}",
            _target(line.values()),
            *(_ratio(line[name]) if name in line else "-" for name in names),
        ]
        for work, line in works.items()
    ]
    return used, markdown.table(["work", "ours", "target", *(f"to {n}" for n in names)], lines)


def attention(rows: Sequence[Row]) -> str:
    """Attention beside every native operator that was at hand."""
    used, table = _beside(rows, "attention")
    return f"{_about(used)}\n\n{table}"


def windowed(rows: Sequence[Row]) -> str:
    """Attention with a window, beside what has the same window and beside our own without one."""
    used, table = _beside(rows, "windowed")
    return f"{_about(used)}\n\n{table}" if used else "Not measured."


def head(rows: Sequence[Row]) -> str:
    """Output layer and log-probabilities together."""
    used, table = _beside(rows, "lm_head")
    return f"{_about(used)}\n\n{table}"


def engines(rows: Sequence[Row]) -> str:
    """Whole engines: ours, then every configuration that it was compared with."""
    used = [row for row in rows if row["work"].split()[0] in ("rollout", "memory", "trainer")]
    lines = []
    for row in used:
        same = "-" if row["work"].startswith("memory") else "0 differ"
        lines.append([row["work"], "aligned", _time(row, row["ours"]), "", same])
        for other in (row["against"], *row.get("others", ())):
            if "not_measured" in other:
                lines.append(["", other["name"], "not measured", "", other["not_measured"]])
                continue
            ratio = row["ours"] / other["time"]
            first = other is row["against"]
            shown = _ratio(row) if first else f"{ratio:.2f}"
            differ = f"{other['differ']} differ" if "differ" in other else "-"
            lines.append(["", other["name"], _time(row, other["time"]), shown, differ])
    header = ["work", "configuration", "time or size", "ours by it", "decode and prefill"]
    target = ", ".join(dict.fromkeys(f"{row['target']:.2f}" for row in used if row["target"]))
    return f"{_about(used)} targets {target}, of the fastest\n\n{markdown.table(header, lines)}"


def _time(row: Row, value: float) -> str:
    return f"{value:,} {row['unit']}"


def gdn(rows: Sequence[Row], schedule: str) -> str:
    """Gated delta nets by one schedule: microseconds, and in brackets the ratio to FLA; a line of
    its own where a work is compared with something else."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        parts = _GDN.fullmatch(row["work"])
        if parts and parts[1] == schedule:
            name = row["against"]["name"]
            line = parts[2] if _FLA.search(name) else f"{parts[2]}, to {name}"
            found.setdefault(line, {})[int(parts[3])] = row
    heads = sorted({n for line in found.values() for n in line})
    lines = [
        [
            work,
            _target(line[n] for n in heads if n in line),
            *(f"{line[n]['ours']:,} ({_ratio(line[n])})" if n in line else "-" for n in heads),
        ]
        for work, line in found.items()
    ]
    used = [row for line in found.values() for row in line.values()]
    header = [schedule, "target", *(f"{n} heads" for n in heads)]
    return f"{_about(used)}\n\n{markdown.table(header, lines)}"


def gdn_passes(rows: Sequence[Row]) -> str:
    """Where the time of a layer goes: microseconds of each pass, ours and native."""
    used = [row for row in rows if "passes" in row]
    header = ["pass"]
    for row in used:
        header += [row["work"].removeprefix("passes of "), "native"]
    names = list(dict.fromkeys(name for row in used for name in row["passes"]))
    lines = [
        [name, *("-" if x is None else f"{x:,.1f}" for row in used for x in row["passes"][name])]
        for name in names
    ]
    sums = (x for row in used for x in (row["ours"], row["against"]["time"]))
    lines.append(["sum", *(f"{x:,.1f}" for x in sums)])
    return f"{_about(used)}\n\n{markdown.table(header, lines)}" if used else "Not measured."


def gdn_ceilings(rows: Sequence[Row]) -> str:
    """chunk_row's times beside what its kernels move and multiply, by the model of `gdn_cost`."""
    lines, used = [], []
    for row in rows:
        parts = _GDN.fullmatch(row["work"])
        step = _STEP.fullmatch(parts[2]) if parts and parts[1] == "chunk_row" else None
        if not step or not _FLA.search(row["against"]["name"]):
            continue
        assert parts is not None
        heads, tokens = int(parts[3]), int(step[2]) * int(step[3])
        layer = gdn_cost.Layer(key_heads=heads // 2, value_heads=heads)
        cost = _cost(step[1], step[4], layer).times(tokens * heads)
        used.append(row)
        lines.append(
            [
                parts[2],
                str(heads),
                f"{row['ours']:,}",
                f"{cost.moved / 1e6:,.0f}",
                f"{cost.moved / BANDWIDTH / row['ours']:.2f}",
                f"{cost.flops / 1e9:,.1f}",
                f"{cost.flops / _PEAK / row['ours']:.2f}",
            ]
        )
    order = {work: n for n, work in enumerate(dict.fromkeys(line[0] for line in lines))}
    lines.sort(key=lambda line: (order[line[0]], int(line[1])))
    header = ["chunk_row", "heads", "us", "MB", "of 4.3 TB/s", "GFLOP", "of 989 TFLOP/s"]
    return f"{_about(used)}\n\n{markdown.table(header, lines)}" if used else "Not measured."


def _cost(kind: str, phase: str | None, of: gdn_cost.Layer) -> gdn_cost.Cost:
    """Per token and value head. `middle`: the mean over the rows of a chunk that do not close it,
    since sequences are in all of those phases."""
    if kind == "prefill":
        return gdn_cost.prefill("chunk_row", of)
    if kind == "train":
        return gdn_cost.train("chunk_row", of)
    last = of.chunk - 1
    if phase == "closing":
        return gdn_cost.decode_step(last, of)
    steps = (gdn_cost.decode_step(i, of) for i in range(last))
    return sum(steps, gdn_cost.Cost(0, 0, 0)).times(1 / last)
