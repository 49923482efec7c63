"""The smallest kernel of the schedule: one warp, one 16 x 16 tile, one MMA at a time, no pipeline.

Its bits are those of `reference_sm90.py` on a sample (a bit gate says so). It is fast enough to
check the tuned kernels at full size, which the reference is not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.plan import ReductionPlan

TILE = 16


@triton.jit
def _kernel(x_ptr, w_ptr, y_ptr, M, N, K, start, stop, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE, TILE), tl.float32)
    for at in tl.range(start, stop, TILE, num_stages=1):
        k = at + tl.arange(0, TILE)
        inside = (k < stop)[None, :]
        x_at = x_ptr + i[:, None].to(tl.int64) * K + k[None, :]
        w_at = w_ptr + j[:, None].to(tl.int64) * K + k[None, :]
        x = tl.load(x_at, mask=(i < M)[:, None] & inside, other=0.0)
        w = tl.load(w_at, mask=(j < N)[:, None] & inside, other=0.0)
        acc = tl.dot(x, w.T, acc)
    y_at = y_ptr + i[:, None].to(tl.int64) * N + j[None, :]
    tl.store(y_at, acc, mask=(i < M)[:, None] & (j < N)[None, :])


def accumulate(x: torch.Tensor, w: torch.Tensor, plan: ReductionPlan) -> torch.Tensor:
    """x [M, K] and w [N, K] bf16 on CUDA -> [M, N] fp32, the unrounded root."""
    gpu.prepare(x.device.index or 0)
    (m, k), n = x.shape, w.shape[0]
    parts = []
    for start, stop in plan.cuts(k):
        y = x.new_empty((m, n), dtype=torch.float32)
        grid = (triton.cdiv(m, TILE), triton.cdiv(n, TILE))
        _kernel[grid](
            x, w, y, m, n, k, start, stop, TILE=TILE, num_warps=1, num_stages=1, **gpu.POLICY
        )
        parts.append(y)
    return plan.fold(parts)
