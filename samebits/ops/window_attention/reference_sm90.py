"""The schedule of `window_attention` on Hopper in plain torch, one rounding at a time; the law.

Steps 1 to 6 of `attention.reference_sm90`, in which a row at position t sees keys first .. t,
first = max(0, t - W + 1), in place of 0 .. t: tiles and partitions are cut by absolute position,
and a key that the row does not see has p = +0, on either side of what it sees.

Where W > t the row's steps are those of `attention.reference_sm90`: the same bits. Tiles and whole
partitions before `first` may be computed or left out, which changes no bit. Such a tile leaves
m = -inf, w = +0 and o = +0 as they are, which is what a partition starts with: a = ex2(-inf) = +0,
w = fma(+0, +0, +0), and zero terms are no part of an MMA's sum. Such a partition leaves M = -inf,
W = +0 and O = +0 as they are, which is what the merge starts from. This needs finite values.
"""

from __future__ import annotations

import torch

from samebits.ops.attention.cpu import PARTITION
from samebits.ops.attention.reference_sm90 import State, _finite, _tile
from samebits.ops.attention.triton import TILE, ex2, factor
from samebits.ops.reference import fma32


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Rows q [rows, D] of one head at `position` [rows], k and v [keys, D], bf16 -> [rows, D] fp32.

    Not yet rounded to bf16. Keys and values are finite.
    """
    c, rows = factor(scale), q.shape[0]
    pad = -k.shape[0] % TILE
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (k, v))
    low, zero = q.new_full((rows,), -torch.inf, dtype=torch.float32), q.new_zeros(rows).float()
    state: State = (low, zero, torch.zeros(q.shape, device=q.device))
    empty = state
    first = position - window + 1
    begin = max(0, int(first.min())) // PARTITION * PARTITION
    for start in range(begin, int(position.max()) + 1, PARTITION):
        part = empty
        for at in range(start, min(start + PARTITION, k.shape[0]), TILE):
            keys = torch.arange(at, at + TILE, device=q.device)
            seen = (keys[None] <= position[:, None]) & (keys[None] >= first[:, None])
            part = _tile(part, q, k[at : at + TILE], v[at : at + TILE], seen, c)
        state = _merged(state, part, c)
    _, total, out = state
    return out / total[:, None] + 0.0


def _merged(state: State, part: State, c: float) -> State:
    """Step 6: one partition's result into the rows'."""
    (top, total, out), (m, weight, o) = state, part
    new = torch.maximum(top, m)
    base = _finite(new)
    a, b = ex2((top - base) * c), ex2((m - base) * c)
    return new, fma32(weight, b, total * a), fma32(o, b[:, None], out * a[:, None])
