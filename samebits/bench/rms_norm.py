"""RMSNorm against torch's own, bf16, on this machine's threads."""

from __future__ import annotations

from functools import partial

import torch

from samebits.bench.timing import require_bits, row
from samebits.ops import samples
from samebits.ops.rms_norm import reference, rms_norm


def rows() -> list[dict]:
    """Decode, small and large batches of SmolLM2's hidden size, and per-head q/k norm."""
    table = []
    for shape in ((1, 576), (16, 576), (1024, 576), (1024, 9, 64)):
        n = shape[-1]
        x, w = samples.bf16(shape, 1, -3, 3), samples.bf16((n,), 2, -1, 1)
        require_bits("rms_norm", rms_norm(x[:4], w, 1e-5), reference.rms_norm(x[:4], w, 1e-5))
        table.append(
            row(
                f"rms_norm {'x'.join(map(str, shape))} bf16",
                partial(rms_norm, x, w, 1e-5),
                partial(torch.nn.functional.rms_norm, x, (n,), w, 1e-5),
                "torch.nn.functional.rms_norm",
            )
        )
    return table
