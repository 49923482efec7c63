"""The first region in which the calls of two sides differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from samebits.trace.columns import CONSTANT, widened
from samebits.trace.read import Call


@dataclass(frozen=True)
class RegionDifference:
    """Where two traces part. `element` is (position, feature), features in the rollout's order on
    one rank; counts are of the compared rows.

    operands   name -> digest that both sides hold for that position, or the two that differ; of
               constants (eps, scale, leaves of a plan) only those that differ, as numbers
    """

    layer: int | None
    region: str
    element: tuple[int, int]
    left: str
    right: str
    differing: int
    elements: int
    operands: dict[str, str]


def first_difference(
    left: Sequence[Call], right: Sequence[Call], rows: int | None = None
) -> RegionDifference | None:
    """First call whose outputs differ at a position below `rows` that both sides hold, or None.

    A position of which a side has several rows is equal when all of them are.
    ValueError when the calls of the two sides do not correspond, or no position is shared.
    """
    compared = 0
    for index, (a, b) in enumerate(itertools.zip_longest(left, right)):
        if a is None or b is None or (a.layer, a.region) != (b.layer, b.region):
            raise ValueError(f"call {index} is {_name(a)} on one side and {_name(b)} on the other")
        if a.output.shape[1:] != b.output.shape[1:]:
            raise ValueError(f"{_name(a)} has outputs {a.output.shape} and {b.output.shape}")
        ours, theirs = _pairs(a, b, rows)
        compared += len(ours)
        values, others = widened([a.output[ours], b.output[theirs]])
        wrong = np.argwhere(values != others)
        if len(wrong):
            at = np.lexsort((wrong[:, 1], wrong[:, 0], a.positions[ours][wrong[:, 0]]))[0]
            row, column = (int(i) for i in wrong[at])
            return _difference(a, b, int(ours[row]), int(theirs[row]), column, wrong, len(ours))
    if not compared and any(len(call.positions) for call in left):
        raise ValueError("the two sides hold no position in common")
    return None


def _pairs(a: Call, b: Call, rows: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Rows to compare: every row of a side with the other side's first of its position."""
    ours, theirs = _with_first(a.positions, b.positions)
    back, forth = _with_first(b.positions, a.positions)
    pairs = np.unique(np.stack([np.r_[ours, forth], np.r_[theirs, back]]), axis=1)
    keep = np.ones(pairs.shape[1], bool) if rows is None else a.positions[pairs[0]] < rows
    return pairs[0][keep], pairs[1][keep]


def _with_first(positions: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    known, first = np.unique(others, return_index=True)
    mine = np.flatnonzero(np.isin(positions, known))
    return mine, first[np.searchsorted(known, positions[mine])]


def _difference(
    a: Call, b: Call, left: int, right: int, column: int, wrong: np.ndarray, rows: int
) -> RegionDifference:
    return RegionDifference(
        layer=a.layer,
        region=a.region,
        element=(int(a.positions[left]), column),
        left=_pattern(a.output[left, column]),
        right=_pattern(b.output[right, column]),
        differing=len(wrong),
        elements=rows * a.output.shape[1],
        operands=_operands(a, b, left, right),
    )


def _pattern(value: np.unsignedinteger) -> str:
    return f"{int(value):0{value.dtype.itemsize * 2}x}"


def _name(call: Call | None) -> str:
    if call is None:
        return "missing"
    return call.region if call.layer is None else f"{call.region} of layer {call.layer}"


def _operands(a: Call, b: Call, left: int, right: int) -> dict[str, str]:
    """Digests of the operands that both sides have as one, and constants that differ."""
    found = {}
    for name in a.operands.keys() & b.operands.keys():
        values = [
            side.operands[name][0 if name == "weight" else row]
            for side, row in ((a, left), (b, right))
        ]
        constant = name.startswith(CONSTANT)
        one, other = (
            repr(float(value.view(np.float64))) if constant else f"{int(value):016x}"
            for value in values
        )
        if one != other:
            found[name.removeprefix(CONSTANT)] = f"{one} left, {other} right"
        elif not constant:
            found[name] = one
    return dict(sorted(found.items()))
