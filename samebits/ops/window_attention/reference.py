"""The rounding schedule of `window_attention` in plain torch, one rounding at a time. Slow.

One query token at position t, one head, a window of W keys; bf16 operands widened to fp32 (exact);
all steps fp32. The token sees keys first .. t, first = max(0, t - W + 1). They are cut at multiples
of PARTITION of the absolute position, as in `attention.reference`; partitions without a key that is
seen are left out. In each of the others, over its keys first <= j <= t ascending:
1. s_j = scale * dot(q, k_j), `dot` as in `gemm.reference`, scale a fp32 constant;
2. m = max s_j; p_j = exp32(s_j - m);
3. l = lane sum of p_j: lane j % 16, j the absolute position, ascending from +0, lanes folded
   ((0+1)+(2+3))+...;
4. o[d] = fma chain from +0: o = fma(p_j, v_j[d], o), j ascending.
The first of these partitions starts the state (m, l, o); each later one merges, ascending:
5. M = max(m, m'); a = exp32(m - M); b = exp32(m' - M); l = fma(l', b, l * a);
   o[d] = fma(o'[d], b, o[d] * a); m = M.
The output is o / l (fp32 division), rounded once more to bf16.

Where W > t, first is 0 and every step is one of `attention.reference`: the same bits.
"""

from __future__ import annotations

import functools

import torch

from samebits.ops.attention.cpu import PARTITION
from samebits.ops.gemm.reference import dot
from samebits.ops.reference import fma32
from samebits.ops.scalar import LANES, reference_exp32, reference_narrow
from samebits.plan import ReductionPlan

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """One query token q [H, D] after keys k, v [t + 1, G, D], bf16 -> [H, D] fp32."""
    group = q.shape[0] // k.shape[1]
    heads = [
        _head(q[h].float(), k[:, h // group].float(), v[:, h // group].float(), scale, window)
        for h in range(q.shape[0])
    ]
    return torch.stack(heads)


def token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """`exact`, rounded to bf16."""
    return reference_narrow(exact(q, k, v, scale, window))


def _head(q, k, v, scale, window):
    factor = torch.tensor(scale, dtype=torch.float32)
    first = max(0, k.shape[0] - window)
    states = []
    for start in range(first // PARTITION * PARTITION, k.shape[0], PARTITION):
        seen = slice(max(start, first), start + PARTITION)
        states.append(_partition(factor * dot(q[None], k[seen])[0], v[seen], seen.start))
    _, total, o = functools.reduce(_merged, states)
    return o / total


def _partition(s: torch.Tensor, values: torch.Tensor, first: int) -> State:
    """Steps 2 to 4 for the scores of keys `first` .. of one partition."""
    top = s.max()
    p = reference_exp32(s - top)
    lanes = torch.zeros(LANES)
    o = torch.zeros(values.shape[1])
    for i, weight in enumerate(p):
        lanes[(first + i) % LANES] += weight
        o = fma32(weight, values[i], o)
    return top, ReductionPlan.fold(lanes.unbind()), o


def _merged(state: State, part: State) -> State:
    """Step 5."""
    (m, total, o), (top, weight, more) = state, part
    new = torch.maximum(m, top)
    a, b = reference_exp32(m - new), reference_exp32(top - new)
    return new, fma32(weight, b, total * a), fma32(more, b, o * a)
