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
BLOCK, WARPS = 256, 2  # channels of one block
ROWS, FEW, MANY = 64, 8, 2048  # rows of one block: ROWS of MANY or more, else FEW
STEP = 4  # rows that are loaded at once
PLACES = 512  # rows of a block of `_places`


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


@triton.jit(do_not_specialize=["T", "sequences"])
def _places(
    starts_ptr, context_ptr, slots_ptr, place_ptr, held_ptr, T, sequences,
    HELD: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """place[t]: t's row in its own sequence, which is found by bisection; -1 without one.

    With HELD held[t] is the slot of a window that has rows which t reads, -1 where there is none.
    """
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + sequences
    left = sequences
    while left > 0:
        searching = low < high
        middle = (low + high) >> 1
        past = tl.load(starts_ptr + middle + 1, mask=searching, other=0) <= t
        low = tl.where(searching & past, middle + 1, low)
        high = tl.where(searching & ~past, middle, high)
        left = left >> 1
    owned = low < sequences
    place = tl.where(owned, t - tl.load(starts_ptr + low, mask=owned, other=0), -1)
    tl.store(place_ptr + t, place, mask=t < T)
    if HELD:
        near = owned & (place < W - 1)
        near = near & (tl.load(context_ptr + low, mask=near, other=0) > 0)
        tl.store(held_ptr + t, tl.load(slots_ptr + low, mask=near, other=-1), mask=t < T)


@triton.jit
def lagged(x, place, before, W: tl.constexpr):
    """x of a row and of the W - 1 above it, by lag; zero where these are of another sequence."""
    found = (x,)
    for lag in tl.static_range(1, W):
        found = found + (tl.where(place >= lag, before[lag - 1], 0.0),)
    return found


@triton.jit
def _store(y, wide_at, y_at, unrounded, rounded):
    """The first channels in fp32, the others rounded."""
    tl.store(wide_at, y, mask=unrounded)
    tl.store(y_at, y.to(y_at.dtype.element_ty), mask=rounded)


@triton.jit(do_not_specialize=["T"])
def _rows(
    x_ptr, x_row, weight_ptr, window_ptr, window_slot, wide_ptr, y_ptr, place_ptr, held_ptr, T,
    exact, C,
    HELD: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of BLOCK channels, one after the other; the W - 1 last ones stay in registers."""
    first = tl.program_id(1).to(tl.int64) * ROWS
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    unrounded = c < exact
    rounded = inside & (c >= exact)
    weight = taps(weight_ptr, c, inside, W)
    before = ()  # the nearest row first
    for lag in tl.static_range(1, W):
        above = first - lag
        old = tl.load(x_ptr + above * x_row + c, mask=inside & (above >= 0), other=0.0)
        before = before + (old.to(tl.float32),)
    for step in range(0, ROWS, STEP):
        xs, places, olds = (), (), ()
        for i in tl.static_range(0, STEP):  # all loads before any store
            row = first + step + i
            here = row < T
            place = tl.load(place_ptr + row, mask=here, other=-1)
            x = tl.load(x_ptr + row * x_row + c, mask=inside & here, other=0.0)
            xs = xs + (x.to(tl.float32),)
            places = places + (place,)
            windows = ()
            if HELD:
                held = tl.load(held_ptr + row, mask=here, other=-1)
                for lag in tl.static_range(1, W):
                    known = inside & (held >= 0) & (place < lag)
                    at = window_ptr + held.to(tl.int64) * window_slot
                    at = at + (place + W - 1 - lag) * C + c
                    window = tl.load(at, mask=known, other=0.0)
                    windows = windows + (window.to(tl.float32),)
            olds = olds + (windows,)
        for i in tl.static_range(0, STEP):
            seen = lagged(xs[i], places[i], before, W)
            acc = tl.zeros((BLOCK,), tl.float32)
            for j in tl.static_range(0, W):
                tap = seen[W - 1 - j]
                if HELD and j < W - 1:
                    tap = tl.where(places[i] >= W - 1 - j, tap, olds[i][W - 2 - j])
                acc = tl.fma(weight[j], tap, acc)
            y = tl.where(places[i] >= 0, silu_product(acc, 1.0), 0.0)
            row = first + step + i
            here = row < T
            y_at = y_ptr + row * (C - exact) + c - exact
            _store(y, wide_ptr + row * exact + c, y_at, unrounded & here, rounded & here)
            before = ((xs[i],) + before)[: W - 1]


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
            W=count, BLOCK=BLOCK, num_warps=WARPS, **gpu.POLICY,
        )  # fmt: skip
        return wide, y
    table = places(starts, tokens, count, (context, slots))
    _launch_rows(x, weight, state, wide, y, table)
    _shift[(sequences, parts)](
        x, x.stride(0), *state, *tables, channels,
        W=count, BLOCK=BLOCK, num_warps=WARPS, **gpu.POLICY,
    )  # fmt: skip
    return wide, y


def packed(
    x: torch.Tensor, weight: torch.Tensor, place: torch.Tensor, exact: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`launch` for whole sequences, which start from zeros and leave no window; see `places`."""
    wide, y = _outputs(x, exact)
    if len(x):
        _launch_rows(x, weight, (None, 0), wide, y, (place, None))
    return wide, y


def places(
    starts: torch.Tensor,
    tokens: int,
    taps: int,
    state: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(place, held) of each row, [T] int32, as in `_places`; all operands are int32.

    starts [R + 1]; state: context and slots, both [R]; without it held is None.
    """
    place = torch.empty(tokens, dtype=torch.int32, device=starts.device)
    held = None if state is None else torch.empty_like(place)
    if tokens:
        _places[(triton.cdiv(tokens, PLACES),)](
            starts, *(state or (None, None)), place, held, tokens, len(starts) - 1,
            HELD=state is not None, W=taps, BLOCK=PLACES, num_warps=4, **gpu.POLICY,
        )  # fmt: skip
    return place, held


def _outputs(x: torch.Tensor, exact: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, channels = x.shape
    wide = x.new_empty((tokens, exact), dtype=torch.float32)
    return wide, x.new_empty((tokens, channels - exact))


def _launch_rows(x, weight, state, wide, y, table) -> None:
    (tokens, channels), exact = x.shape, wide.shape[1]
    rows = ROWS if tokens >= MANY else FEW
    _rows[(triton.cdiv(channels, BLOCK), triton.cdiv(tokens, rows))](
        x, x.stride(0), weight, *state, wide, y, *table, tokens, exact, channels,
        HELD=state[0] is not None, W=weight.shape[1], ROWS=rows, STEP=STEP, BLOCK=BLOCK,
        num_warps=WARPS, **gpu.POLICY,
    )  # fmt: skip
