"""Plots as PNG bytes, drawn with matplotlib's file backend (no display, no network)."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
import itertools

import matplotlib.pyplot as plt

ALIGNED, STOCK = "#1b6e53", "#b3412c"
# Zero has no place on a logarithmic axis; exact zeros are drawn on this floor and labelled.
FLOOR = 1e-9


def _uri(figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def difference_per_step(aligned: Sequence[float], stock: Sequence[float]) -> str:
    """Largest |dlogp| of every RL step, aligned against stock, as a data URI."""
    figure, axis = plt.subplots(figsize=(7, 3))
    for values, colour, name, marker in (
        (stock, STOCK, "stock", "o"),
        (aligned, ALIGNED, "aligned", "s"),
    ):
        steps = range(1, len(values) + 1)
        axis.semilogy(
            steps, [max(v, FLOOR) for v in values], marker=marker, color=colour, label=name
        )
    axis.set_yticks([FLOOR, 1e-6, 1e-4, 1e-2, 1], ["exactly 0", "1e-6", "1e-4", "1e-2", "1"])
    axis.set_ylim(FLOOR / 3, 3)
    axis.set_xticks(range(1, max(len(aligned), len(stock), 1) + 1))
    axis.set_xlabel("step")
    axis.set_ylabel("max |dlogp| (nats)")
    axis.legend(frameon=False)
    axis.grid(alpha=0.25)
    return _uri(figure)


def difference_histogram(differences: dict[str, Sequence[float]]) -> str:
    """Share of tokens by |dlogp| in decades, one series per arm; the first bar is equality."""
    edges = [0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, float("inf")]
    names = (
        ["0 (same bits)"]
        + [f"< {e:g}" if e == 1 else f"< 1e{round(math.log10(e))}" for e in edges[1:-1]]
        + [">= 1"]
    )
    figure, axis = plt.subplots(figsize=(7, 3))
    width = 0.8 / max(1, len(differences))
    for i, (arm, values) in enumerate(differences.items()):
        counts = [sum(v == 0.0 for v in values)]
        spans = list(itertools.pairwise(edges))
        counts += [sum(v > 0 and lo <= v < hi for v in values) for lo, hi in spans]
        share = [100.0 * c / max(1, len(values)) for c in counts]
        where = [x + (i - (len(differences) - 1) / 2) * width for x in range(len(names))]
        axis.bar(where, share, width, label=arm, color=ALIGNED if arm == "aligned" else STOCK)
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axis.set_ylabel("tokens (%)")
    axis.set_xlabel("|dlogp| rollout - trainer (nats)")
    axis.legend(frameon=False)
    return _uri(figure)


def reward_curve(aligned: Sequence[float], stock: Sequence[float]) -> str:
    """Mean reward of every RL step, as a data URI."""
    figure, axis = plt.subplots(figsize=(7, 2.6))
    axis.plot(range(1, len(stock) + 1), stock, marker="o", color=STOCK, label="stock")
    axis.plot(range(1, len(aligned) + 1), aligned, marker="s", color=ALIGNED, label="aligned")
    axis.set_xlabel("step")
    axis.set_ylabel("mean reward")
    axis.set_xticks(range(1, max(len(aligned), len(stock), 1) + 1))
    axis.legend(frameon=False)
    axis.grid(alpha=0.25)
    return _uri(figure)
