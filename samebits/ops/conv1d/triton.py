"""Causal convolution and silu on Hopper: the operations of `reference.py`, so the CPU's bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.device import sigmoid32

BLOCK = 512  # channels in one block; moves no bit


@triton.jit
def _rows(
    x_ptr, weight_ptr, window_ptr, window_slot, wide_ptr, y_ptr, owner_ptr, starts_ptr,
    context_ptr, slots_ptr, sequences, exact, C, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, BLOCK channels; the first `exact` of all go to wide_ptr, unrounded."""
    token = tl.program_id(0)
    sequence = tl.load(owner_ptr + token)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    unrounded = c < exact
    rounded = inside & (c >= exact)
    wide_at = wide_ptr + token.to(tl.int64) * exact + c
    y_at = y_ptr + token.to(tl.int64) * (C - exact) + c - exact
    if sequence < sequences:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        start = tl.load(starts_ptr + sequence)
        index = token - start
        held = tl.load(context_ptr + sequence) > 0
        acc = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(0, W):
            row = index - (W - 1) + j  # of the sequence
            new = inside & (row >= 0)
            old = inside & (row < 0) & held
            x = tl.load(x_ptr + (start + row).to(tl.int64) * C + c, mask=new, other=0.0)
            old_at = window_ptr + slot * window_slot + (index + j) * C + c
            x = tl.where(old, tl.load(old_at, mask=old, other=0.0), x).to(tl.float32)
            weight = tl.load(weight_ptr + c * W + j, mask=inside, other=0.0).to(tl.float32)
            acc = tl.fma(weight, x, acc)
        y = acc * sigmoid32(acc)
        tl.store(wide_at, y, mask=unrounded)
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=rounded)
    else:
        tl.store(wide_at, tl.zeros((BLOCK,), tl.float32), mask=unrounded)
        tl.store(y_at, tl.zeros((BLOCK,), y_ptr.dtype.element_ty), mask=rounded)


@triton.jit
def _shift(
    x_ptr, window_ptr, window_slot, starts_ptr, context_ptr, slots_ptr, C,
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
            x = tl.load(x_ptr + (start + row).to(tl.int64) * C + c, mask=new, other=0.0)
            x = tl.where(old, tl.load(at + (count + j) * C, mask=old, other=0.0), x)
            tl.store(at + j * C, x, mask=inside)


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

    Contiguous x and weight, window strided in dim 0 only, tables on the same device: nothing is
    checked, and the host reads no table.
    """
    starts, context, slots = (t.to(torch.int32) for t in (query_start_loc, context_lens, slots))
    tokens, channels = x.shape
    wide = x.new_empty((tokens, exact), dtype=torch.float32)
    y = x.new_empty((tokens, channels - exact))
    rows = torch.arange(tokens, device=x.device, dtype=torch.int32)
    owner = torch.searchsorted(starts[1:].contiguous(), rows, right=True, out_int32=True)
    shape = {"W": weight.shape[1], "BLOCK": BLOCK, "num_warps": 4} | gpu.POLICY
    parts = triton.cdiv(channels, BLOCK)
    if tokens and len(slots):
        _rows[(tokens, parts)](
            x, weight, window, window.stride(0), wide, y, owner, starts, context, slots,
            len(slots), exact, channels, **shape,
        )  # fmt: skip
        _shift[(len(slots), parts)](
            x, window, window.stride(0), starts, context, slots, channels, **shape
        )
        return wide, y
    return wide.zero_(), y.zero_()
