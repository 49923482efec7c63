"""Bit gates of the Hopper kernels: hostile operands, every tile of the table, every class of M.

A gate counts what it set out to provoke (ties, subnormals, cancellations, overflow, NaN); a
hazard that never happened is NotObserved (SB0441), a differing bit Different (SB0440).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

import torch

from samebits.errors import Different, NotObserved
from samebits.ops import gemm
from samebits.ops.gemm import reference_sm90, smallest_sm90
from samebits.ops.gemm import triton as tiles
from samebits.ops.gemm.operands_sm90 import FINITE, KINDS, bf16, differing, operands, source
from samebits.ops.logprob import reference_sm90 as logprob_law
from samebits.ops.logprob import triton as logprob
from samebits.ops.reference import fma32
from samebits.ops.rms_norm import reference_sm90 as rms_law
from samebits.ops.rms_norm import triton as rms_norm
from samebits.ops.rotary import triton as rotary
from samebits.ops.scalar import reference_narrow
from samebits.ops.silu_mul import reference as silu_law
from samebits.ops.silu_mul import triton as silu_mul
from samebits.plan import ReductionPlan

ROWS = (*range(1, 18), 64, 256, 1000, 4096, 16384)
LAW_ROWS = 256
ROWS_LOGPROB = 64
HAZARDS = ("tie", "subnormal", "zero", "infinity", "nan")


class Tally:
    """Counts of one gate: elements compared, and how often each hazard was in the law."""

    def __init__(self, name: str):
        self.name = name
        self.elements = 0
        self.comparisons = 0
        self.hazards: collections.Counter[str] = collections.Counter()

    def require(self, what: str, ours: torch.Tensor, law: torch.Tensor) -> None:
        """SB0440 unless all bits agree. Where the law has a NaN ours must have one, of any kind."""
        alike = ours.shape == law.shape and ours.dtype == law.dtype
        count = int(differing(ours, law)) if alike else -1
        self.elements += law.numel()
        self.comparisons += 1
        if count:
            raise Different(
                "SB0440",
                seen=f"{self.name}, {what}: {count} of {law.numel()} elements differ",
                required="the bits of the reference",
                hint="python -m samebits.bench.gpu",
            )

    def note(self, accumulators: torch.Tensor) -> None:
        """Count hazards in fp32 values that will be rounded to bf16."""
        bits = accumulators.view(torch.int32)
        size = accumulators.abs()
        for hazard, seen in (
            ("tie", (bits & 0xFFFF) == 0x8000),
            ("subnormal", (size > 0) & (size < 2.0**-126)),
            ("zero", size == 0),
            ("infinity", size == torch.inf),
            ("nan", accumulators.isnan()),
        ):
            self.hazards[hazard] += int(seen.sum())

    def close(self, needed: tuple[str, ...] = ()) -> str:
        """One line; SB0441 unless every needed hazard happened."""
        missing = [hazard for hazard in needed if not self.hazards[hazard]]
        if missing or not self.elements:
            raise NotObserved(
                "SB0441",
                seen=f"{self.name}: no {', '.join(missing) or 'element compared'}",
                required="every hazard of the gate in its operands",
                hint="python -m samebits.bench.gpu",
            )
        found = ", ".join(f"{self.hazards[h]} {h}" for h in needed)
        line = (
            f"gate {self.name}: {self.comparisons} comparisons, {self.elements} elements, 0 differ"
        )
        return f"{line}; {found}" if found else line


def gate_law() -> str:
    """The smallest kernel has the bits of the integer reference: sums, leaves, tails of K."""
    tally = Tally("law")
    for seed, kind in enumerate(FINITE):
        for k, leaves in ((16, 1), (500, 1), (512, 4), (2048, 1)):
            x, w = operands(kind, 19, 40, k, source(seed))
            plan = ReductionPlan(leaves)
            law = reference_sm90.accumulate(x, w, plan)
            tally.note(law)
            tally.require(f"{kind}, K {k}", smallest_sm90.accumulate(x, w, plan), law)
    return tally.close(("tie", "subnormal", "zero"))


def _call(leaves: int, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    if dtype == torch.float32:
        return gemm.lm_head
    if leaves == 1:
        return gemm.linear
    return lambda x, w: gemm.row_parallel(x, w, ReductionPlan(leaves))


def gate_gemm() -> str:
    """Every tile of the table, every kind of operand, every M of ROWS, twice."""
    tally = Tally("gemm")
    for seed, (n, k, leaves, dtype) in enumerate(sorted(tiles.table(), key=str)):
        call = _call(leaves, dtype)
        for kind in KINDS:
            random = source(seed)
            x, w = operands(kind, LAW_ROWS, n, k, random)
            law = smallest_sm90.accumulate(x, w, ReductionPlan(leaves))
            tally.note(law)
            law = law.to(dtype)
            for m in ROWS:
                # Rows beyond the law's are copies in random order: each must keep its bits.
                rows = torch.randint(0, LAW_ROWS, (m,), generator=random, device="cuda")
                if m <= LAW_ROWS:
                    rows = torch.arange(m, device="cuda")
                batch = x[rows]
                what = f"{kind}, M {m}, N {n}, K {k}, {leaves} leaves"
                for _ in range(2):
                    y = call(batch, w)
                    for part in range(0, m, 1024):
                        chosen = slice(part, part + 1024)
                        tally.require(what, y[chosen], law[rows[chosen]])
        del x, w, law, y, batch
    return tally.close(HAZARDS)


def gate_rms_norm() -> str:
    """RMSNorm against its law on extreme exponents, zeros and NaN; the tally as one line."""
    tally = Tally("rms_norm")
    random = source(1)
    for n in (128, 576, 4096, 5120, 12288):
        for low, high in ((-8, 8), (-127, -60), (30, 64), (-60, 60)):
            x, h = (bf16((37, n), low, high, random) for _ in range(2))
            x[0], x[1], x[2, 5] = 0, -0.0, torch.nan
            w = bf16((n,), -3, 3, random)
            what = f"n {n}, exponents {low} to {high}"
            tally.require(what, rms_norm.rms_norm(x, w, 1e-6), rms_law.rms_norm(x, w, 1e-6))
            y, added = rms_norm.add_rms_norm(x, h, w, 1e-6)
            tally.require(what + ", added", added, x + h)
            tally.require(what + ", after adding", y, rms_law.rms_norm(x + h, w, 1e-6))
    return tally.close()


def gate_silu_mul() -> str:
    """Against the CPU's own reference: every bf16 gate value, with several factors."""
    tally = Tally("silu_mul")
    bits = torch.arange(65536, device="cuda") - 32768
    gate = bits.to(torch.int16).view(torch.bfloat16).repeat(8, 1)
    up = bf16((8, 65536), -100, 100, source(2))
    pair = torch.cat([gate, up], dim=1)
    tally.require("all gates", silu_mul.silu_mul(pair), silu_law.silu_mul(pair))
    return tally.close()


def gate_rotary() -> str:
    """The steps of the CPU's reference, on angles of a real table's range."""
    tally = Tally("rotary")
    random = source(3)
    for length, turning, tokens, heads in ((128, 128, 77, 8), (192, 64, 20, 3), (64, 64, 33, 1)):
        half = turning // 2
        angles = torch.rand(4096, half, generator=random, device="cuda") * 6.3
        table = torch.cat([angles.cos(), angles.sin()], dim=1)
        position = torch.randint(0, 4096, (tokens,), generator=random, device="cuda")
        x = bf16((tokens, heads, length), -127, 100, random)
        c, s = table[position][:, None].split(half, dim=-1)
        x1, x2 = x[..., :half].float(), x[..., half:turning].float()
        y1 = reference_narrow(fma32(x1, c, -(x2 * s)))
        y2 = reference_narrow(fma32(x2, c, x1 * s))
        law = torch.cat([y1, y2, x[..., turning:]], dim=-1)
        tally.require(f"D {length}, rotary {turning}", rotary.apply(x, position, table), law)
    return tally.close()


def gate_logprob() -> str:
    """Log-probabilities against their law, rows of -inf, inf and NaN included; one line."""
    tally = Tally("logprob")
    random = source(4)
    for vocab, leaves in ((151936, 8), (151936, 1), (49152, 8), (1000, 4)):
        for scale in (1.0, 30.0, 1e30):
            logits = torch.randn(ROWS_LOGPROB, vocab, generator=random, device="cuda") * scale
            logits[1, : vocab // 2] = -torch.inf
            logits[2] = -torch.inf
            logits[3, 7] = torch.nan
            logits[4, 0] = torch.inf
            logits[5] = logits[5].bfloat16().float()  # many equal logits
            logits[6, :-1] = -torch.inf
            target = torch.randint(0, vocab, (ROWS_LOGPROB,), generator=random, device="cuda")
            plan = ReductionPlan(leaves)
            law = logprob_law.selected(logits, target, plan, vocab)
            tally.note(law)
            wide = torch.nn.functional.pad(logits, (0, 64), value=torch.nan)
            what = f"V {vocab}, {leaves} leaves, scale {scale}"
            tally.require(what, logprob.selected(logits, target, plan), law)
            tally.require(what + ", padded", logprob.selected(wide, target, plan, vocab), law)
            alone = logprob.selected(logits[8:].contiguous(), target[8:], plan)
            tally.require(what + ", alone", alone, law[8:])
    return tally.close(("infinity", "nan"))


def element_gates() -> Iterator[str]:
    """One line for each gate that is green, an error at the first that is red."""
    for gate in (gate_rms_norm, gate_silu_mul, gate_rotary, gate_logprob):
        yield gate()


def gemm_gates() -> Iterator[str]:
    """As `element_gates`."""
    for gate in (gate_law, gate_gemm):
        yield gate()
