"""Kernels of the log-probability schedule, stated in the package's docstring and in `reference`."""

from __future__ import annotations

import numpy as np
import torch

from samebits.bits import GOLDEN, M1, M2, splitmix64
from samebits.ops.jit import fma, kernel, parallel_for
from samebits.ops.scalar import LANES, bits_of, exp32, fold_lanes, log32

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOW = np.float32(-np.inf)
_GRAIN = 16384  # elements per task: below this a thread costs more than it saves
_BLOCK = 1024  # exponentials computed before they are added up; a multiple of LANES

_mix = kernel(splitmix64)


def _grain(columns: int) -> int:
    return max(1, _GRAIN // max(1, columns))


@kernel
def _add_to_lanes(weights, n, lanes):
    whole = n - n % LANES
    for j in range(0, whole, LANES):
        for k in range(LANES):
            lanes[k] = lanes[k] + weights[j + k]
    for j in range(whole, n):
        lanes[j - whole] = lanes[j - whole] + weights[j]


@kernel
def leaf_kernel(logits, cuts, out, start, stop):
    """out[i, leaf] = (m, s) of a row's leaf; a NaN in the leaf makes s NaN."""
    lanes = np.empty(LANES, np.float32)
    weights = np.empty(_BLOCK, np.float32)
    for i in range(start, stop):
        for leaf in range(cuts.shape[0]):
            x = logits[i, cuts[leaf, 0] : cuts[leaf, 1]]
            n = x.size
            whole = n - n % LANES
            lanes[:] = _LOW
            for j in range(0, whole, LANES):
                for k in range(LANES):
                    lanes[k] = x[j + k] if x[j + k] > lanes[k] else lanes[k]
            for j in range(whole, n):
                lanes[j - whole] = x[j] if x[j] > lanes[j - whole] else lanes[j - whole]
            m = _LOW
            for k in range(LANES):
                m = lanes[k] if lanes[k] > m else m
            lanes[:] = _ZERO
            if m > _LOW:
                for first in range(0, n, _BLOCK):
                    part = x[first : first + _BLOCK]
                    for j in range(part.size):
                        weights[j] = exp32(part[j] - m)
                    _add_to_lanes(weights, part.size, lanes)
            else:  # only -inf, which weighs nothing, or NaN, which must show
                for j in range(n):
                    lanes[0] = x[j] if x[j] != x[j] else lanes[0]
            out[i, leaf, 0] = m
            out[i, leaf, 1] = fold_lanes(lanes)


@kernel
def fold_kernel(parts, out, start, stop):
    """out[i] = (m, s) of the parts of row i, merged pairwise, lower index left."""
    count = parts.shape[1]
    ms, ss = np.empty(count, np.float32), np.empty(count, np.float32)
    for i in range(start, stop):
        for p in range(count):
            ms[p], ss[p] = parts[i, p, 0], parts[i, p, 1]
        step = 1
        while step < count:
            for p in range(0, count, 2 * step):
                q = p + step
                m = ms[q] if ms[q] > ms[p] else ms[p]
                if m > _LOW:
                    ss[p] = fma(ss[p], exp32(ms[p] - m), ss[q] * exp32(ms[q] - m))
                else:
                    ss[p] = ss[p] + ss[q]  # zero, or the NaN of a part
                ms[p] = m
            step *= 2
        out[i, 0], out[i, 1] = ms[0], ss[0]


@kernel
def log_probs_kernel(logits, roots, vocab, out, start, stop):
    """Rows start to stop: out[i, j] = (logits[i, j] - m) - log32(s); -inf from `vocab` on."""
    for i in range(start, stop):
        m, log_s = roots[i, 0], log32(roots[i, 1])
        x, y = logits[i], out[i]
        for j in range(vocab):
            y[j] = (x[j] - m) - log_s
        for j in range(vocab, y.size):
            y[j] = _LOW


@kernel
def finish_kernel(x, roots, out):
    """out[i] = (x[i] - m) - log32(s), with (m, s) = roots[i]."""
    for i in range(x.size):
        out[i] = (x[i] - roots[i, 0]) - log32(roots[i, 1])


@kernel
def choose_kernel(logits, targets, first, width, out):
    """out[i] = the logit of targets[i]; +0 where it is not among `width` columns from `first`."""
    for i in range(targets.size):
        at = targets[i] - first
        out[i] = logits[i, at] if 0 <= at < width else _ZERO


@kernel
def first_bad_kernel(roots):
    """First row whose (m, s) is no distribution, else -1."""
    for i in range(roots.shape[0]):
        m, s = roots[i, 0], roots[i, 1]
        if not (s > _ZERO and _LOW < m < -_LOW):
            return i
    return -1


@kernel
def selected_bwd_kernel(logits, roots, targets, grad, first, width, out, start, stop):
    """Rows start to stop: out = g * (onehot - exp32(x - m) * (1 / s)); +0 from `width` on."""
    for i in range(start, stop):
        m, inverse, g = roots[i, 0], _ONE / roots[i, 1], grad[i]
        x, d = logits[i], out[i]
        for j in range(width):
            d[j] = -g * (exp32(x[j] - m) * inverse)
        for j in range(width, d.size):
            d[j] = _ZERO
        at = targets[i] - first
        if 0 <= at < width:
            d[at] = d[at] + g


@kernel
def digest_kernel(logits, first, width, out, start, stop):
    """Rows start to stop: out[i] = (low, high) of `bits.mixsum`, column 0 at index `first`."""
    for i in range(start, stop):
        low, high = np.uint64(0), np.uint64(0)
        for j in range(width):
            bits = np.uint64(np.uint32(bits_of(logits[i, j])))
            seed = _mix((first + np.uint64(j)) * GOLDEN + GOLDEN)
            low += _mix(seed ^ bits)
            high += _mix((seed + M1) ^ (bits * M2 + GOLDEN))
        out[i, 0], out[i, 1] = low, high


def leaves(logits: torch.Tensor, cuts: list[tuple[int, int]]) -> torch.Tensor:
    """Contiguous logits fp32 [M, V], leaf bounds -> (m, s) fp32 [M, leaves, 2]."""
    out = torch.empty(logits.shape[0], len(cuts), 2)
    args = (logits.detach().numpy(), np.array(cuts, dtype=np.int64), out.numpy())
    columns = logits.shape[1]
    parallel_for(lambda a, b: leaf_kernel(*args, a, b), logits.shape[0], _grain(columns))
    return out


def fold(parts: torch.Tensor) -> torch.Tensor:
    """(m, s) fp32 [M, parts, 2], parts a power of two -> root (m, s) fp32 [M, 2]."""
    out = torch.empty(parts.shape[0], 2)
    fold_kernel(parts.numpy(), out.numpy(), 0, parts.shape[0])
    return out


def choose(logits: torch.Tensor, targets: torch.Tensor, first: int, width: int) -> torch.Tensor:
    """Logit of each target [M], +0 where another rank owns it; column 0 is entry `first`."""
    out = torch.empty(targets.shape[0])
    choose_kernel(logits.detach().numpy(), targets.numpy(), first, width, out.numpy())
    return out


def first_bad(roots: torch.Tensor) -> int:
    """The first row whose (m, s) is no distribution: NaN, infinite, or nothing left; else -1."""
    return int(first_bad_kernel(roots.numpy()))


def finish(x: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
    """Target logits [M] and roots [M, 2] -> log-probabilities [M]."""
    out = torch.empty(x.shape[0])
    finish_kernel(x.numpy(), roots.numpy(), out.numpy())
    return out


def log_probs(logits: torch.Tensor, roots: torch.Tensor, vocab: int) -> torch.Tensor:
    """Contiguous logits [M, V] and roots [M, 2] -> log-probabilities [M, V], -inf from `vocab`."""
    out = torch.empty_like(logits)
    args = (logits.detach().numpy(), roots.numpy(), vocab, out.numpy())
    columns = logits.shape[1]
    parallel_for(lambda a, b: log_probs_kernel(*args, a, b), logits.shape[0], _grain(columns))
    return out


def backward(
    logits: torch.Tensor,
    roots: torch.Tensor,
    targets: torch.Tensor,
    grad: torch.Tensor,
    first: int,
    width: int,
) -> torch.Tensor:
    """Gradient of the logits: grad * (onehot - softmax); column 0 is vocabulary entry `first`."""
    out = torch.empty_like(logits)
    inputs = (t.detach().numpy() for t in (logits, roots, targets, grad))
    args = (*inputs, first, width, out.numpy())
    columns = logits.shape[1]
    parallel_for(lambda a, b: selected_bwd_kernel(*args, a, b), logits.shape[0], _grain(columns))
    return out


def row_digests(logits: torch.Tensor, first: int, width: int) -> list[int]:
    """128-bit digests of the first `width` columns of each row; see `samebits.bits.mixsum`."""
    out = np.empty((logits.shape[0], 2), np.uint64)
    args = (logits.numpy(), np.uint64(first), width, out)
    columns = logits.shape[1]
    parallel_for(lambda a, b: digest_kernel(*args, a, b), logits.shape[0], _grain(columns))
    return [(int(high) << 64) | int(low) for low, high in out]
