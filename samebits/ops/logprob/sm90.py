"""Log-probabilities on Hopper: checks, ranks, gradients; the schedule is `sm90` in the README.

No function but `row_digest` reads a value back, so that calls can be captured and none waits for
the GPU. A row without a distribution (NaN, +inf, or -inf only) comes out as NaN, on which every
comparison of this package fails; targets outside of the vocabulary are the engine's to refuse.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from samebits.bits import mixsum
from samebits.ops import gpu, registry, samples
from samebits.ops.checks import require_shape
from samebits.ops.logprob import Shard, require_no_gradient, shard_of, triton, vocabulary
from samebits.ops.logprob.reference_sm90 import NEAR, PIECE
from samebits.plan import ReductionPlan

__all__ = ["log_softmax", "row_digest", "selected"]


def _rows(logits: torch.Tensor) -> torch.Tensor:
    gpu.require_dtype("logits", logits, torch.float32)
    require_shape("logits", logits, logits.dim() == 2 and logits.shape[1] > 0, "[M, V]")
    return logits.contiguous()


def log_softmax(
    logits: torch.Tensor, plan: ReductionPlan, vocab: int | None = None
) -> torch.Tensor:
    """`samebits.ops.logprob.log_softmax` on CUDA, entry for entry the bits of `selected`.

    Refuses with SB0402, SB0420, SB0421, SB0434.
    """
    require_no_gradient(logits)
    logits = _rows(logits)
    vocab = vocabulary(logits, vocab, logits.shape[1])
    roots, _ = triton.roots(logits, plan, vocab)
    registry.count_served("logprob", logits.shape[0])
    return triton.log_probs(logits, roots, vocab)


def _select(
    logits: torch.Tensor, targets: torch.Tensor, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [M] of the targets, and the roots (m, s) [M, 2]."""
    logits = logits.detach()
    if shard.ranks == 1:
        roots, y = triton.roots(logits, shard.plan, shard.width, targets)
        return y, roots
    roots, _ = triton.roots(logits, shard.plan, shard.width)
    at = (targets - shard.start).clamp(0, shard.width - 1)
    mine = torch.cat([roots, logits.gather(1, at[:, None])], dim=1)
    parts = [torch.empty_like(mine) for _ in range(shard.ranks)]
    dist.all_gather(parts, mine, group=shard.group)
    gathered = torch.stack(parts, dim=1)
    roots = triton.fold_ranks(gathered[:, :, :2].contiguous())
    owner = torch.div(targets, shard.width, rounding_mode="floor")
    x = gathered[:, :, 2].gather(1, owner[:, None])
    return triton.log_probs(x, roots, 1)[:, 0], roots


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, shard):
        out, roots = _select(logits, targets, shard)
        ctx.save_for_backward(logits, targets, roots)
        ctx.shard = shard
        return out

    @staticmethod
    def backward(ctx, grad):
        logits, targets, roots = ctx.saved_tensors
        grad = grad.float().contiguous()
        shard = ctx.shard
        found = triton.gradient(logits, roots, targets, grad, shard.start, shard.width)
        return found, None, None


def selected(
    logits: torch.Tensor,
    targets: torch.Tensor,
    plan: ReductionPlan,
    group: dist.ProcessGroup | None = None,
    start: int = 0,
    vocab: int | None = None,
) -> torch.Tensor:
    """`samebits.ops.logprob.selected` on CUDA, without its checks of values.

    Refuses with SB0402, SB0403, SB0420, SB0421, SB0431.
    """
    logits = _rows(logits)
    gpu.require_dtype("targets", targets, torch.int64)
    require_shape("targets", targets, targets.shape == logits.shape[:1], f"[{logits.shape[0]}]")
    shard, _ = shard_of(logits, plan, group, start, vocab)
    targets = targets.contiguous()
    registry.count_served("logprob", logits.shape[0])
    if torch.is_grad_enabled() and logits.requires_grad:
        return _Selected.apply(logits, targets, shard)
    return _select(logits, targets, shard)[0]


def row_digest(logits: torch.Tensor, start: int = 0, vocab: int | None = None) -> list[int]:
    """`samebits.ops.logprob.row_digest` of CUDA tensors: the same digests. Reads them back."""
    logits = _rows(logits.detach())
    stop = logits.shape[1] if vocab is None else min(logits.shape[1], max(0, vocab - start))
    return triton.row_digests(logits, start, stop)


def _probe() -> int:
    plan, vocab = ReductionPlan(8), 8 * 300
    logits = samples.fp32((5, vocab + 3), 6, -4, 5)
    logits[1, :700] = -torch.inf
    logits = logits.cuda()
    targets = torch.full((5,), 7, dtype=torch.int64, device=logits.device)
    roots, chosen = triton.roots(logits, plan, vocab, targets)
    whole = triton.log_probs(logits, roots, vocab)
    return mixsum(torch.cat([whole.flatten(), chosen]))


registry.register(
    registry.Implementation(
        region="logprob",
        id="logprob.sm90.1",
        platform="sm90",
        constants={"piece": PIECE, "near": NEAR, "leaves": "plan"},
        modules=(
            "samebits.plan",
            "samebits.ops.gpu",
            "samebits.ops.device",
            "samebits.ops.logprob",
            "samebits.ops.logprob.reference_sm90",
            "samebits.ops.logprob.triton",
            "samebits.ops.logprob.sm90",
            "samebits.ops.head",
        ),
        probe=_probe,
    )
)
