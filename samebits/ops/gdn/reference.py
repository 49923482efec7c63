"""The core of the gated delta rule, one rounding at a time in plain torch, whole chunks at once.

Shapes: heads first, then rows of one chunk (up to CHUNK), fp32 throughout; `bf16` rounds to bf16
and widens again. A matrix product here is `chain`: every element an fma chain of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samebits.ops.gdn.cpu import BLOCK, CHUNK, LOG2_E, OUTPUTS
from samebits.ops.gdn_scalar import reference_exp2_32 as exp2
from samebits.ops.reference import fma32
from samebits.ops.scalar import reference_narrow


def bf16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to bf16, held in fp32."""
    return reference_narrow(x).float()


def chain(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
    """[..., n, d] = start (else +0) + a [..., n, m] b [..., m, d], m ascending by fp32 fma."""
    out = torch.zeros(*a.shape[:-1], b.shape[-1]) if start is None else start
    for j in range(a.shape[-1]):
        out = fma32(a[..., :, j : j + 1], b[..., j : j + 1, :], out)
    return out


def log_decays(g: torch.Tensor) -> torch.Tensor:
    """gamma [H, rows]: running sum of g log2(e) from the chunk's first row."""
    steps = g * torch.tensor(float(LOG2_E))
    rows = [steps[:, 0]]
    for i in range(1, g.shape[1]):
        rows.append(rows[-1] + steps[:, i])
    return torch.stack(rows, 1)


def inverse(lower: torch.Tensor) -> torch.Tensor:
    """X = (I + L)^-1 [H, rows, rows] for strictly lower L, by blocks of rows.

    Rows of earlier blocks are read rounded to bf16 (as T), those of the same block in fp32.
    """
    heads, rows, _ = lower.shape
    inverted = torch.zeros(heads, rows, rows)
    for first in range(0, rows, BLOCK):
        last = min(first + BLOCK, rows)
        earlier = chain(bf16(lower[:, first:last, :first]), bf16(inverted[:, :first]))
        x = torch.eye(rows)[first:last] - earlier
        for i in range(first, last):
            for j in range(first, i):
                x[:, i - first] = fma32(-lower[:, i, j, None], x[:, j - first], x[:, i - first])
        inverted[:, first:last] = x
    return inverted


@dataclass(frozen=True)
class Rows:
    """What the rows of one chunk share: all [H, rows, ...]."""

    gamma: torch.Tensor
    decay: torch.Tensor  # exp2(gamma_i - gamma_j), 0 above the diagonal
    snapshot: torch.Tensor  # the boundary state as it is consumed, [H, K, V]
    x: torch.Tensor  # (I + L)^-1 in fp32; T is its rounding to bf16
    u: torch.Tensor


def chunk_rows(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, h: torch.Tensor
) -> Rows:
    """Rows of one chunk from its boundary state h [K, V]: gamma, T, R, u and what they need."""
    gamma = log_decays(g)
    decay = exp2(gamma[:, :, None] - gamma[:, None, :]).tril()
    lower = (beta[..., None] * (chain(k, k.mT) * decay)).tril(-1)
    snapshot = bf16(h)
    seen = exp2(gamma)[..., None] * chain(k, snapshot)
    r = bf16(beta[..., None] * (v - seen))
    x = inverse(lower)
    u = bf16(chain(bf16(x), r))
    return Rows(gamma, decay, snapshot, x, u)


def close(k: torch.Tensor, rows: Rows, h: torch.Tensor) -> torch.Tensor:
    """The fp32 state at the next boundary, chained from the fp32 state at this one."""
    last = rows.gamma[:, -1:]
    weighted = bf16(rows.u * exp2(last - rows.gamma)[..., None])
    return chain(k.mT, weighted, h * exp2(last)[..., None])


def chunk_row_outputs(
    q: torch.Tensor, k: torch.Tensor, rows: Rows, scale: torch.Tensor
) -> torch.Tensor:
    """Outputs [T, V] of a chunk by schedule chunk_row; not rounded to bf16."""
    exact = chain(q, k.mT) * rows.decay
    scores = bf16(exact)
    rest = bf16(exact - scores)
    carried = chain(rest, rows.u, exp2(rows.gamma)[..., None] * chain(q, rows.snapshot))
    return scale * chain(scores, rows.u, carried)


def cpr_outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    h: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Outputs [T, V] of a chunk by the recurrence of schedule cpr, restarted at its boundary."""
    s = h
    rows = []
    for i in range(k.shape[1]):
        s = s * exp2(g[:, i] * torch.tensor(float(LOG2_E)))[:, None, None]
        key, value = k[:, i, :, None], v[:, i, None]
        read = chain(key.mT, s)
        delta = beta[:, i, None, None] * (value - read)
        s = fma32(key, delta, s)
        rows.append(bf16(scale * chain(q[:, i, None], s)))
    return torch.cat(rows, 1)


def sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    schedule: str,
    h: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [T, HV, V] of one sequence from phase 0, and h [HV, K, V] at its last boundary.

    o is fp32 by chunk_row, bf16 by cpr. Operands as in `gdn.varlen`, T > 0; h fp32 [HV, K, V] is
    the state before the first row (zero if none).
    """
    tokens, heads = v.shape[:2]
    group = heads // k.shape[1]
    q, k = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (q, k))
    v = v.float().transpose(0, 1)
    g, beta = g.T, beta.T
    h = torch.zeros(heads, k.shape[2], v.shape[2]) if h is None else h
    factor = torch.tensor(scale, dtype=torch.float32)
    chunks = [[x[:, a : a + CHUNK] for x in (q, k, v, g, beta)] for a in range(0, tokens, CHUNK)]
    outs, boundaries = [], []
    for qs, ks, vs, gs, betas in chunks:
        boundaries.append(h)
        rows = chunk_rows(ks, vs, gs, betas, h)
        if schedule == "chunk_row":
            outs.append(chunk_row_outputs(qs, ks, rows, factor))
        if ks.shape[1] == CHUNK:
            h = close(ks, rows, h)
    if schedule == "cpr":  # the second pass: all chunks side by side, each from its boundary state
        padded = [_pad_rows(x, CHUNK) for x in chunks[-1]]
        qs, ks, vs, gs, betas = (torch.cat(x) for x in zip(*chunks[:-1], padded, strict=True))
        o = cpr_outputs(qs, ks, vs, gs, betas, torch.cat(boundaries), factor)
        outs = list(o.split(heads))
    o = torch.cat(outs, 1)[:, :tokens]
    return o.transpose(0, 1).to(OUTPUTS[schedule]).contiguous(), h


def _pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(x.shape[0], rows - x.shape[1], *x.shape[2:])], 1)
