"""The gated delta rule on Hopper: checks and counts around the kernels of `triton.py`.

The roundings are the CPU's, sums follow the chip: README.md, "On a GPU".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samebits.bits import mixsum
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.gdn import SCHEDULES, state_spec, triton
from samebits.ops.gdn.cpu import BLOCK, CHUNK
from samebits.ops.packed import host_checked, on_device

__all__ = ["advance", "varlen"]

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def advance(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: Sequence[torch.Tensor],
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    schedule: str,
    *,
    most: int | None = None,
) -> torch.Tensor:
    """`samebits.ops.gdn.advance` on CUDA, without its checks of tables' values.

    The tables are integers on the GPU, which the host does not read, so that a call can be
    captured. Where `most` is 1 the kernels for single rows serve, with the same bits; the caller
    answers for it. Counts the rows of v. Refuses with SB0420, SB0421, SB0480 to SB0482.
    """
    operands = _operands(q, k, v, g, beta, scale)
    at, starts, context = on_device(
        v, slots=slots, starts=query_start_loc, context_lens=context_lens
    )
    if most == 1 and len(at):
        at, context = _of_rows(len(v), at, starts, context)
        o = triton.decode(*operands, state, at, context, scale, schedule)
    else:
        o = triton.advance(*operands, state, at, starts, context, scale, schedule)
    registry.count_served("gdn.core", len(v))
    return o


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    schedule: str,
    initial_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """`samebits.ops.gdn.varlen` on CUDA: the bits of `advance`.

    cu_seqlens on the CPU is checked (SB0483); on the GPU the caller answers for it. Refuses with
    SB0420, SB0421, SB0480, SB0481.
    """
    operands = _operands(q, k, v, g, beta, scale)
    starts = host_checked(cu_seqlens, v)
    o = triton.varlen(*operands, starts, scale, schedule, initial_state)
    registry.count_served("gdn.core", len(v))
    return o


def _operands(q, k, v, g, beta, scale: float) -> Rows:
    """Contiguous operands; SB0481 for a scale. All else `triton.py` checks."""
    if not 0 < scale < float("inf"):
        raise Refused(
            "SB0481",
            seen=f"scale {scale}",
            required="a positive, finite scale",
            hint="samebits explain SB0481",
        )
    return _part((q, k, v, g, beta), slice(None))


def _part(rows: Rows, span: slice) -> Rows:
    q, k, v, g, beta = (x[span].contiguous() for x in rows)
    return q, k, v, g, beta


def _of_rows(
    rows: int, slots: torch.Tensor, starts: torch.Tensor, context: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot (-1 past the last sequence) and context length of every row; one row a sequence."""
    row = torch.arange(rows, device=slots.device, dtype=torch.int32)
    owner = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    known = owner.clamp(max=len(slots) - 1)
    return torch.where(owner < len(slots), slots[known], -1), context[known]


def _probe() -> int:
    # Two sequences, one across two boundaries, cut inside a chunk; two value heads a key head.
    # Whole, and the last rows one by one.
    tokens, key_heads, heads, size = 2 * CHUNK + 9, 1, 2, 128
    q, k = (samples.bf16((tokens, key_heads, size), seed, -5, -1).cuda() for seed in (1, 2))
    v = samples.bf16((tokens, heads, size), 3, -3, 3).cuda()
    g = -samples.fp32((tokens, heads), 4, -9, 1).abs().cuda()
    beta = samples.fp32((tokens, heads), 5, -4, 0).abs().cuda()
    rows, scale, device = (q, k, v, g, beta), size**-0.5, v.device

    def table(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    found = []
    for schedule in SCHEDULES:
        o = triton.varlen(*rows, table(0, 5, tokens), scale, schedule)
        state = [
            torch.zeros((1, *shape), dtype=dtype, device=device)
            for _, shape, dtype in state_spec(schedule, key_heads, heads, size, size, "sm90")
        ]
        first, zero = _part(rows, slice(tokens - 12)), table(0)
        ends = table(0, tokens - 12)
        parts = [o, triton.advance(*first, state, zero, ends, zero, scale, schedule)]
        for i in range(tokens - 12, tokens):
            one = _part(rows, slice(i, i + 1))
            parts.append(triton.decode(*one, state, zero, table(i), scale, schedule))
        h = triton.boundary(state)  # whole fp32 values, also where they are kept in planes
        found += [*(part.float().flatten() for part in parts), h.flatten()]
    return mixsum(torch.cat(found))


registry.register(
    registry.Implementation(
        region="gdn.core",
        id="gdn.core.sm90.1",
        platform="sm90",
        constants={
            "schedule": "contract",
            "chunk": CHUNK,
            "block": BLOCK,
            "boundary_chained": "fp32",
            "boundary_consumed": "bf16; for o of cpr fp32",
            "output": "fp32; of cpr bf16",
            "g": "fp32",
            "beta": "fp32",
        },
        modules=(
            "samebits.ops.gpu",
            "samebits.ops.device",
            "samebits.ops.packed",
            "samebits.ops.gdn",
            "samebits.ops.gdn.cpu",  # the lengths of a chunk and of a block
            "samebits.ops.gdn.tiles_sm90",
            "samebits.ops.gdn.triton",
            "samebits.ops.gdn.triton_parts",
            "samebits.ops.gdn.triton_inverse",
            "samebits.ops.gdn.triton_scan",
            "samebits.ops.gdn.gluon_scan",
            "samebits.ops.gdn.gluon_chain",
            "samebits.ops.gdn.gluon_rows",
            "samebits.ops.gdn.triton_chunk",
            "samebits.ops.gdn.triton_decode",
            "samebits.ops.gdn.triton_decode_cpr",
            "samebits.ops.gdn.gluon_decode",
            "samebits.ops.gdn.gluon_decode_few",
            "samebits.ops.gdn.gluon_close",
            "samebits.ops.gdn.sm90",
        ),
        probe=_probe,
    )
)
