"""Matrix products against torch's own CPU operators, with fp32 and with bf16 weights."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import linear

from samebits.bench.timing import require_bits, row
from samebits.ops import gemm, samples
from samebits.ops.gemm import reference
from samebits.plan import ReductionPlan

SHAPES = (("qkv", 960, 576), ("gate_up", 3072, 576), ("down", 576, 1536), ("lm_head", 49152, 576))
ROWS = (1, 16, 64, 256)
PLAN = ReductionPlan(8)


def _gate(w: torch.Tensor) -> None:
    """Bits of the shape about to be timed: one row and several, on 64 of its outputs."""
    part = w[:64].contiguous()
    for count in (1, 5):
        x = samples.bf16((count, w.shape[1]), 3, -3, 3)
        require_bits(
            "gemm.lm_head", gemm.lm_head(x, part), reference.accumulate(x, part, ReductionPlan(1))
        )
        require_bits("gemm.row", gemm.row_parallel(x, part, PLAN), reference.matmul(x, part, PLAN))
    alone = gemm.lm_head(samples.bf16((1, w.shape[1]), 3, -3, 3), w)
    batch = samples.bf16((1, w.shape[1]), 3, -3, 3).repeat(70, 1)
    require_bits("gemm in a batch", gemm.lm_head(batch, w)[69:], alone)


def rows() -> list[dict]:
    """SmolLM2's shapes at decode and training sizes; `down` goes through its leaf tree."""
    table = []
    for name, width, length in SHAPES:
        w = samples.bf16((width, length), 1, -3, 3)
        _gate(w)
        wide = w.float()
        for count in ROWS:
            if width * count > 49152 * 64:
                continue
            x = samples.bf16((count, length), 2, -3, 3)
            ours = {
                "down": partial(gemm.row_parallel, x, w, PLAN),
                "lm_head": partial(gemm.lm_head, x, w),
            }.get(name, partial(gemm.linear, x, w))
            work = f"gemm {name} {count} x {length} x {width} bf16"
            repeats = 5 if width * count > 3072 * 256 else 30
            fp32 = row(work, ours, partial(linear, x.float(), wide), "torch fp32", 2.0, repeats)
            bf16 = row(work, ours, partial(linear, x, w), "torch bf16", None, repeats)
            bf16["work"] += ", against bf16"
            table += [fp32, bf16]
    return table
