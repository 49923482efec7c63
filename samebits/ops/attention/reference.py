"""The rounding schedule of `attention` in plain torch, one rounding at a time. Slow.

One query token at position t, one head; bf16 operands widened to fp32 (exact); all steps fp32.
Keys 0 .. t are cut at multiples of PARTITION. In each partition, over its keys j <= t ascending:
1. s_j = scale * dot(q, k_j), `dot` as in `gemm.reference`, scale a fp32 constant;
2. m = max s_j; p_j = exp32(s_j - m);
3. l = lane sum of p_j: lane j % 16 ascending from +0, lanes folded ((0+1)+(2+3))+...;
4. o[d] = fma chain from +0: o = fma(p_j, v_j[d], o), j ascending.
The first partition's (m, l, o) starts the state; each later partition merges, ascending:
5. M = max(m, m'); a = exp32(m - M); b = exp32(m' - M); l = fma(l', b, l * a);
   o[d] = fma(o'[d], b, o[d] * a); m = M.
The output is o / l (fp32 division), rounded once more to bf16.
"""

from __future__ import annotations

import torch

from samebits.ops.attention.cpu import PARTITION
from samebits.ops.gemm.reference import dot
from samebits.ops.reference import fma32
from samebits.ops.scalar import LANES, reference_exp32, reference_narrow
from samebits.plan import ReductionPlan


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One query token q [H, D] over all of its keys k, v [t + 1, G, D], bf16 -> [H, D] fp32."""
    group = q.shape[0] // k.shape[1]
    heads = [
        _head(q[h].float(), k[:, h // group].float(), v[:, h // group].float(), scale)
        for h in range(q.shape[0])
    ]
    return torch.stack(heads)


def token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """`exact`, rounded to bf16."""
    return reference_narrow(exact(q, k, v, scale))


def _head(q, k, v, scale):
    factor = torch.tensor(scale, dtype=torch.float32)
    for start in range(0, k.shape[0], PARTITION):
        keys, values = k[start : start + PARTITION], v[start : start + PARTITION]
        s = factor * dot(q[None], keys)[0]
        top = s.max()
        p = reference_exp32(s - top)
        lanes = torch.zeros(LANES)
        for j in range(len(p)):
            lanes[j % LANES] += p[j]
        total = ReductionPlan.fold(lanes.unbind())
        o = torch.zeros(v.shape[1])
        for j in range(len(p)):
            o = fma32(p[j], values[j], o)
        if start == 0:
            m, weight, acc = top, total, o
            continue
        new = torch.maximum(m, top)
        a, b = reference_exp32(m - new), reference_exp32(top - new)
        m, weight, acc = new, fma32(total, b, weight * a), fma32(o, b, acc * a)
    return acc / weight
