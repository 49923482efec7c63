"""Causal convolution and silu on Hopper: the operations of `reference.py`, so the CPU's bits."""

# Values by tap are tuples that grow: Triton adds tuples, and knows no starred ones.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.silu_mul.triton import silu_product

# None of these moves a bit.
BLOCK = 256  # channels of one block
ROWS, WARPS = 8, 4  # of a tile
TILES, MANY = 8, 2048  # of one block, one after the other, from MANY rows on
STEP_WARPS = 2


@triton.jit
def taps(weight_ptr, c, inside, W: tl.constexpr):
    """Weights of channels c, fp32, tap 0 first."""
    if W == 4:  # neighbours, read at once
        four = c[:, None] * 4 + tl.arange(0, 4)[None, :]
        four = tl.load(weight_ptr + four, mask=inside[:, None], other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(four, (c.shape[0], 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        found = (first, second, third, fourth)
    else:
        found = ()
        for j in tl.static_range(0, W):
            tap = tl.load(weight_ptr + c * W + j, mask=inside, other=0.0)
            found = found + (tap.to(tl.float32),)
    return found


@triton.jit
def owners(starts_ptr, t, sequences):
    """The sequence of each row t, by bisection; `sequences` behind the last one."""
    low = tl.zeros(t.shape, tl.int32)
    high = low + sequences
    left = sequences
    while left > 0:
        searching = low < high
        middle = (low + high) >> 1
        past = tl.load(starts_ptr + middle + 1, mask=searching, other=0) <= t
        low = tl.where(searching & past, middle + 1, low)
        high = tl.where(searching & ~past, middle, high)
        left = left >> 1
    return low


@triton.jit
def _store(y, wide_at, y_at, unrounded, rounded):
    """The first channels in fp32, the others rounded."""
    tl.store(wide_at, y, mask=unrounded)
    tl.store(y_at, y.to(y_at.dtype.element_ty), mask=rounded)


@triton.jit(do_not_specialize=["T", "sequences"])
def _rows(
    x_ptr, x_row, weight_ptr, window_ptr, window_slot, wide_ptr, y_ptr, starts_ptr, context_ptr,
    slots_ptr, T, sequences, exact, C,
    HELD: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows and BLOCK channels; with HELD rows before a step are in the window."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    unrounded = c < exact
    rounded = inside & (c >= exact)
    weight = taps(weight_ptr, c, inside, W)
    for tile in range(TILES):
        t = (tl.program_id(1) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        owner = owners(starts_ptr, t, sequences)
        valid = (t < T) & (owner < sequences)
        start = tl.load(starts_ptr + owner, mask=valid, other=0)
        if HELD:
            held = tl.load(context_ptr + owner, mask=valid, other=0) > 0
            slot = tl.load(slots_ptr + owner, mask=valid, other=0).to(tl.int64)
        acc = tl.zeros((ROWS, BLOCK), tl.float32)
        for j in tl.static_range(0, W):
            row = t - (W - 1) + j
            known = valid & (row >= start)
            at = x_ptr + row.to(tl.int64) * x_row
            if HELD:
                old = window_ptr + slot * window_slot + (t - start + j) * C
                at = tl.where(row >= start, at, old)
                known = valid & ((row >= start) | held)
            x = tl.load(at[:, None] + c[None, :], mask=known[:, None] & inside[None, :], other=0.0)
            acc = tl.fma(tl.broadcast_to(weight[j][None, :], (ROWS, BLOCK)), x.to(tl.float32), acc)
        y = tl.where(valid[:, None], silu_product(acc, 1.0), 0.0)
        here, at = (t < T)[:, None], t.to(tl.int64)[:, None]
        wide_at = wide_ptr + at * exact + c[None, :]
        y_at = y_ptr + at * (C - exact) + (c - exact)[None, :]
        _store(y, wide_at, y_at, here & unrounded[None, :], here & rounded[None, :])


@triton.jit
def _shift(
    x_ptr, x_row, window_ptr, window_slot, starts_ptr, context_ptr, slots_ptr, C,
    W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The window behind a sequence's last row. A thread keeps to its channels and rows ascend, so
    a row is read before the next one overwrites it."""
    sequence = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    held = tl.load(context_ptr + sequence) > 0
    if count > 0:
        at = window_ptr + slot * window_slot + c
        for j in tl.static_range(0, W - 1):
            row = count - (W - 1) + j
            new = inside & (row >= 0)
            old = inside & (row < 0) & held
            x = tl.load(x_ptr + (start + row).to(tl.int64) * x_row + c, mask=new, other=0.0)
            x = tl.where(old, tl.load(at + (count + j) * C, mask=old, other=0.0), x)
            tl.store(at + j * C, x, mask=inside)


@triton.jit(do_not_specialize=["T", "sequences"])
def _steps(
    x_ptr, x_row, weight_ptr, window_ptr, window_slot, wide_ptr, y_ptr, starts_ptr, context_ptr,
    slots_ptr, T, sequences, exact, C, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All rows of one sequence, one after the other, and its window; for T = sequences.

    Rows behind the last sequence are fewer than sequences: each block clears one of them.
    """
    sequence = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    unrounded = c < exact
    rounded = inside & (c >= exact)
    start = tl.load(starts_ptr + sequence)
    stop = tl.load(starts_ptr + sequence + 1)
    behind = tl.load(starts_ptr + sequences) + sequence
    if start < stop:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        held = tl.load(context_ptr + sequence) > 0
        at = window_ptr + slot * window_slot + c
        before = ()  # rows above the next one, the oldest first
        for j in tl.static_range(0, W - 1):
            before = before + (tl.load(at + j * C, mask=inside & held, other=0.0),)
        weight = taps(weight_ptr, c, inside, W)
        for i in range(stop - start):
            row = start.to(tl.int64) + i
            x = tl.load(x_ptr + row * x_row + c, mask=inside, other=0.0)
            seen = before + (x,)
            acc = tl.zeros((BLOCK,), tl.float32)
            for j in tl.static_range(0, W):
                acc = tl.fma(weight[j], seen[j].to(tl.float32), acc)
            y_at = y_ptr + row * (C - exact) + c - exact
            _store(silu_product(acc, 1.0), wide_ptr + row * exact + c, y_at, unrounded, rounded)
            before = seen[1:]
        for j in tl.static_range(0, W - 1):
            tl.store(at + j * C, before[j], mask=inside)
    if behind < T:
        row = behind.to(tl.int64)
        y_at = y_ptr + row * (C - exact) + c - exact
        zero = tl.zeros((BLOCK,), tl.float32)
        _store(zero, wide_ptr + row * exact + c, y_at, unrounded, rounded)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    exact: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [T, exact] fp32, y [T, C - exact]) of `conv1d.advance`, whose effects it has.

    Rows of x of any stride, contiguous weight, window strided in dim 0 only, tables on the same
    device: nothing is checked, and the host reads no table.
    """
    starts, context, slots = (t.to(torch.int32) for t in (query_start_loc, context_lens, slots))
    (tokens, channels), count = x.shape, weight.shape[1]
    wide, y = _outputs(x, exact)
    sequences = len(slots)
    if not tokens or not sequences:
        return wide.zero_(), y.zero_()
    parts = triton.cdiv(channels, BLOCK)
    state = window, window.stride(0)
    tables = starts, context, slots
    if tokens == sequences:
        _steps[(parts, sequences)](
            x, x.stride(0), weight, *state, wide, y, *tables, tokens, sequences, exact, channels,
            W=count, BLOCK=BLOCK, num_warps=STEP_WARPS, **gpu.POLICY,
        )  # fmt: skip
        return wide, y
    _launch_rows(x, weight, state, wide, y, tables, sequences)
    _shift[(sequences, parts)](
        x, x.stride(0), *state, *tables, channels,
        W=count, BLOCK=BLOCK, num_warps=STEP_WARPS, **gpu.POLICY,
    )  # fmt: skip
    return wide, y


def packed(
    x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, exact: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`launch` for whole sequences, which start from zeros and leave no window; starts int32."""
    wide, y = _outputs(x, exact)
    if len(x):
        none = None, 0
        _launch_rows(x, weight, none, wide, y, (starts, None, None), len(starts) - 1)
    return wide, y


def _outputs(x: torch.Tensor, exact: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, channels = x.shape
    wide = x.new_empty((tokens, exact), dtype=torch.float32)
    return wide, x.new_empty((tokens, channels - exact))


def _launch_rows(x, weight, state, wide, y, tables, sequences: int) -> None:
    (tokens, channels), exact = x.shape, wide.shape[1]
    tiles = TILES if tokens >= MANY else 1
    grid = (triton.cdiv(channels, BLOCK), triton.cdiv(tokens, ROWS * tiles))
    _rows[grid](
        x, x.stride(0), weight, *state, wide, y, *tables, tokens, sequences, exact, channels,
        HELD=state[0] is not None, W=weight.shape[1], TILES=tiles, ROWS=ROWS, BLOCK=BLOCK,
        num_warps=WARPS, **gpu.POLICY,
    )  # fmt: skip
