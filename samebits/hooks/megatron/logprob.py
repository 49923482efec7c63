"""Log-probabilities of targets where Megatron computes its vocabulary-parallel loss."""

from __future__ import annotations

import torch

from samebits import bits, runtime
from samebits.errors import Refused
from samebits.ops import logprob


def bound() -> bool:
    """Whether log-probabilities of targets are ours."""
    return runtime.aligned("logprob")


def _shard(logits: torch.Tensor, group) -> dict:
    """Which part of the vocabulary this rank's logits are."""
    if group.size() == 1:
        return {}
    return {"start": group.rank() * logits.shape[-1], "group": group}


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
    shard = _shard(logits, get_tensor_model_parallel_group())
    return -logprob.selected(flat, target.reshape(-1), plan, **shard).view(target.shape)


def row_digests(logits: torch.Tensor, group) -> list[str]:
    """Whole-row digests of logits [n, V / ranks] fp32, in hex; the same for every rank count."""
    import torch.distributed as dist

    shard = _shard(logits, group)
    mine = logprob.row_digest(logits, start=shard.get("start", 0))
    parts = [mine]
    if group.size() > 1:
        parts = [[] for _ in range(group.size())]
        dist.all_gather_object(parts, mine, group=group)
    return [bits.hex_digest(bits.add_digests(*row)) for row in zip(*parts, strict=True)]
