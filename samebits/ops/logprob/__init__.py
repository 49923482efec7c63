"""Log-probabilities of tokens: one function for the sampler, prompt log-probs and the trainer.

Schedule of a row, every step one fp32 rounding unless it says fma. The true vocabulary is cut into
the plan's leaves. A leaf gives (m, s): m is its largest logit (exact); s is the sum of
exp32(x - m) over 16 lanes (entry i of the leaf to lane i % 16, ascending, from +0), folded
((0+1)+(2+3))+...; a leaf of -inf only gives s = 0. Leaves merge by the plan's fold, lower index
left: m = max(m1, m2); s = fma(s1, exp32(m1 - m), s2 * exp32(m2 - m)). At the root
logp(t) = (x_t - m) - log32(s). A row sees only itself, and a rank owns whole leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from samebits.bits import mixsum
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.checks import place, require_dtype, require_ids, require_shape, require_shard
from samebits.ops.logprob import cpu
from samebits.ops.scalar import LANES
from samebits.plan import ReductionPlan

__all__ = ["log_softmax", "row_digest", "scale", "selected"]


def _rows(logits: torch.Tensor) -> torch.Tensor:
    require_dtype("logits", logits, torch.float32)
    require_shape("logits", logits, logits.dim() == 2 and logits.shape[1] > 0, "[M, V]")
    return logits.contiguous()


def vocabulary(logits: torch.Tensor, vocab: int | None, columns: int) -> int:
    """`vocab`, by default all `columns` of all ranks; SB0421 where it has more."""
    size = columns if vocab is None else vocab
    require_shape("logits", logits, 0 < size <= columns, f"at least {size} columns over all ranks")
    return size


def require_no_gradient(logits: torch.Tensor) -> None:
    """Refuses, with SB0434, logits whose whole rows would need a gradient."""
    if torch.is_grad_enabled() and logits.requires_grad:
        raise Refused(
            "SB0434",
            seen="log_softmax of logits that require a gradient",
            required="torch.no_grad, or logprob.selected",
            hint="samebits explain SB0434",
        )


def _require_distribution(roots: torch.Tensor) -> None:
    row = cpu.first_bad(roots)
    if row >= 0:
        m, total = roots[row].tolist()
        raise Refused(
            "SB0430",
            seen=f"row {row} of the logits has largest entry {m} and sum {total}",
            required="finite logits or -inf, at least one finite, in every row",
            hint="samebits explain SB0430",
        )


def log_softmax(
    logits: torch.Tensor, plan: ReductionPlan, vocab: int | None = None
) -> torch.Tensor:
    """logits fp32 [M, V] -> log-probabilities fp32 [M, V], by the schedule of this module.

    `vocab` is the true vocabulary; padded columns beyond it are not read and come out as -inf.
    Entry for entry the bits of `selected`. Not differentiable (refuses a tensor that asks for a
    gradient while gradients are on, SB0434). Refuses other dtypes (SB0420), shapes (SB0421), a
    vocabulary that the plan cannot cut (SB0402), and rows without a distribution (SB0430). CUDA
    tensors: `sm90.log_softmax`.
    """
    if logits.is_cuda:
        from samebits.ops.logprob import sm90

        return sm90.log_softmax(logits, plan, vocab)
    require_no_gradient(logits)
    logits = _rows(logits)
    vocab = vocabulary(logits, vocab, logits.shape[1])
    registry.count_served("logprob", logits.shape[0])
    roots = cpu.fold(cpu.leaves(logits, plan.cuts(vocab)))
    _require_distribution(roots)
    return cpu.log_probs(logits, roots, vocab)


@dataclass(frozen=True)
class Shard:
    """What one rank holds: its subtree, first vocabulary column, true columns, and its group."""

    plan: ReductionPlan
    start: int
    width: int
    ranks: int
    group: dist.ProcessGroup | None


def shard_of(
    logits: torch.Tensor,
    plan: ReductionPlan,
    group: dist.ProcessGroup | None,
    start: int,
    vocab: int | None,
) -> tuple[Shard, int]:
    """The shard of this rank, and the true vocabulary; SB0402, SB0403, SB0421, SB0431."""
    ranks, rank = place(group)
    columns = logits.shape[1]
    vocab = vocabulary(logits, vocab, ranks * columns)
    local_plan = plan.local(ranks)
    plan.cuts(vocab)
    width = vocab // ranks
    require_shard("SB0431", "columns", (ranks, rank), start=start, held=columns, width=width)
    return Shard(local_plan, start, width, ranks, group), vocab


def _select(
    logits: torch.Tensor, targets: torch.Tensor, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [M] of the targets, and the roots (m, s) [M, 2]."""
    roots = cpu.fold(cpu.leaves(logits, shard.plan.cuts(shard.width)))
    x = cpu.choose(logits, targets, shard.start, shard.width)
    if shard.ranks > 1:
        mine = torch.cat([roots, x[:, None]], dim=1)
        parts = [torch.empty_like(mine) for _ in range(shard.ranks)]
        dist.all_gather(parts, mine, group=shard.group)
        gathered = torch.stack(parts, dim=1)
        roots = cpu.fold(gathered[:, :, :2].contiguous())
        owner = torch.div(targets, shard.width, rounding_mode="floor")
        x = gathered[:, :, 2].gather(1, owner[:, None])[:, 0].contiguous()
    _require_distribution(roots)
    return cpu.finish(x, roots), roots


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
        return cpu.backward(logits, roots, targets, grad, shard.start, shard.width), None, None


def selected(
    logits: torch.Tensor,
    targets: torch.Tensor,
    plan: ReductionPlan,
    group: dist.ProcessGroup | None = None,
    start: int = 0,
    vocab: int | None = None,
) -> torch.Tensor:
    """Log-probability of one target per row: logits fp32 [M, V_local], targets [M] int64 -> [M].

    By the schedule of this module. Rank r of a `group` of t holds vocabulary columns start =
    r * V_local onwards, a whole subtree of the plan; one all-gather moves (m, s, x_t) per row and
    every rank gets the result. `vocab` is the true vocabulary (default: all columns of all
    ranks); padded columns beyond it are not read.

    Differentiable in logits: gradient * (onehot - softmax) in fp32, one buffer the size of the
    logits, zero in padded columns. Refuses other dtypes (SB0420), shapes (SB0421), a vocabulary
    that the plan cannot cut (SB0402), a group that does not divide the plan (SB0403), a shard
    that does not own whole leaves (SB0431), targets outside the vocabulary (SB0432), and rows
    without a distribution (SB0430). CUDA tensors: `sm90.selected`.
    """
    if logits.is_cuda:
        from samebits.ops.logprob import sm90

        return sm90.selected(logits, targets, plan, group, start, vocab)
    logits = _rows(logits)
    require_dtype("targets", targets, torch.int64)
    require_shape("targets", targets, targets.shape == logits.shape[:1], f"[{logits.shape[0]}]")
    shard, vocab = shard_of(logits, plan, group, start, vocab)
    require_ids("SB0432", "target", targets, vocab)
    registry.count_served("logprob", logits.shape[0])
    targets = targets.contiguous()
    if torch.is_grad_enabled() and logits.requires_grad:
        return _Selected.apply(logits, targets, shard)
    return _select(logits, targets, shard)[0]


def scale(logits: torch.Tensor, temperature: float, processed: bool = False) -> torch.Tensor:
    """logits fp32 / temperature, one IEEE division per entry; the same tensor when it is 1.

    Raw log-probabilities (`processed` false) are taken before temperature, so any other value is
    refused there (SB0433), as is one that is not positive and finite in either mode.
    """
    if not logits.is_cuda:  # the same division on either device
        require_dtype("logits", logits, torch.float32)
    if temperature == 1:
        return logits
    if not processed or not 0 < temperature < float("inf"):
        raise Refused(
            "SB0433",
            seen=f"temperature {temperature} in {'processed' if processed else 'raw'} mode",
            required="1 in raw mode; positive and finite in processed mode",
            hint="samebits explain SB0433",
        )
    return logits / torch.full_like(logits[..., :1], temperature)


def row_digest(logits: torch.Tensor, start: int = 0, vocab: int | None = None) -> list[int]:
    """Per row of logits fp32 [M, V_local]: its `samebits.bits.mixsum`, index = vocabulary index.

    `start` is the vocabulary index of the first column; columns at or beyond `vocab` are left
    out. Digests of the shards of a row add up (`samebits.bits.add_digests`) to that of the row.
    Reads CUDA tensors' digests back.
    """
    if logits.is_cuda:
        from samebits.ops.logprob import sm90

        return sm90.row_digest(logits, start, vocab)
    logits = _rows(logits.detach())
    stop = logits.shape[1] if vocab is None else min(logits.shape[1], max(0, vocab - start))
    return cpu.row_digests(logits, start, stop)


def _probe() -> int:
    logits = samples.fp32((5, 8 * 43 + 3), 6, -4, 5)
    logits[1, :100] = -torch.inf
    roots = cpu.fold(cpu.leaves(logits, ReductionPlan(8).cuts(8 * 43)))
    whole = cpu.log_probs(logits, roots, 8 * 43)
    return mixsum(
        np.concatenate(
            [whole.numpy().ravel(), cpu.finish(logits[:, 7].contiguous(), roots).numpy()]
        )
    )


registry.register(
    registry.Implementation(
        region="logprob",
        id="logprob.cpu.1",
        platform="cpu",
        constants={"lanes": LANES, "leaves": "plan"},
        modules=(
            "samebits.plan",
            "samebits.ops.jit",
            "samebits.ops.scalar",
            "samebits.ops.logprob",
            "samebits.ops.logprob.cpu",
            "samebits.ops.head",
        ),
        probe=_probe,
    )
)
