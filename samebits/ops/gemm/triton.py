"""Matrix products on Hopper; the schedule is `sm90` in the README, the law `reference_sm90.py`.

Operands are contiguous bf16 CUDA tensors, x [M, K] and w [N, K]. Anything else is refused (SB0420
dtype or device, SB0421 shape). Tiles come from `tiles_sm90.json`, one entry for each (N, K,
leaves, range of M), every one admitted by the bit gates of `samebits.bench.gpu`; a shape outside
the table is refused (SB0453).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from samebits.errors import Refused
from samebits.ops import gpu
from samebits.ops.gemm import kernels_sm90 as kernels
from samebits.plan import ReductionPlan


@dataclasses.dataclass(frozen=True)
class Tile:
    """How to launch one (N, K, leaves) for M up to `rows`. None of this moves a bit.

    kind      tiles, subtrees or serial: a kernel of `kernels_sm90`
    inner     leaves that a block folds in registers, where the kind is not `tiles`
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
def table() -> dict[tuple[int, int, int], tuple[Tile, ...]]:
    """(N, K, leaves) -> tiles, by ascending `rows`."""
    entries = json.loads(Path(__file__).with_name("tiles_sm90.json").read_text())
    return {
        (entry["n"], entry["k"], entry["leaves"]): tuple(Tile(**t) for t in entry["tiles"])
        for entry in entries
    }


def tile_for(m: int, n: int, k: int, leaves: int) -> Tile:
    """The pinned tile; SB0453 where the table has none."""
    for tile in table().get((n, k, leaves), ()):
        if m <= tile.rows:
            return tile
    raise Refused(
        "SB0453",
        seen=f"M = {m}, N = {n}, K = {k}, {leaves} leaves",
        required="an entry of samebits/ops/gemm/tiles_sm90.json",
        hint="samebits explain SB0453",
    )


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """[M, N] bf16: one leaf, one rounding."""
    return _matmul(x, w, ReductionPlan(1), torch.bfloat16)


def lm_head(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """[M, N] fp32: as `linear`, the accumulator not rounded."""
    return _matmul(x, w, ReductionPlan(1), torch.float32)


def row_parallel(x: torch.Tensor, w: torch.Tensor, plan: ReductionPlan) -> torch.Tensor:
    """[M, N] bf16: one leaf for each of `plan.leaves`, folded by its tree in fp32, rounded once.

    SB0402 where K does not divide.
    """
    return _matmul(x, w, plan, torch.bfloat16)


def _matmul(
    x: torch.Tensor, w: torch.Tensor, plan: ReductionPlan, dtype: torch.dtype
) -> torch.Tensor:
    processors = gpu.prepare(x.device.index or 0)
    gpu.require("w", w, torch.bfloat16, w.dim() == 2, "[N, K]")
    gpu.require("x", x, torch.bfloat16, x.dim() == 2 and x.shape[1:] == w.shape[1:], "[M, K]")
    length = plan.cuts(x.shape[1])[0][1]
    y = x.new_empty((x.shape[0], w.shape[0]), dtype=dtype)
    if x.shape[0]:
        tile = tile_for(x.shape[0], w.shape[0], x.shape[1], plan.leaves)
        _launch(tile, x, w, y, length, plan.leaves, processors)
    return y


def _launch(
    tile: Tile,
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    length: int,
    leaves: int,
    processors: int,
) -> None:
    m, n = y.shape
    count = triton.cdiv(m, tile.bm) * triton.cdiv(n, tile.bn)
    blocks = min(count, processors * tile.blocks) if tile.blocks else count
    x_desc = TensorDescriptor.from_tensor(x, [tile.bm, tile.bk])
    w_desc = TensorDescriptor.from_tensor(w, [tile.bn, tile.bk])
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
    y_desc = TensorDescriptor.from_tensor(y, [tile.bm, tile.bn // tile.parts])
    if tile.kind == "serial":
        part = y.new_empty(blocks * 3 * tile.bm * tile.bn, dtype=torch.float32)
        kernels.serial[(blocks,)](
            x_desc, w_desc, y_desc, part, m, n,
            **sizes, GROUP=tile.group, PARTS=tile.parts, **options,
        )  # fmt: skip
        return
    kernels.tiles[(blocks,)](
        x_desc, w_desc, y_desc, m, n,
        **sizes, GROUP=tile.group, SWAP=tile.swap, FLATTEN=bool(tile.flatten),
        PARTS=tile.parts, **options,
    )  # fmt: skip
