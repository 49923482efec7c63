"""Gradients of `varlen`: autograd of the fp32 chunk form, recomputed. No bit promise.

Rows are gathered into chunks of all sequences, padded with zero rows (beta = 0 changes no state).
Sequences are taken longest first, so that those with a c-th chunk are always a prefix: one batch
of matrix products per c, whatever the number of sequences.
"""

from __future__ import annotations

import numpy as np
import torch

from samebits.ops.gdn.cpu import CHUNK


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    starts: np.ndarray,
    scale: float,
    grad: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients into q, k, v, g, beta (and initial_state, else None), in each operand's dtype."""
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v, g, beta)]
    if initial_state is not None:
        leaves.append(initial_state.detach().clone().requires_grad_())
    with torch.enable_grad():
        out = _forward(*leaves, starts=starts, scale=scale)
        found = torch.autograd.grad(out, leaves, grad.float(), materialize_grads=True)
    cast = [d.to(x.dtype) for d, x in zip(found, (q, k, v, g, beta), strict=False)]
    return *cast, found[5] if initial_state is not None else None


def _layout(starts: np.ndarray) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Row of the operands behind each chunk row (the row past the end where there is none), the
    number of sequences that have a c-th chunk, and the sequences, longest first."""
    lengths = np.diff(starts)
    order = np.argsort(-lengths, kind="stable")
    chunks = -(-lengths[order] // CHUNK)
    counts = [int((chunks > c).sum()) for c in range(int(chunks.max(initial=0)))]
    index = []
    for c, count in enumerate(counts):
        at = starts[order[:count], None] + c * CHUNK + np.arange(CHUNK)
        index.append(np.where(at < starts[order[:count] + 1, None], at, starts[-1]))
    rows = np.concatenate(index) if index else np.zeros((0, CHUNK), np.int64)
    return torch.from_numpy(rows), counts, torch.from_numpy(order)


def _forward(q, k, v, g, beta, h=None, *, starts, scale) -> torch.Tensor:
    """o [T, HV, V] fp32 by the chunk form, differentiable."""
    rows, counts, order = _layout(starts)
    tokens, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[1:]
    group = heads // key_heads

    def chunked(x: torch.Tensor) -> torch.Tensor:  # [T, H, ...] -> [chunks, H, CHUNK, ...]
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded[rows].transpose(1, 2)

    q, k, v, g, beta = (chunked(x) for x in (q, k, v, g, beta))
    kk, qk = k @ k.mT, q @ k.mT
    q, k, kk, qk = (x.repeat_interleave(group, 1) for x in (q, k, kk, qk))
    gamma = g.cumsum(-1)
    ones = torch.ones(CHUNK, CHUNK, dtype=torch.bool)
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    decay = (gamma[..., :, None] - gamma[..., None, :]).masked_fill(ones.triu(1), -torch.inf).exp()
    lower = (beta[..., None] * kk * decay).masked_fill(ones.triu(), 0.0)
    system = lower + torch.eye(CHUNK)
    reach = gamma.exp()[..., None]
    rest = (gamma[..., -1:] - gamma).exp()[..., None]
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat([beta[..., None] * v, beta[..., None] * reach * k], -1),
        upper=False,
        unitriangular=True,
    )
    own, seen = solved.split((value_dim, key_dim), -1)  # u = own - seen h
    scores = scale * qk * decay
    from_state = scale * reach * q
    to_state = (k * rest).mT
    fade = gamma[..., -1].exp()[..., None, None]
    if h is None:
        h = k.new_zeros(len(order), heads, key_dim, value_dim)
    h = h[order]
    outs, first = [], 0
    for count in counts:
        span = slice(first, first + count)
        h = h[:count]
        u = own[span] - seen[span] @ h
        outs.append(from_state[span] @ h + scores[span] @ u)
        h = fade[span] * h + to_state[span] @ u
        first += count
    out = torch.cat(outs) if outs else v
    flat = out.transpose(1, 2).reshape(-1, heads, value_dim)
    inside = rows.reshape(-1) < tokens
    where = torch.argsort(rows.reshape(-1)[inside])
    return flat[inside][where]
