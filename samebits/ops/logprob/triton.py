"""Log-probabilities on Hopper; the schedule is `sm90` in the README."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.device import exp32, fold, log32
from samebits.ops.logprob.reference_sm90 import NEAR, PIECE
from samebits.plan import ReductionPlan

BLOCK = 16  # pieces in one block; moves no bit


@triton.jit
def piece(x, ROWS: tl.constexpr, PIECE: tl.constexpr, NEAR: tl.constexpr):
    """x fp32 [ROWS, PIECE], -inf where absent -> (m, s) [ROWS]; m = -inf gives s = 0."""
    m = tl.max(x, axis=1)
    e = tl.where(x == float("-inf"), 0.0, exp32(x - m[:, None]))
    return m, fold(e, ROWS, PIECE, NEAR)


@triton.jit
def _pieces(
    x_ptr,
    m_ptr,
    s_ptr,
    stride,
    leaf,
    COUNT,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    NEAR: tl.constexpr,
):
    """One block: BLOCK pieces of one leaf of one row. Results [rows, leaves, COUNT]."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    column = number[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    at = x_ptr + row * stride + tl.program_id(1) * leaf + column
    x = tl.load(at, mask=column < leaf, other=float("-inf"))
    m, s = piece(x, BLOCK, PIECE, NEAR)
    to = (row * tl.num_programs(1) + tl.program_id(1)) * COUNT + number
    tl.store(m_ptr + to, m, mask=number < COUNT)
    tl.store(s_ptr + to, s, mask=number < COUNT)


@triton.jit
def _leaf(m_ptr, s_ptr, at, COUNT, WIDTH: tl.constexpr):
    """(m, s) [1] of a leaf: every piece scaled to the leaf's maximum, then folded by halves."""
    i = tl.arange(0, WIDTH)
    m = tl.load(m_ptr + at + i, mask=i < COUNT, other=float("-inf"))
    s = tl.load(s_ptr + at + i, mask=i < COUNT, other=0.0)
    top = tl.max(m, axis=0)
    scaled = tl.where(m == float("-inf"), s, s * exp32(m - top))
    total = fold(tl.reshape(scaled, (1, WIDTH)), 1, WIDTH, 1)
    return tl.full((1,), top, tl.float32), total


@triton.jit
def _merge(m1, s1, m2, s2):
    m = tl.maximum(m1, m2)
    e1 = tl.where(m == float("-inf"), 0.0, exp32(m1 - m))
    e2 = tl.where(m == float("-inf"), 0.0, exp32(m2 - m))
    return m, tl.fma(s1, e1, s2 * e2)


@triton.jit
def _subtree(m_ptr, s_ptr, at, COUNT, WIDTH: tl.constexpr, LEAVES: tl.constexpr):
    """(m, s) of 1, 2 or 4 neighbouring leaves."""
    m, s = _leaf(m_ptr, s_ptr, at, COUNT, WIDTH)
    if LEAVES >= 2:
        m2, s2 = _leaf(m_ptr, s_ptr, at + COUNT, COUNT, WIDTH)
        m, s = _merge(m, s, m2, s2)
    if LEAVES >= 4:
        m2, s2 = _leaf(m_ptr, s_ptr, at + 2 * COUNT, COUNT, WIDTH)
        m3, s3 = _leaf(m_ptr, s_ptr, at + 3 * COUNT, COUNT, WIDTH)
        m2, s2 = _merge(m2, s2, m3, s3)
        m, s = _merge(m, s, m2, s2)
    return m, s


@triton.jit
def _select(
    x_ptr, target_ptr, m_ptr, s_ptr, y_ptr, stride, COUNT, WIDTH: tl.constexpr, LEAVES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = row * LEAVES * COUNT
    if LEAVES == 8:
        m, s = _subtree(m_ptr, s_ptr, at, COUNT, WIDTH, 4)
        m2, s2 = _subtree(m_ptr, s_ptr, at + 4 * COUNT, COUNT, WIDTH, 4)
        m, s = _merge(m, s, m2, s2)
    else:
        m, s = _subtree(m_ptr, s_ptr, at, COUNT, WIDTH, LEAVES)
    x = tl.load(x_ptr + row * stride + tl.load(target_ptr + row))
    one = tl.arange(0, 1)
    tl.store(y_ptr + row + one, (x - m) - log32(s))


def selected(
    logits: torch.Tensor, targets: torch.Tensor, plan: ReductionPlan, vocab: int | None = None
) -> torch.Tensor:
    """logits fp32 [M, V], targets [M] int64, contiguous on CUDA -> log-probabilities fp32 [M].

    `vocab` is the true vocabulary (default V); columns beyond it are not read. A row without a
    distribution (a NaN or +inf, or -inf only) gives NaN; targets must lie inside the vocabulary:
    both are the caller's checks, since reading values back would stop the GPU. Refuses with
    SB0402, SB0420, SB0421.
    """
    gpu.prepare(logits.device.index or 0)
    gpu.require("logits", logits, torch.float32, logits.dim() == 2, "[M, V]")
    rows, stride = logits.shape
    gpu.require("targets", targets, torch.int64, targets.shape == (rows,), f"[{rows}]")
    vocab = stride if vocab is None else vocab
    gpu.require("logits", logits, torch.float32, 0 < vocab <= stride, f"{vocab} columns or more")
    leaf = plan.cuts(vocab)[0][1]
    count = triton.cdiv(leaf, PIECE)
    y = logits.new_empty(rows)
    if rows:
        m, s = logits.new_empty((2, rows, plan.leaves, count)).unbind(0)
        grid = (rows, plan.leaves, triton.cdiv(count, BLOCK))
        _pieces[grid](
            logits, m, s, stride, leaf, count, PIECE=PIECE, BLOCK=BLOCK, NEAR=NEAR,
            num_warps=4, **gpu.POLICY,
        )  # fmt: skip
        _select[(rows,)](
            logits, targets, m, s, y, stride, count, WIDTH=triton.next_power_of_2(count),
            LEAVES=plan.leaves, num_warps=1 if count <= 256 else 4, **gpu.POLICY,
        )  # fmt: skip
    return y
