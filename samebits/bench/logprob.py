"""Log-probabilities against torch's log_softmax, fp32, on this machine's threads."""

from __future__ import annotations

from functools import partial

import torch

from samebits.bench.timing import require_bits, row
from samebits.ops import logprob, samples
from samebits.ops.logprob import reference
from samebits.plan import ReductionPlan

VOCAB = 49152  # SmolLM2's


def _native(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, dim=-1).gather(1, targets[:, None])


def rows() -> list[dict]:
    """Whole rows as a sampler needs them, one token per row as a trainer does, and digests."""
    plan, table = ReductionPlan(8), []
    gate = samples.fp32((2, 1024), 1, -3, 4)
    require_bits(
        "logprob", logprob.log_softmax(gate, plan), reference.log_softmax(gate, plan, 1024)
    )
    for count in (1, 16, 256):
        x, targets = samples.fp32((count, VOCAB), 1, -3, 4), torch.arange(count)
        repeats = 30 if count < 256 else 5
        table.append(
            row(
                f"log_softmax {count}x{VOCAB} fp32",
                partial(logprob.log_softmax, x, plan),
                partial(torch.log_softmax, x, dim=-1),
                "torch.log_softmax",
                repeats=repeats,
            )
        )
        table.append(
            row(
                f"selected {count}x{VOCAB} fp32",
                partial(logprob.selected, x, targets, plan),
                partial(_native, x, targets),
                "torch.log_softmax and gather",
                repeats=repeats,
            )
        )
        table.append(
            row(
                f"row_digest {count}x{VOCAB} fp32",
                partial(logprob.row_digest, x),
                partial(torch.log_softmax, x, dim=-1),
                "torch.log_softmax (for scale)",
                repeats=repeats,
            )
        )
    return table
