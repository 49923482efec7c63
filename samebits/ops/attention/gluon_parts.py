"""What the Gluon kernels of attention share: pieces of work, and rows brought into shared memory.

One block for each multiprocessor walks over pieces: some rows of one head of one packed sequence.
Pieces of short sequences, and those that a shorter sequence than the longest does not have, then
cost no start of a block.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

FIXED = 128  # rows of a piece, in two warpgroups
SIZES = (64, 128)  # head sizes


@gluon.jit
def exp2(x):
    """As `triton.exp2`."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def piece(round):
    """The number of a block's piece: there and back, so that long ones are spread."""
    n = gl.num_programs(0)
    i = gl.program_id(0)
    return round * n + gl.where(round % 2 == 0, i, n - 1 - i)


@gluon.jit
def place(work, starts_ptr, parts, heads, FIXED: gl.constexpr, DOWN: gl.constexpr):
    """(start, count, head, first row) of a piece: heads side by side, rows ascending or `DOWN`."""
    head = work % heads
    part = work // heads % parts
    if DOWN:
        part = parts - 1 - part
    sequence = work // (parts * heads)
    start = gl.load(starts_ptr + sequence)
    count = gl.load(starts_ptr + sequence + 1) - start
    return start, count, head, part * FIXED


@gluon.jit
def fetch(desc, row, column, room, ready):
    """Ask for two halves of the rows that stay."""
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(
            desc, [row + half * room.shape[1], column], ready, room.index(half)
        )


@gluon.jit
def copy(ptr, stride, room, start, first, count, ROWS: gl.constexpr, D: gl.constexpr):
    """Rows first .. of a sequence by ordinary stores, zeros from `count` on."""
    across: gl.constexpr = D // 8
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    CHUNK: gl.constexpr = 16
    d = gl.arange(0, D, gl.SliceLayout(0, by_rows))
    for part in gl.static_range(ROWS // CHUNK):
        j = first + part * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, by_rows))
        at = ptr + (start + j).to(gl.int64)[:, None] * stride + d[None, :]
        x = gl.load(at, mask=(j < count)[:, None] & (d >= 0)[None, :], other=0.0)
        room.slice(part * CHUNK, CHUNK).store(x)


def blocks(matrix: torch.Tensor, rows: int, size: int) -> TensorDescriptor:
    """`matrix` [T, N D] to be read in blocks of `rows` tokens of one head of `size`."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, size], gl.bfloat16)
    return TensorDescriptor.from_tensor(matrix, [rows, size], layout)
