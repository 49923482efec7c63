"""CPU kernels of `gdn`: both schedules row by row, with the state in slots.

Every sum is a chain over one index, vectorised over another (`axpy_tile`), so tiles move no
rounding. A task is one (sequence, key head): its value heads share the dot products of q and k, and
the key rows of the open chunk are written by nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from samebits.ops import jit
from samebits.ops.gdn_scalar import exp2_32
from samebits.ops.jit import fma, kernel
from samebits.ops.scalar import narrow, widen
from samebits.ops.vector import axpy_tile

CHUNK = 64
BLOCK = 16  # rows of one block of the triangular inverse
LOG2_E = np.float32(1.442695)
# dtype of o: a rounding of chunk_row's would be as large as all of its own.
OUTPUTS = {"chunk_row": torch.float32, "cpr": torch.bfloat16}
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)

_axpy_1 = axpy_tile(1, 2)
_axpy_2 = axpy_tile(2, 2)
_axpy_4 = axpy_tile(4, 2)


@kernel
def _chains(p, p_at, p_stride, rows, v, v_at, v_stride, terms, out, out_at, out_stride, width):
    """out[i, d] continues as an fma chain over p[i, j] v[j, d], j = 0 .. terms - 1; d < width."""
    for d in range(0, width, 16):
        i = 0
        while i < rows:
            pa, oa = p_at + i * p_stride, out_at + i * out_stride + d
            if i + 4 <= rows:
                _axpy_4(p, pa, p_stride, v, v_at + d, v_stride, terms, out, oa, out_stride)
                i += 4
            elif i + 2 <= rows:
                _axpy_2(p, pa, p_stride, v, v_at + d, v_stride, terms, out, oa, out_stride)
                i += 2
            else:
                _axpy_1(p, pa, p_stride, v, v_at + d, v_stride, terms, out, oa, out_stride)
                i += 1


@kernel
def _snapshot(source, target):
    """target = fp32 values of `source` rounded to bf16."""
    for i in range(source.size):
        target[i] = widen(narrow(source[i]))


@kernel
def _decays(gamma, i, out):
    for j in range(i + 1):
        out[j] = exp2_32(gamma[i] - gamma[j])


@kernel
def _update_row(i, kk, decay, reach, beta, v, kh, block, t, r, u, scratch):
    """Rows i of T, R and u of one chunk, into `t`, `r`, `u`; X of the open block into `block`.

    kk[j] = dot(k_i, k_j), decay[j] = exp2(gamma_i - gamma_j), reach = exp2(gamma_i), kh = the row
    dot(k_i, h); v the row's bf16 bits. `scratch` is fp32 of 4 * CHUNK + len(v).
    """
    size = v.size
    first = i // BLOCK * BLOCK
    minus = scratch[0:CHUNK]
    rounded = scratch[CHUNK : 2 * CHUNK]
    x = scratch[2 * CHUNK : 3 * CHUNK]
    weights = scratch[3 * CHUNK : 4 * CHUNK]
    total = scratch[4 * CHUNK : 4 * CHUNK + size]
    for j in range(i):
        value = beta * (kk[j] * decay[j])
        minus[j] = -value
        rounded[j] = widen(narrow(value))
    for c in range(CHUNK):
        x[c] = _ZERO
    _chains(rounded, 0, 0, 1, t, 0, CHUNK, first, x, 0, 0, first)
    for c in range(first):
        x[c] = _ZERO - x[c]
    x[i] = _ONE
    _chains(minus, first, 0, 1, block, 0, CHUNK, i - first, x, 0, 0, first + BLOCK)
    block_row = block[(i - first) * CHUNK : (i - first + 1) * CHUNK]
    t_row = t[i * CHUNK : (i + 1) * CHUNK]
    for c in range(CHUNK):
        half = narrow(x[c])
        block_row[c] = x[c]
        t_row[c] = half
        weights[c] = widen(half)
    r_row = r[i * size : (i + 1) * size]
    for d in range(size):
        r_row[d] = narrow(beta * (widen(v[d]) - reach * kh[d]))
        total[d] = _ZERO
    _chains(weights, 0, 0, 1, r, 0, size, i + 1, total, 0, 0, size)
    u_row = u[i * size : (i + 1) * size]
    for d in range(size):
        u_row[d] = narrow(total[d])


@kernel
def _close(k, u, gamma, h, keys, weighted):
    """h [K, V] becomes the state at the next boundary; k [K, CHUNK], u [CHUNK, V] bf16 bits.

    `keys` and `weighted` are fp32 scratch of the sizes of k and u.
    """
    size = u.size // CHUNK
    last = gamma[CHUNK - 1]
    reach = exp2_32(last)
    for i in range(k.size):
        keys[i] = widen(k[i])
    for j in range(CHUNK):
        decay = exp2_32(last - gamma[j])
        source = u[j * size : (j + 1) * size]
        target = weighted[j * size : (j + 1) * size]
        for d in range(size):
            target[d] = widen(narrow(widen(source[d]) * decay))
    for i in range(h.size):
        h[i] = h[i] * reach
    rows = k.size // CHUNK
    _chains(keys, 0, CHUNK, rows, weighted, 0, size, CHUNK, h, 0, size, size)


@kernel
def _chunk_row(
    q, k, v, g, beta, o, h_all, block_all, gamma_all, k_all, r_all, u_all, t_all, strides,
    slots, starts, phases, fresh, key_heads, group, key_size, size, scale, begin, end,
):  # fmt: skip
    heads = key_heads * group
    square = key_size * size
    pair = np.empty(2 * key_size, np.float32)
    dots = np.empty(2 * CHUNK, np.float32)
    snapshots = np.empty(group * square, np.float32)
    reads = np.empty(2 * size, np.float32)
    decay = np.empty(CHUNK, np.float32)
    scores = np.empty(CHUNK, np.float32)
    rest = np.empty(CHUNK, np.float32)
    scratch = np.empty(4 * CHUNK + size, np.float32)
    keys = np.empty(key_size * CHUNK, np.float32)
    weighted = np.empty(CHUNK * size, np.float32)
    for task in range(begin, end):
        sequence, key_head = task // key_heads, task % key_heads
        if starts[sequence] == starts[sequence + 1]:
            continue
        slot = slots[sequence]
        at = slot * strides[3] + key_head * key_size * CHUNK
        open_k = k_all[at : at + key_size * CHUNK]
        for m in range(group):
            at = slot * strides[0] + (key_head * group + m) * square
            h = h_all[at : at + square]
            if fresh[sequence]:
                h[:] = _ZERO
            _snapshot(h, snapshots[m * square : (m + 1) * square])
        i = phases[sequence]
        for token in range(starts[sequence], starts[sequence + 1]):
            at = (token * key_heads + key_head) * key_size
            for c in range(key_size):
                pair[c] = widen(q[at + c])
                pair[key_size + c] = widen(k[at + c])
                open_k[c * CHUNK + i] = k[at + c]
            dots[:] = _ZERO
            reachable = (i + 16) // 16 * 16  # whole vectors: what lies beyond i is not read
            _chains(pair, 0, key_size, 2, open_k, 0, CHUNK, key_size, dots, 0, CHUNK, reachable)
            for m in range(group):
                head = key_head * group + m
                at = slot * strides[0] + head * square
                h = h_all[at : at + square]
                at = slot * strides[1] + head * BLOCK * CHUNK
                block = block_all[at : at + BLOCK * CHUNK]
                at = slot * strides[2] + head * CHUNK
                gamma = gamma_all[at : at + CHUNK]
                at = slot * strides[4] + head * CHUNK * size
                r = r_all[at : at + CHUNK * size]
                at = slot * strides[5] + head * CHUNK * size
                u = u_all[at : at + CHUNK * size]
                at = slot * strides[6] + head * CHUNK * CHUNK
                t = t_all[at : at + CHUNK * CHUNK]
                at = token * heads + head
                step = g[at] * LOG2_E
                gamma[i] = step if i == 0 else gamma[i - 1] + step
                reach = exp2_32(gamma[i])
                _decays(gamma, i, decay)
                reads[:] = _ZERO
                at_m = m * square
                _chains(pair, 0, key_size, 2, snapshots, at_m, size, key_size, reads, 0, size, size)
                row_v = v[at * size : (at + 1) * size]
                _update_row(
                    i, dots[CHUNK:], decay, reach, beta[at], row_v, reads[size:],
                    block, t, r, u, scratch,
                )  # fmt: skip
                for j in range(i + 1):
                    exact = dots[j] * decay[j]
                    scores[j] = widen(narrow(exact))
                    rest[j] = widen(narrow(exact - scores[j]))
                row_o = o[at * size : (at + 1) * size]
                for d in range(size):
                    row_o[d] = reach * reads[d]
                _chains(rest, 0, 0, 1, u, 0, size, i + 1, row_o, 0, 0, size)
                _chains(scores, 0, 0, 1, u, 0, size, i + 1, row_o, 0, 0, size)
                for d in range(size):
                    row_o[d] = scale * row_o[d]
                if i == CHUNK - 1:
                    _close(open_k, u, gamma, h, keys, weighted)
                    _snapshot(h, snapshots[at_m : at_m + square])
            i = (i + 1) % CHUNK


@kernel
def _boundary(h, g, beta, k, v):
    """h [K, V] becomes chunk_row's state at the next boundary, from the chunk's raw rows."""
    size = v.size // CHUNK
    key_size = k.size // CHUNK
    rows_k = np.empty(CHUNK * key_size, np.float32)
    dots = np.zeros(CHUNK * CHUNK, np.float32)
    snapshot = np.empty(key_size * size, np.float32)
    reads = np.zeros(CHUNK * size, np.float32)
    gamma = np.empty(CHUNK, np.float32)
    decay = np.empty(CHUNK, np.float32)
    block = np.empty(BLOCK * CHUNK, np.float32)
    t = np.empty(CHUNK * CHUNK, np.uint16)
    r = np.empty(CHUNK * size, np.uint16)
    u = np.empty(CHUNK * size, np.uint16)
    scratch = np.empty(4 * CHUNK + size, np.float32)
    keys = np.empty(key_size * CHUNK, np.float32)
    weighted = np.empty(CHUNK * size, np.float32)
    for i in range(CHUNK):
        for c in range(key_size):
            rows_k[i * key_size + c] = widen(k[c * CHUNK + i])
    _chains(rows_k, 0, key_size, CHUNK, k, 0, CHUNK, key_size, dots, 0, CHUNK, CHUNK)
    _snapshot(h, snapshot)
    _chains(rows_k, 0, key_size, CHUNK, snapshot, 0, size, key_size, reads, 0, size, size)
    for i in range(CHUNK):
        step = g[i] * LOG2_E
        gamma[i] = step if i == 0 else gamma[i - 1] + step
        _decays(gamma, i, decay)
        _update_row(
            i, dots[i * CHUNK : (i + 1) * CHUNK], decay, exp2_32(gamma[i]), beta[i],
            v[i * size : (i + 1) * size], reads[i * size : (i + 1) * size],
            block, t, r, u, scratch,
        )  # fmt: skip
    _close(k, u, gamma, h, keys, weighted)


@kernel
def _recur(s, q, k, v, decay, beta, scale, o, read, total):
    """One step of the plain recurrence on s [K, V]; q, k fp32 rows, v and o bf16 bits."""
    size = v.size
    for d in range(size):
        read[d] = _ZERO
        total[d] = _ZERO
    for c in range(k.size):
        row = s[c * size : (c + 1) * size]
        for d in range(size):
            value = row[d] * decay
            row[d] = value
            read[d] = fma(value, k[c], read[d])
    for d in range(size):
        read[d] = beta * (widen(v[d]) - read[d])
    for c in range(k.size):
        row = s[c * size : (c + 1) * size]
        for d in range(size):
            value = fma(k[c], read[d], row[d])
            row[d] = value
            total[d] = fma(q[c], value, total[d])
    for d in range(size):
        o[d] = narrow(scale * total[d])


@kernel
def _cpr(
    q, k, v, g, beta, o, h_all, s_all, g_all, beta_all, k_all, v_all, strides,
    slots, starts, phases, fresh, key_heads, group, key_size, size, scale, begin, end,
):  # fmt: skip
    heads = key_heads * group
    square = key_size * size
    row_q = np.empty(key_size, np.float32)
    row_k = np.empty(key_size, np.float32)
    read = np.empty(size, np.float32)
    total = np.empty(size, np.float32)
    for task in range(begin, end):
        sequence, key_head = task // key_heads, task % key_heads
        if starts[sequence] == starts[sequence + 1]:
            continue
        slot = slots[sequence]
        at = slot * strides[4] + key_head * key_size * CHUNK
        open_k = k_all[at : at + key_size * CHUNK]
        if fresh[sequence]:
            at = slot * strides[0] + key_head * group * square
            h_all[at : at + group * square] = _ZERO
        i = phases[sequence]
        for token in range(starts[sequence], starts[sequence + 1]):
            at = (token * key_heads + key_head) * key_size
            for c in range(key_size):
                row_q[c] = widen(q[at + c])
                row_k[c] = widen(k[at + c])
                open_k[c * CHUNK + i] = k[at + c]
            for m in range(group):
                head = key_head * group + m
                at = slot * strides[0] + head * square
                h = h_all[at : at + square]
                at = slot * strides[1] + head * square
                s = s_all[at : at + square]
                at = slot * strides[2] + head * CHUNK
                open_g = g_all[at : at + CHUNK]
                at = slot * strides[3] + head * CHUNK
                open_beta = beta_all[at : at + CHUNK]
                at = slot * strides[5] + head * CHUNK * size
                open_v = v_all[at : at + CHUNK * size]
                at = token * heads + head
                row_v = v[at * size : (at + 1) * size]
                open_g[i], open_beta[i] = g[at], beta[at]
                open_v[i * size : (i + 1) * size] = row_v
                if i == 0:
                    s[:] = h
                decay = exp2_32(g[at] * LOG2_E)
                row_o = o[at * size : (at + 1) * size]
                _recur(s, row_q, row_k, row_v, decay, beta[at], scale, row_o, read, total)
                if i == CHUNK - 1:
                    _boundary(h, open_g, open_beta, open_k, open_v)
            i = (i + 1) % CHUNK


_KERNELS = {"chunk_row": _chunk_row, "cpr": _cpr}


def _span(x: torch.Tensor) -> np.ndarray:
    """Flat memory of a state tensor of which only dim 0 is strided; bf16 as uint16 bits."""
    slots, inner = x.shape[0], x.shape[1:].numel()
    reach = (slots - 1) * x.stride(0) + inner if slots else 0
    return jit.as_numpy(x.detach().as_strided((reach,), (1,)))


def advance(
    schedule: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: Sequence[torch.Tensor],
    slots: np.ndarray,
    starts: np.ndarray,
    phases: np.ndarray,
    fresh: np.ndarray,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Rows starts[r] .. starts[r + 1] of sequence r, whose state lies in slot slots[r], into `out`.

    phases [R] int64: position of the first row in its chunk. fresh [R] bool: the boundary state is
    zero, whatever the slot holds. All operands contiguous; `state` as in the package.
    """
    key_heads, key_size = k.shape[1:]
    heads, size = v.shape[1:]
    operands = [jit.as_numpy(x).reshape(-1) for x in (q, k, v, g, beta, out)]
    memory = [_span(x) for x in state]
    strides = np.array([x.stride(0) for x in state], np.int64)
    run = _KERNELS[schedule]
    tasks = (len(starts) - 1) * key_heads

    def body(begin: int, end: int) -> None:
        run(
            *operands, *memory, strides, slots, starts, phases, fresh,
            key_heads, heads // key_heads, key_size, size, np.float32(scale), begin, end,
        )  # fmt: skip

    jit.parallel_for(body, tasks)
