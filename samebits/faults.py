"""Planted faults: each breaks one promise on purpose, so that a leg can be seen to turn red.

SAMEBITS_FAULT names one. Evidence records it, and a run that carries one in its measured arm is
never EQUAL. Faults wrap the public operators of this process; the operators know nothing of them.
"""

from __future__ import annotations

import functools

from samebits import runtime
from samebits.errors import Refused
from samebits.plan import ReductionPlan

# rank_order_sum is planted where ranks meet: `hooks.megatron.linear`.
ELSEWHERE = ("rank_order_sum",)


def _k_cut_by_rows() -> None:
    """A column-parallel product cuts K in two when it has more than one row (legs A, B, C, F)."""
    from samebits.ops import gemm

    whole = gemm.linear

    @functools.wraps(whole)
    def linear(x, w, bias=None):
        if x.numel() == x.shape[-1]:
            return whole(x, w, bias)
        return gemm.row_parallel(x, w, ReductionPlan(2))

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


PLANTED = {
    "k_cut_by_rows": _k_cut_by_rows,
    "rope_base_doubled": _rope_base_doubled,
    "other_gdn_schedule": _other_gdn_schedule,
    "gdn_decay_doubled": _gdn_decay_doubled,
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
