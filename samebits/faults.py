"""Planted faults: each breaks one promise on purpose, so that a leg can be seen to turn red.

SAMEBITS_FAULT names one. Evidence records it, and a run that carries one in its measured arm is
never EQUAL. Engines are started without the caller's SAMEBITS_FAULT: a fault reaches them through
an argument that only controls and tests pass. Faults wrap the public operators of this process, or
what the rollout engine does around a weight sync; what is wrapped knows nothing of them.
"""

from __future__ import annotations

import functools
from typing import Any

from samebits import runtime
from samebits.errors import Refused

# rank_order_sum is planted where ranks meet: `hooks.megatron.linear`.
ELSEWHERE = ("rank_order_sum",)


# Rows up to which `k_cut_by_rows` leaves a product whole: fewer than a full step of a control holds
# (64 on a CPU, thousands on a GPU) and more than most sequences alone, or the end of one, and any
# decode. One row would not tell them apart.
_WHOLE_ROWS = {"cpu": 63, "sm90": 128}


def _k_cut_by_rows() -> None:
    """A column-parallel product cuts K in two when it has many rows, and rounds both halves, as a
    kernel does that adds into its bf16 output (legs A, B, C, F)."""
    from samebits.ops import gemm

    whole, most = gemm.linear, _WHOLE_ROWS[runtime.platform()]

    @functools.wraps(whole)
    def linear(x, w, bias=None):
        if x.numel() <= most * x.shape[-1]:
            return whole(x, w, bias)
        first = x.clone()  # halves as zeros, so that shapes stay those that the operator admits
        first[..., x.shape[-1] // 2 :] = 0
        y = whole(first, w) + whole(x - first, w)
        return y if bias is None else y + bias

    gemm.linear = linear


def _rope_base_doubled() -> None:
    """Both engines turn by wrong angles, and agree: only the fp32 oracle sees it (leg O)."""
    from samebits.ops import rotary

    right = rotary.table
    rotary.table = lambda length, dim, base, *rest: right(length, dim, 2 * base, *rest)


def _other_gdn_schedule() -> None:
    """The trainer's gated delta core follows the schedule that the contract does not name (C)."""
    from samebits.ops import gdn

    named = gdn.varlen

    def varlen(q, k, v, g, beta, cu_seqlens, scale, schedule, initial_state=None):
        (other,) = set(gdn.SCHEDULES) - {schedule}
        return named(q, k, v, g, beta, cu_seqlens, scale, other, initial_state)

    gdn.varlen = varlen


def _gdn_decay_doubled() -> None:
    """Both engines forget twice as fast, and agree: only the fp32 oracle sees it (leg O)."""
    from samebits.ops import gdn_gate

    right = gdn_gate.gate

    def gate(a, b, A_log, dt_bias):
        g, beta = right(a, b, A_log, dt_bias)
        return 2 * g, beta

    gdn_gate.gate = gate


def _norm_rounded_early() -> None:
    """RMSNorm rounds to bf16 before it applies its weight, not after (B, C)."""
    from samebits.ops import rms_norm

    rms_norm.rms_norm = _rounding_early(rms_norm.rms_norm)


def _norm_rounded_by_rows() -> None:
    """The same, but only where RMSNorm is given more than one row (A, B)."""
    from samebits.ops import rms_norm

    right = rms_norm.rms_norm
    early = _rounding_early(right)

    @functools.wraps(right)
    def norm(x, weight, *rest, **options):
        chosen = right if x.numel() == weight.numel() else early
        return chosen(x, weight, *rest, **options)

    rms_norm.rms_norm = norm


def _rounding_early(right):
    import torch

    def early(x, weight, eps, zero_centred=False):
        plain = right(x, torch.ones_like(weight), eps).float()
        factor = weight.float() + 1 if zero_centred else weight.float()
        return (plain * factor).to(x.dtype)

    return early


def _scale_rounded() -> None:
    """Attention multiplies its scores by a scale that was rounded to bf16 (B, C)."""
    import torch

    from samebits.ops import attention

    def rounded(right, place: int):
        @functools.wraps(right)
        def attend(*args, **options):
            scale = float(torch.tensor(args[place]).bfloat16())
            return right(*args[:place], scale, *args[place + 1 :], **options)

        return attend

    attention.paged, attention.varlen = rounded(attention.paged, 6), rounded(attention.varlen, 4)


def _logits_rounded() -> None:
    """The output layer rounds its logits to bf16 (B, C, F)."""
    from samebits.ops import gemm

    right = gemm.lm_head
    gemm.lm_head = lambda x, w: right(x, w).bfloat16().float()


def _temperature_of_one_side() -> None:
    """Log-probabilities are those of logits at another temperature (B, C; rows of F agree)."""
    from samebits.ops import logprob

    def warmer(right):
        @functools.wraps(right)
        def scored(logits, *args, **kwargs):
            return right(logits / 1.25, *args, **kwargs)

        return scored

    logprob.log_softmax, logprob.selected = map(warmer, (logprob.log_softmax, logprob.selected))


def _chunks_from_slices() -> None:
    """A slice of a prompt starts a chunk of the recurrence wherever it begins (B, schedule cpr)."""
    from samebits.ops import gdn

    right, origins = gdn.advance, dict[tuple[int, int], int]()

    def advance(q, k, v, g, beta, state, slots, query_start_loc, context_lens, *rest, **options):
        boundary, running = state[:2]
        counts, moved = query_start_loc.diff().tolist(), context_lens.clone()
        for i, (slot, context) in enumerate(
            zip(slots.tolist(), context_lens.tolist(), strict=True)
        ):
            if not counts[i]:
                continue
            layer = (boundary.data_ptr(), slot)
            if context == 0:
                origins[layer] = 0
            elif counts[i] > 1 and (context - origins[layer]) % gdn.CHUNK:
                origins[layer] = context
                boundary[slot] = running[slot]  # at a boundary it would be dead
            if context:  # counted from the slice, and never a fresh sequence
                moved[i] = context - origins[layer] + gdn.CHUNK
        return right(q, k, v, g, beta, state, slots, query_start_loc, moved, *rest, **options)

    gdn.advance = advance


def _stale_prefix_cache() -> None:
    """The rollout engine says that it dropped its prefix cache, and keeps it (E, SB0906)."""
    from samebits.hooks.vllm.scheduler import Scheduler

    def keep(self, *_, **__):
        blocks = self.kv_cache_manager.block_pool.blocks
        return {"dropped_blocks": sum(block.block_hash is not None for block in blocks)}

    Scheduler.reset_prefix_cache = keep  # type: ignore[method-assign]


def _prefix_cache_not_reset() -> None:
    """The rollout engine keeps its prefix cache, and says that nothing was cached (E, SB0906)."""
    from samebits.hooks.vllm.scheduler import Scheduler

    Scheduler.reset_prefix_cache = lambda *_, **__: {"dropped_blocks": 0}  # type: ignore[method-assign]


def _unsynced_tensor() -> None:
    """A weight sync leaves the final norm as it was, and reports all tensors (SB0705)."""
    from samebits.hooks.vllm import weights

    right, kept = weights.load, list[Any]()

    def load(model, tensors):
        count = right(model, tensors)
        weight = model.get_parameter("model.norm.weight").data
        if kept:
            weight.copy_(kept[0])
        else:
            kept.append(weight.clone())
        return count

    weights.load = load


def _stale_export() -> None:
    """The trainer sends its norms as they were at its first export, in every refit (SB0710)."""
    from samebits.engines.trainer import Trainer

    right, kept = Trainer.export_weights, dict[str, Any]()

    def export_weights(self):
        for name, tensor in right(self):
            is_norm = name.endswith("norm.weight")
            yield name, kept.setdefault(name, tensor) if is_norm else tensor

    Trainer.export_weights = export_weights  # type: ignore[method-assign]


PLANTED = {
    "k_cut_by_rows": _k_cut_by_rows,
    "rope_base_doubled": _rope_base_doubled,
    "other_gdn_schedule": _other_gdn_schedule,
    "gdn_decay_doubled": _gdn_decay_doubled,
    "norm_rounded_early": _norm_rounded_early,
    "norm_rounded_by_rows": _norm_rounded_by_rows,
    "scale_rounded": _scale_rounded,
    "logits_rounded": _logits_rounded,
    "temperature_of_one_side": _temperature_of_one_side,
    "chunks_from_slices": _chunks_from_slices,
    "stale_prefix_cache": _stale_prefix_cache,
    "prefix_cache_not_reset": _prefix_cache_not_reset,
    "unsynced_tensor": _unsynced_tensor,
    "stale_export": _stale_export,
}


def install() -> None:
    """Plant the fault that SAMEBITS_FAULT names in this process; without one, do nothing."""
    name = runtime.fault()
    if name is None or name in ELSEWHERE:
        return
    if name not in PLANTED:
        raise Refused(
            "SB0902",
            seen=f"SAMEBITS_FAULT={name}",
            required=f"one of {', '.join(sorted([*PLANTED, *ELSEWHERE]))}",
            hint="unset SAMEBITS_FAULT",
        )
    PLANTED[name]()
