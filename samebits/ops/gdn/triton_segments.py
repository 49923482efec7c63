"""What the forward of training on Hopper keeps for the backward, beside the operands.

T, the decays, and the boundary state at the start of every segment, some whole chunks of a
sequence. The backward computes the states between them again, all segments side by side. They are
the snapshots that the rows read, so the states behind them differ from the forward's by a rounding
to bf16 where a segment begins: gradients have no bit promise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.gdn import tiles_sm90 as tiles
from samebits.ops.gdn import triton_chunk as chunk
from samebits.ops.gdn import triton_inverse as inverse
from samebits.ops.gdn.triton_parts import CHAINED, follow


@dataclass(frozen=True)
class Kept:
    """Tensors that a backward needs again.

    rows, t   as `triton_chunk.Work` has them
    places    [chunks, 4], base [R + 1]: as `triton_chunk.Steps` has them
    states    [S, HV, V, K] boundary states at the segments' starts, narrow (cpr: fp32)
    first     [S + 1] first chunk of each segment; behind the last one the number of chunks
    origin    [S + 1] row of the operands at which it begins; behind the last one the end
    """

    rows: torch.Tensor
    t: torch.Tensor
    places: torch.Tensor
    base: torch.Tensor
    states: torch.Tensor
    first: torch.Tensor
    origin: torch.Tensor


@triton.jit(do_not_specialize=["sequences"])
def _cut(
    starts_ptr, context_ptr, base_ptr, first_ptr, origin_ptr, sequences,
    CHUNK: tl.constexpr, LENGTH: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """First chunk and first row of one segment of at most LENGTH chunks."""
    follow()
    piece = tl.program_id(0)
    count, before, _ = inverse.located(
        piece, False, sequences, starts_ptr, context_ptr, first_ptr, LENGTH * CHUNK, CHUNK, TABLE
    )
    into = tl.where(count < sequences, (piece - before) * LENGTH, 0)
    tl.store(first_ptr + piece, tl.load(base_ptr + count) + into)
    tl.store(origin_ptr + piece, tl.load(starts_ptr + count) + into * CHUNK)


def keep(work: chunk.Work, at: chunk.Steps, tokens: int) -> Kept:
    """Of a forward of sequences from phase 0."""
    first, origin = cut(at, tokens, *work.entry.shape[1:3])
    states = work.entry.index_select(0, first[:-1])
    return Kept(work.rows, work.t, at.places, at.base, states, first, origin)


def cut(at: chunk.Steps, tokens: int, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`first` and `origin` of `Kept`."""
    chunks, sequences = len(at.places), len(at.slots)
    length = tiles.segment(tokens // chunk.CHUNK, heads, size)
    # Those of a sequence are whole but one.
    first = at.starts.new_empty(chunks // length + sequences + 1)
    origin = torch.empty_like(first)
    _cut[(len(first),)](
        at.starts, at.context, at.base, first, origin, sequences,
        CHUNK=chunk.CHUNK, LENGTH=length, TABLE=tiles.TABLE,
        num_warps=1, **CHAINED, **gpu.POLICY,
    )  # fmt: skip
    return first, origin


def again(k: torch.Tensor, v: torch.Tensor, kept: Kept) -> tuple[torch.Tensor, torch.Tensor]:
    """u and entry of `triton_chunk.Work`, narrow, by all segments side by side."""
    h = kept.states.transpose(2, 3).float().contiguous()
    slots = torch.arange(len(h), dtype=torch.int32, device=h.device)
    # Every segment begins with a state: none is taken for a sequence's first.
    context = torch.full_like(slots, chunk.CHUNK)
    tables = (kept.first, kept.origin, context, slots)
    return chunk.chain(k, v, kept.rows, kept.t, [h], tables, raw=False)
