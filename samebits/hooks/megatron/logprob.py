"""Log-probabilities of targets where Megatron computes its vocabulary-parallel loss."""

from __future__ import annotations

import torch

from samebits import bits, runtime
from samebits.errors import Refused
from samebits.ops import head, logprob


def bound() -> bool:
    """Whether log-probabilities of targets are ours."""
    return runtime.aligned("logprob")


def _shard(columns: int, group) -> dict:
    """Which part of the vocabulary the `columns` of this rank are."""
    if group.size() == 1:
        return {}
    return {"start": group.rank() * columns, "group": group}


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, label_smoothing: float
) -> torch.Tensor:
    """logits [..., V / ranks] fp32, target [...] int64 -> -log p(target) [...] fp32.

    Negation is exact, so the loss carries the bits of the log-probability. A stock output layer
    gives bf16 logits, which are widened first, as upstream widens them.
    """
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    if label_smoothing:
        raise Refused(
            "SB0605",
            seen=f"label smoothing {label_smoothing}",
            required="0",
            hint="samebits explain SB0605",
        )
    plan = runtime.contract().plan("logprob")
    flat = logits.reshape(-1, logits.shape[-1])
    if not runtime.aligned("gemm.lm_head"):
        flat = flat.float()
    shard = _shard(logits.shape[-1], get_tensor_model_parallel_group())
    return -logprob.selected(flat, target.reshape(-1), plan, **shard).view(target.shape)


def selected(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, group
) -> torch.Tensor:
    """hidden [n, H] bf16, weight [V / ranks, H] bf16, target [n] int64 -> log p(target) [n] fp32.

    The bits of Megatron's output layer and loss one after the other, of as many logits at a time
    as `head.LOGITS` says. As in that layer, ranks add up their gradients of hidden.
    """
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    plan = runtime.contract().plan("logprob")
    return head.selected(hidden, weight, target, plan, **_shard(weight.shape[0], group))


def row_digests(logits: torch.Tensor, group) -> list[str]:
    """Whole-row digests of logits [n, V / ranks] fp32, in hex; the same for every rank count."""
    import torch.distributed as dist

    shard = _shard(logits.shape[-1], group)
    mine = logprob.row_digest(logits, start=shard.get("start", 0))
    parts = [mine]
    if group.size() > 1:
        parts = [[] for _ in range(group.size())]
        dist.all_gather_object(parts, mine, group=group)
    return [bits.hex_digest(bits.add_digests(*row)) for row in zip(*parts, strict=True)]
