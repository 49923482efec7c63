"""The plain recurrence in float64: the mathematics that both schedules approximate."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def recurrence(
    operands: Sequence[torch.Tensor],
    starts: Sequence[int],
    scale: float,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [T, HV, V] and final states [R, HV, K, V], float64.

    operands are q, k, v, g, beta of any dtype, else as `varlen`'s arguments. Differentiable by
    autograd, token by token: slow, for tests and error tables only.
    """
    q, k, v, g, beta = (x.double() for x in operands)
    group = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    rows, finals = [], []
    for r in range(len(starts) - 1):
        if initial_state is None:
            s = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        else:
            s = initial_state[r].double()
        for t in range(starts[r], starts[r + 1]):
            s = g[t].exp()[:, None, None] * s
            delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
            s = s + k[t][:, :, None] * delta[:, None, :]
            rows.append(scale * torch.einsum("hkv,hk->hv", s, q[t]))
        finals.append(s)
    return torch.stack(rows) if rows else torch.zeros_like(v), torch.stack(finals)
