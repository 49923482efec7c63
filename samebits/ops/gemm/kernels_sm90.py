"""Kernels of the matrix product on Hopper: one chain of MMA per leaf, three ways to place leaves.

Tile sizes, warps, stages, the side on which x enters the MMA and the walk over tiles move no bit;
`triton.py` takes them from the pinned table. LENGTH is a leaf's length, a multiple of BK.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _chain(
    x_desc, w_desc, row, col, start,
    LENGTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """One leaf: fp32 [BM, BN], with SWAP [BN, BM], of rows row.. of x and col.. of w."""
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for k in tl.range(0, LENGTH, BK):
        x = x_desc.load([row, start + k])
        w = w_desc.load([col, start + k])
        acc = tl.dot(w, x.T, acc) if SWAP else tl.dot(x, w.T, acc)
    return acc


@triton.jit
def _pair(
    x_desc, w_desc, row, col, start,
    LENGTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Two neighbouring leaves, folded."""
    left = _chain(x_desc, w_desc, row, col, start, LENGTH, BM, BN, BK, SWAP)
    return left + _chain(x_desc, w_desc, row, col, start + LENGTH, LENGTH, BM, BN, BK, SWAP)


@triton.jit
def _subtree(
    x_desc, w_desc, row, col, start,
    LENGTH: tl.constexpr, LEAVES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """1, 2, 4 or 8 leaves of a tile, folded by the plan's tree in registers."""
    if LEAVES == 1:
        root = _chain(x_desc, w_desc, row, col, start, LENGTH, BM, BN, BK, SWAP)
    else:
        root = _pair(x_desc, w_desc, row, col, start, LENGTH, BM, BN, BK, SWAP)
    if LEAVES >= 4:
        root += _pair(x_desc, w_desc, row, col, start + 2 * LENGTH, LENGTH, BM, BN, BK, SWAP)
    if LEAVES >= 8:
        upper = _pair(x_desc, w_desc, row, col, start + 4 * LENGTH, LENGTH, BM, BN, BK, SWAP)
        upper += _pair(x_desc, w_desc, row, col, start + 6 * LENGTH, LENGTH, BM, BN, BK, SWAP)
        root += upper
    return root


@triton.jit
def _place(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile; GROUP tiles of rows share the weights they read."""
    down = tl.cdiv(M, BM)
    across = tl.cdiv(N, BN)
    group = tile // (GROUP * across)
    height = min(down - group * GROUP, GROUP)
    within = tile % (GROUP * across)
    return (group * GROUP + within % height) * BM, (within // height) * BN


@triton.jit
def _halves(acc, BM: tl.constexpr, BN: tl.constexpr):
    """Left and right half of acc [BM, BN]; moves nothing between threads."""
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _store(y_desc, row, col, acc):
    y_desc.store([row, col], acc.to(y_desc.dtype))


@triton.jit
def _shifted(acc, bias_ptr, col, N):
    """acc [rows, columns] plus the bias of columns col.., fp32; acc itself without a bias."""
    if bias_ptr is not None:
        j = col + tl.arange(0, acc.shape[1])
        bias = tl.load(bias_ptr + j, mask=j < N, other=0.0).to(tl.float32)
        # acc * 1 + bias is acc + bias to the bit. Written as a sum behind a chain of one step, the
        # compiler starts that chain from the bias instead: other bits.
        acc = tl.fma(acc, 1.0, bias[None, :])
    return acc


@triton.jit(do_not_specialize=["M", "N"])
def tiles(
    x_desc, w_desc, y_desc, bias_ptr, M, N,
    LENGTH: tl.constexpr, LEAVES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, SWAP: tl.constexpr, FLATTEN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Every block computes whole tiles of y [M, N], all leaves; one rounding, at the store.

    bias_ptr: bf16 [N], None without a bias.
    """
    total = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        row, col = _place(tile, M, N, BM, BN, GROUP)
        acc = _subtree(x_desc, w_desc, row, col, 0, LENGTH, LEAVES, BM, BN, BK, SWAP)
        if SWAP:
            acc = acc.T
        if PARTS == 1:
            _store(y_desc, row, col, _shifted(acc, bias_ptr, col, N))
        else:
            left, right = _halves(acc, BM, BN)
            if PARTS == 2:
                _store(y_desc, row, col, _shifted(left, bias_ptr, col, N))
                col += BN // 2
                _store(y_desc, row, col, _shifted(right, bias_ptr, col, N))
            else:
                a, b = _halves(left, BM, BN // 2)
                c, d = _halves(right, BM, BN // 2)
                _store(y_desc, row, col, _shifted(a, bias_ptr, col, N))
                col += BN // 4
                _store(y_desc, row, col, _shifted(b, bias_ptr, col, N))
                col += BN // 4
                _store(y_desc, row, col, _shifted(c, bias_ptr, col, N))
                col += BN // 4
                _store(y_desc, row, col, _shifted(d, bias_ptr, col, N))


@triton.jit
def _part(at, mask):
    # From L2: other blocks wrote it.
    return tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["M", "N"])
def subtrees(
    x_desc, w_desc, y_ptr, part_ptr, count_ptr, M, N,
    LENGTH: tl.constexpr, INNER: tl.constexpr, COUNT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Few rows: subtrees in different blocks; the block that comes last to a tile folds them.

    A tile has COUNT subtrees of INNER leaves. part_ptr: fp32 [tiles, COUNT, BM, BN]; count_ptr:
    int32 [tiles], zero at the start. Which block comes last moves no bit: it reads every subtree
    back and folds by the plan's tree.
    """
    across = tl.cdiv(N, BN)
    tile = tl.program_id(0)
    number = tl.program_id(1)
    row = tile // across * BM
    col = tile % across * BN
    start = number * (INNER * LENGTH)
    acc = _subtree(x_desc, w_desc, row, col, start, LENGTH, INNER, BM, BN, BK, SWAP)
    if SWAP:
        acc = acc.T
    i = tl.arange(0, BM)
    j = tl.arange(0, BN)
    SIZE: tl.constexpr = BM * BN
    at = part_ptr + tile.to(tl.int64) * (COUNT * SIZE) + i[:, None] * BN + j[None, :]
    present = (row + i < M)[:, None]
    tl.store(at + number * SIZE, acc, mask=present)
    tl.debug_barrier()  # all threads have written before one of them counts
    if tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu") == COUNT - 1:
        root = _part(at, present) + _part(at + SIZE, present)
        if COUNT >= 4:
            root += _part(at + 2 * SIZE, present) + _part(at + 3 * SIZE, present)
        if COUNT >= 8:
            upper = _part(at + 4 * SIZE, present) + _part(at + 5 * SIZE, present)
            upper += _part(at + 6 * SIZE, present) + _part(at + 7 * SIZE, present)
            root += upper
        y_at = y_ptr + (row + i)[:, None].to(tl.int64) * N + (col + j)[None, :]
        inside = present & (col + j < N)[None, :]
        tl.store(y_at, root.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _settle(part, at, number, y_desc, row, col, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Fold a finished subtree into those kept at `at`, or store the root.

    Level i of the store holds a finished left subtree, 2**i times as large as `part`.
    """
    if number % 2 == 1:
        part = tl.load(at, cache_modifier=".cg") + part
    if COUNT >= 4:  # noqa: SIM102 - decided when compiled; the inner one is not
        if number % 4 == 3:
            part = tl.load(at + SIZE, cache_modifier=".cg") + part
    if COUNT >= 8:  # noqa: SIM102
        if number % 8 == 7:
            part = tl.load(at + 2 * SIZE, cache_modifier=".cg") + part
    if number == COUNT - 1:
        _store(y_desc, row, col, part)
    else:
        level = number % 2 + (number % 4 == 3).to(tl.int32)
        tl.store(at + level * SIZE, part)


@triton.jit(do_not_specialize=["M", "N"])
def serial(
    x_desc, w_desc, y_desc, part_ptr, M, N,
    LENGTH: tl.constexpr, INNER: tl.constexpr, COUNT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Many rows: a block walks the subtrees of its tiles; finished ones wait in L2.

    A tile has COUNT subtrees of INNER leaves. part_ptr: fp32 [blocks, 3, BM, BN], private to each
    block.
    """
    total = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    mine = tl.cdiv(total - tl.program_id(0), tl.num_programs(0))
    WIDE: tl.constexpr = BN // PARTS
    SIZE: tl.constexpr = BM * BN
    AREA: tl.constexpr = BM * WIDE
    here = tl.arange(0, BM)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    at = part_ptr + tl.program_id(0) * (3 * SIZE) + here
    for item in tl.range(0, mine * COUNT):
        number = item % COUNT
        tile = tl.program_id(0) + item // COUNT * tl.num_programs(0)
        row, col = _place(tile, M, N, BM, BN, GROUP)
        start = number * (INNER * LENGTH)
        acc = _subtree(x_desc, w_desc, row, col, start, LENGTH, INNER, BM, BN, BK, 0)
        tl.debug_barrier()  # what a thread reads below, another may have written
        left, right = _halves(acc, BM, BN)
        if PARTS == 2:
            _settle(left, at, number, y_desc, row, col, COUNT, SIZE)
            _settle(right, at + AREA, number, y_desc, row, col + WIDE, COUNT, SIZE)
        else:
            a, b = _halves(left, BM, BN // 2)
            c, d = _halves(right, BM, BN // 2)
            _settle(a, at, number, y_desc, row, col, COUNT, SIZE)
            _settle(b, at + AREA, number, y_desc, row, col + WIDE, COUNT, SIZE)
            _settle(c, at + 2 * AREA, number, y_desc, row, col + 2 * WIDE, COUNT, SIZE)
            _settle(d, at + 3 * AREA, number, y_desc, row, col + 3 * WIDE, COUNT, SIZE)
