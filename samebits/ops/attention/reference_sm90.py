"""The schedule of `attention` on Hopper in plain torch, one rounding at a time. Slow; the law.

One query token at position t, one head; c = fl32(scale * log2(e)). Keys 0 .. t are cut at
multiples of PARTITION, a partition into tiles of TILE keys, both by absolute position. A partition
starts with m = -inf, w = +0, o[d] = +0. For each tile, ascending, over its keys j <= t:
1. s_j = dot(q, k_j), fp32: the chain of 16-term MMAs of `gemm.reference_sm90` over d;
2. m' = max(m, max s_j); a = ex2((m - m') c), the difference and the product rounded each;
3. p_j = ex2(fma(s_j, c, -(m' c))), the inner product rounded first;
4. w = fma(w, a, sum of the TILE p_j, +0 beyond t): neighbours added, then halves;
5. o[d] = o[d] a, rounded; then the MMA chain over 16 keys at a time, ascending, adds bf16(p_j)
   times v_j[d].
Where m' is -inf, steps 2 and 3 use 0 in its place. The partitions' (m, w, o) are merged ascending,
from M = -inf, W = +0, O[d] = +0:
6. M' = max(M, m); a = ex2((M - M') c), b = ex2((m - M') c); W = fma(w, b, W a);
   O[d] = fma(o[d], b, O[d] a).
The output is O / W (IEEE division) plus +0, so that no -0 comes out, rounded once to bf16.

A key with p = +0 and a finite v changes no value (zero terms are not part of an MMA's sum) and no
maximum, only perhaps the sign of a zero, which the last step takes away: so tiles beyond t may be
computed or left out. `ex2` is the chip's `ex2.approx.ftz.f32`, 2**x with subnormal results +0. Its
roundings are undocumented; the law calls the instruction, one element at a time.
"""

from __future__ import annotations

import torch

from samebits.ops.attention.cpu import PARTITION
from samebits.ops.attention.triton import TILE, ex2, factor
from samebits.ops.gemm.reference_sm90 import STEP, leaf, step
from samebits.ops.reference import fma32

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _fold(p: torch.Tensor) -> torch.Tensor:
    """[rows, TILE] -> [rows]: neighbours, then halves."""
    p = p[:, 0::2] + p[:, 1::2]
    while p.shape[1] > 1:
        half = p.shape[1] // 2
        p = p[:, :half] + p[:, half:]
    return p[:, 0]


def _finite(m: torch.Tensor) -> torch.Tensor:
    return torch.where(m == -torch.inf, 0.0, m)


def _tile(
    state: State, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, c: float
) -> State:
    """One tile: k and v [TILE, D], seen [rows, TILE] says which keys a row may see."""
    m, total, o = state
    s = torch.where(seen, leaf(q, k), -torch.inf)
    new = torch.maximum(m, s.amax(1))
    base = _finite(new)
    a = ex2((m - base) * c)
    p = ex2(fma32(s, torch.tensor(c, device=s.device), -(base * c)[:, None]))
    o = o * a[:, None]
    weight, values = p.bfloat16(), v.T.contiguous()
    for j in range(0, TILE, STEP):
        o = step(weight[:, j : j + STEP], values[:, j : j + STEP], o)
    return new, fma32(total, a, _fold(p)), o


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor, scale: float
) -> torch.Tensor:
    """Rows q [rows, D] of one head at `position` [rows], k and v [keys, D], bf16 -> [rows, D] fp32.

    Not yet rounded to bf16. Keys and values are finite.
    """
    c = factor(scale)
    rows = q.shape[0]
    pad = -k.shape[0] % TILE
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (k, v))
    low, zero = q.new_full((rows,), -torch.inf, dtype=torch.float32), q.new_zeros(rows).float()
    empty = torch.zeros(q.shape, device=q.device)
    top, total, out = low, zero, empty
    for start in range(0, int(position.max()) + 1, PARTITION):
        state: State = (low, zero, empty)
        for first in range(start, min(start + PARTITION, k.shape[0]), TILE):
            keys = torch.arange(first, first + TILE, device=q.device)
            seen = keys[None] <= position[:, None]
            state = _tile(state, q, k[first : first + TILE], v[first : first + TILE], seen, c)
        m, weight, o = state
        new = torch.maximum(top, m)
        base = _finite(new)
        a, b = ex2((top - base) * c), ex2((m - base) * c)
        total = fma32(weight, b, total * a)
        out = fma32(o, b[:, None], out * a[:, None])
        top = new
    return out / total[:, None] + 0.0
