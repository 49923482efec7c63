"""Log-probabilities of targets straight from hidden rows: output layer and `logprob` by blocks.

`selected` has, bit for bit, what `gemm.lm_head` and `logprob.selected` give one after the other.
Rows do not see each other, so they are taken in blocks whose logits fill at most LOGITS bytes. The
backward computes logits again, in blocks of columns: a gradient of the weight is one sum over all
rows, rounded once, that of hidden an fp32 sum over the blocks, ascending. It carries no bit
contract and comes out the same twice.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from samebits.ops import gemm, logprob
from samebits.ops.checks import require_shape
from samebits.ops.logprob import cpu
from samebits.plan import ReductionPlan

__all__ = ["LOGITS", "selected"]

LOGITS = 5 << 28  # bytes of fp32 logits alive at once; moves no bit of a result


def selected(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    plan: ReductionPlan,
    group: dist.ProcessGroup | None = None,
    start: int = 0,
    vocab: int | None = None,
) -> torch.Tensor:
    """hidden [M, H] bf16, weight [V_local, H] bf16, targets [M] int64 -> log-probability [M] fp32.

    Rank r of a `group` of t holds rows start = r * V_local onwards of the weight, a whole subtree
    of `plan`; `vocab` is the true vocabulary; both as for `logprob.selected`.

    Differentiable in hidden and weight; the gradient of hidden is that of this rank's columns.
    Refuses what `gemm.lm_head` and `logprob.selected` refuse.
    """
    require_shape("hidden", hidden, hidden.dim() == 2, "[M, H]")
    require_shape("weight", weight, weight.dim() == 2 and weight.shape[0] > 0, "[V, H]")
    shard = plan, group, start, vocab
    block = _fitting(weight.shape[0])
    if hidden.shape[0] <= block:
        return logprob.selected(gemm.lm_head(hidden, weight), targets, *shard)
    require_shape("targets", targets, targets.shape == hidden.shape[:1], f"[{hidden.shape[0]}]")
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _Selected.apply(hidden, weight, targets, block, *shard)
    parts = zip(hidden.split(block), targets.split(block), strict=True)
    return torch.cat([logprob.selected(gemm.lm_head(x, weight), t, *shard) for x, t in parts])


def _fitting(count: int) -> int:
    """How many rows of `count` logits fit, or columns: a power of two, which tiles divide."""
    return 1 << max(1, LOGITS // (4 * count)).bit_length() - 1


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, block, plan, group, start, vocab):
        nothing = hidden.new_empty((0, weight.shape[0]))
        ctx.shard, _ = logprob.shard_of(nothing, plan, group, start, vocab)
        values, chosen = [], []
        for x, t in zip(hidden.split(block), targets.split(block), strict=True):
            logits = gemm.lm_head(x, weight)
            values.append(logprob.selected(logits, t, plan, group, start, vocab))
            at = t - start
            mine = (at >= 0) & (at < ctx.shard.width)
            x_t = logits.gather(1, at.clamp(0, ctx.shard.width - 1)[:, None])[:, 0]
            chosen.append(torch.where(mine, x_t, 0.0))
        result, total = torch.cat(values), torch.cat(chosen)
        if ctx.shard.ranks > 1:
            dist.all_reduce(total, group=group)
        total -= result  # the logarithm of the sum of a row's exponentials
        ctx.save_for_backward(hidden, weight, targets, total)
        return result

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, targets, total = ctx.saved_tensors
        grad = grad.float().contiguous()
        roots = torch.stack([total, torch.ones_like(total)], dim=1)
        of_hidden = of_weight = None
        if ctx.needs_input_grad[0]:
            of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight)
        step, width = _fitting(len(hidden)), ctx.shard.width
        for a in range(0, width, step):
            part = weight[a : min(a + step, width)]
            logits = _product(hidden, part.t())
            g = _slope(logits, roots, targets, grad, ctx.shard.start + a)
            del logits
            if of_hidden is not None:
                of_hidden += _product(g, part)
            if of_weight is not None:
                of_weight[a : a + len(part)] = _product(g.t(), hidden)
        rounded = None if of_hidden is None else of_hidden.to(hidden.dtype)
        return rounded, of_weight, *(None,) * 6


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [M, K] times right [K, N], both bf16 -> fp32, in the order of torch's kernel."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _slope(logits, roots, targets, grad, first: int) -> torch.Tensor:
    """Gradient of the logits of columns `first` onwards, bf16."""
    width = logits.shape[1]
    if logits.is_cuda:
        from samebits.ops.logprob import triton

        return triton.gradient(logits, roots, targets, grad, first, width, torch.bfloat16)
    return cpu.backward(logits, roots, targets, grad, first, width).bfloat16()
