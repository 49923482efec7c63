"""Digests of what a region was given: equal on both sides, or the difference is further up."""

from __future__ import annotations

from typing import Any

import numpy as np

from samebits import bits

_ROWS = 4096  # rows of a weight that are digested at one time


def rows_of(x: Any, tokens: int) -> np.ndarray:
    """Bit patterns [tokens, features] of a tensor that has `tokens` rows."""
    return bits.int_view(x).reshape(tokens, -1)


def of_rows(rows: np.ndarray, column: int = 0) -> np.ndarray:
    """uint64 [n]: digest of each row of an integer view [n, F], whose columns are counted from
    `column`. Digests of parts of a row add up to that of the row."""
    with np.errstate(over="ignore"):
        places = np.arange(column + 1, column + rows.shape[1] + 1, dtype=np.uint64)
        seed = bits.splitmix64(places * bits.GOLDEN)
        return bits.splitmix64(seed ^ rows.astype(np.uint64)).sum(axis=1, dtype=np.uint64)


def of_weight(weight: Any, column: int = 0, *, by_value: bool = False) -> int:
    """Digest that does not depend on the order of the rows of a weight, columns as in `of_rows`.

    by_value   every value is a row of its own
    """
    view = bits.int_view(weight)
    view = view.reshape(-1, 1 if by_value else view.shape[-1])
    parts = (
        of_rows(view[i : i + _ROWS], column).sum(dtype=np.uint64)
        for i in range(0, len(view), _ROWS)
    )
    return int(np.array(list(parts), np.uint64).sum(dtype=np.uint64))
