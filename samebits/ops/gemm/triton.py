"""Matrix products on Hopper; the schedule is `sm90` in the README, the law `reference_sm90.py`.

`launch` computes one product with one tile. Tiles are pinned in `tiles_sm90.json`, one entry for
each (N, K, leaves, output, range of M), every one admitted by the bit gates of
`samebits.bench.gpu`; what they do not cover, `admission_sm90` does.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from samebits.ops import gpu
from samebits.ops.gemm import gluon_leaves
from samebits.ops.gemm import kernels_sm90 as kernels
from samebits.plan import ReductionPlan

OUTPUTS = {"bf16": torch.bfloat16, "fp32": torch.float32}
# N, K, leaves, dtype of the output.
Shape = tuple[int, int, int, torch.dtype]


@dataclasses.dataclass(frozen=True)
class Tile:
    """How to launch one (N, K, leaves) for M up to `rows`. None of this moves a bit.

    kind      tiles, subtrees or serial: a kernel of `kernels_sm90`; gluon: `gluon_leaves`
    inner     leaves that a block folds in registers, where the kind is subtrees or serial
    swap      1: the weights are the left operand of the MMA
    blocks    blocks per multiprocessor that walk the tiles; 0: one block for each tile
    flatten   loads of the next tile start before the last one is stored
    parts     pieces of columns in which a tile is stored
    """

    rows: int
    kind: str
    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: int = 0
    blocks: int = 0
    flatten: int = 0
    parts: int = 1
    group: int = 8
    inner: int = 1


@functools.cache
def table() -> dict[Shape, tuple[Tile, ...]]:
    """Shape -> tiles, by ascending `rows`."""
    entries = json.loads(Path(__file__).with_name("tiles_sm90.json").read_text())
    return {
        (entry["n"], entry["k"], entry["leaves"], OUTPUTS[entry.get("output", "bf16")]): tuple(
            Tile(**t) for t in entry["tiles"]
        )
        for entry in entries
    }


def tile_for(m: int, shape: Shape) -> Tile | None:
    """The pinned tile; None where the table has none."""
    return next((tile for tile in table().get(shape, ()) if m <= tile.rows), None)


def launch(
    tile: Tile,
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    leaves: int,
    bias: torch.Tensor | None = None,
) -> None:
    """y [M, N] = x [M, K] times w [N, K], transposed: folded leaves, rounded to the dtype of y.

    x and w bf16, y bf16 or fp32, on the current CUDA device, contiguous, from 16-byte aligned
    addresses; M > 0. Columns of y beyond the rows of w come out as +0.

    bias   bf16, one for each row of w, contiguous, added in fp32 before the rounding; only where
           the kind of the tile is `tiles`, as it is with one leaf
    """
    assert bias is None or tile.kind == "tiles", tile
    if tile.kind == "gluon":
        gluon_leaves.launch(tile, x, w, y, leaves)
        return
    processors = gpu.prepare(x.device.index or 0)
    (m, k), n = x.shape, y.shape[1]
    count = triton.cdiv(m, tile.bm) * triton.cdiv(n, tile.bn)
    blocks = min(count, processors * tile.blocks) if tile.blocks else count
    x_desc = _descriptor(x, tile.bm, tile.bk)
    w_desc = _descriptor(w, tile.bn, tile.bk)
    length = ReductionPlan(leaves).cuts(k)[0][1]
    sizes = {"LENGTH": length, "BM": tile.bm, "BN": tile.bn, "BK": tile.bk}
    if tile.kind == "tiles":
        sizes |= {"LEAVES": leaves}
    else:
        sizes |= {"INNER": tile.inner, "COUNT": leaves // tile.inner}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, **gpu.POLICY}
    if tile.kind == "subtrees":
        part = y.new_empty(count * sizes["COUNT"] * tile.bm * tile.bn, dtype=torch.float32)
        arrived = y.new_zeros(count, dtype=torch.int32)
        kernels.subtrees[(count, sizes["COUNT"])](
            x_desc, w_desc, y, part, arrived, m, n, **sizes, SWAP=tile.swap, **options
        )
        return
    y_desc = _descriptor(y, tile.bm, tile.bn // tile.parts)
    if tile.kind == "serial":
        part = y.new_empty(blocks * 3 * tile.bm * tile.bn, dtype=torch.float32)
        kernels.serial[(blocks,)](
            x_desc, w_desc, y_desc, part, m, n,
            **sizes, GROUP=tile.group, PARTS=tile.parts, **options,
        )  # fmt: skip
        return
    kernels.tiles[(blocks,)](
        x_desc, w_desc, y_desc, None if bias is None else _padded(bias, n), m, n,
        **sizes, GROUP=tile.group, SWAP=tile.swap, FLATTEN=bool(tile.flatten),
        PARTS=tile.parts, **options,
    )  # fmt: skip


def _padded(bias: torch.Tensor, columns: int) -> torch.Tensor:
    """The bias at an aligned address, so that one kernel serves all, and zeros up to `columns`."""
    if len(bias) == columns and bias.data_ptr() % 16 == 0:
        return bias
    return torch.nn.functional.pad(bias, (0, columns - len(bias))).clone()


def _descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    # The stride of a single row may be anything; the descriptor's must be a multiple of 16 bytes.
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [rows, columns])
