"""Log-probabilities on Hopper; the schedule is `sm90` in the README."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.checks import require_shape
from samebits.ops.device import exp32, fold, log32
from samebits.ops.logprob.reference_sm90 import NEAR, PIECE
from samebits.plan import ReductionPlan

BLOCK = 16  # pieces in one block; moves no bit
COLUMNS = 2048  # of one block; moves no bit


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
def _log_prob(x, m, s):
    return (x - m) - log32(s)


@triton.jit
def _roots(
    x_ptr, target_ptr, m_ptr, s_ptr, root_ptr, y_ptr, stride, COUNT,
    WIDTH: tl.constexpr, LEAVES: tl.constexpr, SELECT: tl.constexpr,
):  # fmt: skip
    """(m, s) of a row from its pieces; with SELECT the log-probability of its target too."""
    row = tl.program_id(0).to(tl.int64)
    at = row * LEAVES * COUNT
    if LEAVES == 8:
        m, s = _subtree(m_ptr, s_ptr, at, COUNT, WIDTH, 4)
        m2, s2 = _subtree(m_ptr, s_ptr, at + 4 * COUNT, COUNT, WIDTH, 4)
        m, s = _merge(m, s, m2, s2)
    else:
        m, s = _subtree(m_ptr, s_ptr, at, COUNT, WIDTH, LEAVES)
    one = tl.arange(0, 1)
    tl.store(root_ptr + 2 * row + one, m)
    tl.store(root_ptr + 2 * row + 1 + one, s)
    if SELECT:
        x = tl.load(x_ptr + row * stride + tl.load(target_ptr + row))
        tl.store(y_ptr + row + one, _log_prob(x, m, s))


@triton.jit
def _rank(part_ptr, at):
    one = tl.arange(0, 1)
    return tl.load(part_ptr + at + one), tl.load(part_ptr + at + 1 + one)


@triton.jit
def _pair(part_ptr, at):
    m, s = _rank(part_ptr, at)
    m2, s2 = _rank(part_ptr, at + 2)
    return _merge(m, s, m2, s2)


@triton.jit
def _four(part_ptr, at):
    m, s = _pair(part_ptr, at)
    m2, s2 = _pair(part_ptr, at + 4)
    return _merge(m, s, m2, s2)


@triton.jit
def _fold_ranks(part_ptr, root_ptr, RANKS: tl.constexpr):
    """part [rows, RANKS, 2]: roots of subtrees in rank order -> root [rows, 2]."""
    row = tl.program_id(0).to(tl.int64)
    at = row * (2 * RANKS)
    if RANKS == 2:
        m, s = _pair(part_ptr, at)
    elif RANKS == 4:
        m, s = _four(part_ptr, at)
    else:
        m, s = _four(part_ptr, at)
        m2, s2 = _four(part_ptr, at + 8)
        m, s = _merge(m, s, m2, s2)
    one = tl.arange(0, 1)
    tl.store(root_ptr + 2 * row + one, m)
    tl.store(root_ptr + 2 * row + 1 + one, s)


@triton.jit
def _entries(x_ptr, root_ptr, y_ptr, stride, vocab, BLOCK: tl.constexpr):
    """Log-probabilities of BLOCK columns of a row; -inf from `vocab` on."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(root_ptr + 2 * row)
    s = tl.load(root_ptr + 2 * row + 1)
    x = tl.load(x_ptr + row * stride + j, mask=j < vocab, other=0.0)
    y = tl.where(j < vocab, _log_prob(x, m, s), float("-inf"))
    tl.store(y_ptr + row * stride + j, y, mask=j < stride)


@triton.jit
def _gradient(
    x_ptr, root_ptr, target_ptr, grad_ptr, y_ptr, stride, start, width, BLOCK: tl.constexpr
):
    """g * (onehot - exp32(x - m) * (1 / s)); column 0 is entry `start`; +0 from `width` on."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(root_ptr + 2 * row)
    s = tl.load(root_ptr + 2 * row + 1)
    g = tl.load(grad_ptr + row)
    at = tl.load(target_ptr + row) - start
    x = tl.load(x_ptr + row * stride + j, mask=j < width, other=float("-inf"))
    d = tl.where(j == at, g, 0.0) - g * (exp32(x - m) * (1.0 / s))
    tl.store(y_ptr + row * stride + j, tl.where(j < width, d, 0.0), mask=j < stride)


@triton.jit
def _mix(z):
    """The finaliser of SplitMix64, uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _digest(x_ptr, low_ptr, high_ptr, stride, start, width, BLOCK: tl.constexpr):
    """Both halves of `bits.mixsum` over BLOCK columns of a row, mod 2**64. [rows, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x_ptr + row * stride + j, mask=j < width, other=0.0).to(tl.uint32, bitcast=True)
    bits = bits.to(tl.uint64)
    index = (j + start).to(tl.uint64)
    seed = _mix(index * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15)
    low = _mix(seed ^ bits)
    high = _mix((seed + 0xBF58476D1CE4E5B9) ^ (bits * 0x94D049BB133111EB + 0x9E3779B97F4A7C15))
    zero = tl.zeros_like(low)
    to = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(low_ptr + to, tl.sum(tl.where(j < width, low, zero)).to(tl.int64, bitcast=True))
    tl.store(high_ptr + to, tl.sum(tl.where(j < width, high, zero)).to(tl.int64, bitcast=True))


def _checked(logits: torch.Tensor, vocab: int) -> None:
    gpu.prepare(logits.device.index or 0)
    gpu.require("logits", logits, torch.float32, logits.dim() == 2, "[M, V]")
    fits = 0 < vocab <= logits.shape[1]
    require_shape("logits", logits, fits, f"at least {max(vocab, 1)} columns")


def roots(
    logits: torch.Tensor, plan: ReductionPlan, vocab: int, targets: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, s) fp32 [M, 2] of logits fp32 [M, V], contiguous on CUDA, and log-probabilities [M].

    `vocab` is the true vocabulary; columns beyond it are not read. The second result is that of
    `targets`, int64 [M], or meaningless without them. A row without a distribution (a NaN or +inf,
    or -inf only) gives NaN; targets must lie inside the vocabulary: both are the caller's checks,
    since reading values back would stop the GPU. Refuses with SB0402, SB0420, SB0421.
    """
    _checked(logits, vocab)
    rows, stride = logits.shape
    if targets is not None:
        gpu.require("targets", targets, torch.int64, targets.shape == (rows,), f"[{rows}]")
    leaf = plan.cuts(vocab)[0][1]
    count = triton.cdiv(leaf, PIECE)
    y, found = logits.new_empty(rows), logits.new_empty((rows, 2))
    if rows:
        m, s = logits.new_empty((2, rows, plan.leaves, count)).unbind(0)
        grid = (rows, plan.leaves, triton.cdiv(count, BLOCK))
        _pieces[grid](
            logits, m, s, stride, leaf, count, PIECE=PIECE, BLOCK=BLOCK, NEAR=NEAR,
            num_warps=4, **gpu.POLICY,
        )  # fmt: skip
        _roots[(rows,)](
            logits, logits if targets is None else targets, m, s, found, y, stride, count,
            WIDTH=triton.next_power_of_2(count), LEAVES=plan.leaves, SELECT=targets is not None,
            num_warps=1 if count <= 256 else 4, **gpu.POLICY,
        )  # fmt: skip
    return found, y


def selected(
    logits: torch.Tensor, targets: torch.Tensor, plan: ReductionPlan, vocab: int | None = None
) -> torch.Tensor:
    """Log-probabilities of targets, fp32 [M]: the second result of `roots`."""
    return roots(logits, plan, logits.shape[1] if vocab is None else vocab, targets)[1]


def fold_ranks(parts: torch.Tensor) -> torch.Tensor:
    """Roots of 2, 4 or 8 ranks, fp32 [M, ranks, 2] in rank order -> [M, 2]."""
    rows, ranks, _ = parts.shape
    found = parts.new_empty((rows, 2))
    if rows:
        _fold_ranks[(rows,)](parts, found, RANKS=ranks, num_warps=1, **gpu.POLICY)
    return found


def log_probs(logits: torch.Tensor, found: torch.Tensor, vocab: int) -> torch.Tensor:
    """Contiguous logits [M, V], roots [M, 2] -> log-probabilities [M, V], -inf from `vocab`."""
    _checked(logits, vocab)
    y = torch.empty_like(logits)
    rows, stride = logits.shape
    if rows:
        _entries[(rows, triton.cdiv(stride, COLUMNS))](
            logits, found, y, stride, vocab, BLOCK=COLUMNS, num_warps=4, **gpu.POLICY
        )
    return y


def gradient(
    logits: torch.Tensor,
    found: torch.Tensor,
    targets: torch.Tensor,
    grad: torch.Tensor,
    start: int,
    width: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Gradient of the logits: grad * (onehot - softmax); column 0 is vocabulary entry `start`."""
    y = torch.empty_like(logits, dtype=dtype)
    rows, stride = logits.shape
    if rows:
        _gradient[(rows, triton.cdiv(stride, COLUMNS))](
            logits, found, targets, grad, y, stride, start, width, BLOCK=COLUMNS, num_warps=4,
            **gpu.POLICY,
        )  # fmt: skip
    return y


def row_digests(logits: torch.Tensor, start: int, width: int) -> list[int]:
    """128-bit digests of the first `width` columns of each row; see `samebits.bits.mixsum`.

    Reads its results back.
    """
    rows, stride = logits.shape
    if not rows or width <= 0:
        return [0] * rows
    blocks = triton.cdiv(width, COLUMNS)
    sums = torch.empty((2, rows, blocks), dtype=torch.int64, device=logits.device)
    _digest[(rows, blocks)](
        logits, sums[0], sums[1], stride, start, width, BLOCK=COLUMNS, num_warps=4, **gpu.POLICY
    )
    mask = (1 << 64) - 1
    low, high = sums.sum(2).tolist()  # int64 addition wraps
    return [((b & mask) << 64) | (a & mask) for a, b in zip(low, high, strict=True)]
