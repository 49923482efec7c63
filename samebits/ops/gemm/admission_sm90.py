"""Tiles for shapes outside of the pinned table: a few pinned geometries, admitted by a bit test.

A tile moves no bit (`samebits/ops/GPU.md`), but no tile is used on trust. The first time that a
process meets a shape (N, K, leaves, output), every geometry that may serve it computes hostile
operands and is held, bit for bit, to the smallest kernel of the schedule. What passed is listed.
"""

from __future__ import annotations

import dataclasses
import threading

import torch

from samebits.errors import Refused
from samebits.ops import gpu
from samebits.ops.gemm import smallest_sm90
from samebits.ops.gemm.operands_sm90 import KINDS, bias_for, differing, operands, source
from samebits.ops.gemm.triton import OUTPUTS, Shape, Tile, launch, table
from samebits.plan import ReductionPlan

STEP = 16  # terms of one MMA: no step of a tile is shorter
ALIGNED = 8  # bf16 elements in the 16 bytes that descriptors count in
LAW_ROWS = 520
_ANY = 1 << 31

# By ascending M; each is in the pinned table for some shape. Two accumulators of 128 x 128 are all
# that the registers hold, so more leaves take smaller tiles.
FEW_LEAVES = (
    Tile(8, "tiles", bm=8, bn=64, bk=128, warps=4, stages=5, swap=1),
    Tile(64, "tiles", bm=64, bn=64, bk=128, warps=4, stages=5),
    Tile(256, "tiles", bm=64, bn=128, bk=128, warps=4, stages=4),
    Tile(_ANY, "tiles", bm=128, bn=128, bk=64, warps=8, stages=5, blocks=1, parts=2),
)
MANY_LEAVES = (
    *FEW_LEAVES[:1],
    Tile(_ANY, "tiles", bm=64, bn=64, bk=64, warps=4, stages=6),
)


@dataclasses.dataclass(frozen=True)
class Admission:
    """A shape whose tiles passed: sizes, dtype of the output, whether with a bias, elements
    compared, none differing."""

    n: int
    k: int
    leaves: int
    output: str
    bias: bool
    elements: int
    tiles: tuple[Tile, ...]


_admitted: dict[tuple[Shape, bool], Admission] = {}
_lock = threading.Lock()


def admitted() -> tuple[Admission, ...]:
    """What this process admitted so far, in order."""
    return tuple(_admitted.values())


def tiles_of(shape: Shape) -> tuple[Tile, ...]:
    """Geometries for a shape, by ascending `rows`; SB0453 where none can compute it.

    A step must not cross the end of a leaf. With one leaf its end is that of the row, beyond which
    descriptors read zeros.
    """
    _, k, leaves, _ = shape
    length = ReductionPlan(leaves).cuts(k)[0][1]
    if k % ALIGNED or leaves > 8 or (leaves > 1 and length % STEP):
        raise Refused(
            "SB0453",
            seen=f"K = {k}, {leaves} leaves",
            required=f"K a multiple of {ALIGNED}, and of {STEP} times the leaves if more than one; "
            "at most 8 leaves",
            hint="samebits explain SB0453",
        )
    # Loops of a single step are not pipelined: the operands of all leaves then lie side by side.
    longest = max(STEP, min(length & -length, length // 2)) if leaves > 1 else 128
    found = FEW_LEAVES if leaves <= 2 else MANY_LEAVES
    return tuple(dataclasses.replace(tile, bk=min(tile.bk, longest)) for tile in found)


def biased_tiles_of(shape: Shape) -> tuple[Tile, ...]:
    """As `tiles_of`, for a product with a bias: first the pinned tiles of the shape without one.

    Those are pinned for their speed. Nobody tested them with a bias, so they are tested here.
    """
    pinned = table().get(shape, ())
    most = max((tile.rows for tile in pinned), default=0)
    return *pinned, *(tile for tile in tiles_of(shape) if tile.rows > most)


def tile_for(m: int, shape: Shape, biased: bool = False) -> Tile:
    """The geometry for M rows; tests the shape first where that has not happened."""
    return next(tile for tile in _admission(shape, biased).tiles if m <= tile.rows)


def admit(
    n: int, k: int, leaves: int, dtype: torch.dtype = torch.bfloat16, biased: bool = False
) -> None:
    """Test the tiles of a shape once in this process, on the current GPU, unless it is pinned.

    k       terms of this process's sum, and leaves those of its subtree
    dtype   fp32 for `lm_head`, and for `row_parallel` over several ranks
    biased  whether a bias is added: no such shape is pinned
    Reads results back, so it cannot be part of a capture (SB0454). Takes seconds where kernels are
    to be compiled. Refuses with SB0453 what no tile can compute, with SB0455 a tile whose bits are
    not those of the smallest kernel.
    """
    shape = (n, k, leaves, dtype)
    if biased or shape not in table():
        _admission(shape, biased)


def _admission(shape: Shape, biased: bool) -> Admission:
    n, k, leaves, dtype = shape
    key = shape, biased
    with _lock:
        if key not in _admitted:
            if torch.cuda.is_current_stream_capturing():
                raise Refused(
                    "SB0454",
                    seen=f"N = {n}, K = {k}, {leaves} leaves met during a capture",
                    required="a call of samebits.ops.gemm.sm90.admit, or one product, before it",
                    hint="samebits explain SB0454",
                )
            tiles = biased_tiles_of(shape) if biased else tiles_of(shape)
            output = {dtype: name for name, dtype in OUTPUTS.items()}[dtype]
            elements = sum(_tested(kind, shape, tiles, biased) for kind in KINDS)
            # Operands of an output layer are gigabytes, and other processes share the GPU.
            torch.cuda.empty_cache()
            _admitted[key] = Admission(n, k, leaves, output, biased, elements, tiles)
        return _admitted[key]


def rows_of(tiles: tuple[Tile, ...], n: int, processors: int) -> list[tuple[Tile, int]]:
    """(tile, M) to test: one row, rows that leave a tile unfilled, whole tiles, and so many that
    every block of a tile with `blocks` walks more than one."""
    found, low = [], 1
    for tile in tiles:
        high = min(tile.rows, low + 2 * tile.bm)
        found += [(tile, m) for m in sorted({low, (low + high) // 2, high})]
        if tile.blocks:
            across = -(-n // tile.bn)
            found.append((tile, tile.bm * (2 * tile.blocks * processors // across + 1)))
        low = tile.rows + 1
    return found


def output(m: int, n: int, dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Memory for y [m, n]; more columns where a row would not be whole multiples of 16 bytes."""
    return x.new_empty((m, -(-n // ALIGNED) * ALIGNED), dtype=dtype)


@torch.no_grad()
def _tested(kind: str, shape: Shape, tiles: tuple[Tile, ...], biased: bool) -> int:
    """Elements compared on one kind of operands; SB0455 for a difference."""
    n, k, leaves, dtype = shape
    random = source(len(kind) + n + k)
    x, w = operands(kind, LAW_ROWS, n, k, random)
    bias = bias_for(kind, n, random) if biased else None
    root = smallest_sm90.accumulate(x, w, ReductionPlan(leaves))
    law = (root if bias is None else root + bias.float()).to(dtype)
    todo = rows_of(tiles, n, gpu.prepare(torch.cuda.current_device()))
    wrong = []
    for tile, m in todo:
        rows = torch.arange(m, device=x.device) % LAW_ROWS  # copies: each must keep its bits
        y = output(m, n, dtype, x)
        launch(tile, x[rows], w, y, leaves, bias)
        wrong.append(differing(y[:, :n].contiguous(), law[rows]))
    for (tile, m), count in zip(todo, torch.stack(wrong).tolist(), strict=True):
        if count:
            raise Refused(
                "SB0455",
                seen=f"{kind}: {count} elements differ at M = {m}, N = {n}, K = {k}, {leaves} "
                f"leaves{', a bias' if biased else ''}, with {tile}",
                required="the bits of the smallest kernel of the schedule",
                hint="samebits doctor",
            )
    return n * sum(m for _, m in todo)
