"""Attention against torch's scaled_dot_product_attention in bf16, its keys already repeated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention as native

from samebits.bench.timing import require_bits, row
from samebits.ops import attention, samples
from samebits.ops.attention import reference

HEADS, KEY_HEADS, SIZE = 9, 3, 64  # SmolLM2's
SCALE = SIZE**-0.5
BLOCK = 16


def _inputs(count: int) -> list[torch.Tensor]:
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    return [samples.bf16((count, n, SIZE), i, -3, 2) for i, n in enumerate(heads)]


def _starts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _gate() -> None:
    count = attention.PARTITION + 9
    q, k, v = _inputs(count)
    out = attention.varlen(q, k, v, _starts(0, count), SCALE)
    for t in (0, 40, count - 1):
        law = reference.token(q[t], k[: t + 1], v[: t + 1], SCALE)
        require_bits(f"attention at position {t}", out[t], law)
    blocks = -(-count // BLOCK)
    key_cache, value_cache = (
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, blocks * BLOCK - count)).view(
            blocks, BLOCK, KEY_HEADS, SIZE
        )
        for x in (k, v)
    )
    decode = attention.paged(
        q[-1:],
        key_cache,
        value_cache,
        torch.arange(blocks, dtype=torch.int32)[None],
        _starts(0, 1),
        _starts(count),
        SCALE,
    )
    require_bits("attention, decode against prefill", decode, out[-1:])


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-3, -2).repeat_interleave(HEADS // x.shape[-2], -3).contiguous()


def _native(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable:
    return partial(native, q, k, v, is_causal=causal)


def rows() -> list[dict]:
    """Prefill of one sequence, and decode of a batch from a paged cache."""
    _gate()
    table = []
    for count in (64, 256, 1024):
        q, k, v = _inputs(count)
        qs, ks, vs = (_heads_first(x)[None] for x in (q, k, v))
        table.append(
            row(
                f"attention prefill 1 x {count}, 9 over 3 heads of 64",
                partial(attention.varlen, q, k, v, _starts(0, count), SCALE),
                _native(qs, ks, vs, causal=True),
                "torch sdpa bf16",
                2.0,
                repeats=10,
            )
        )
    for requests, length in ((1, 256), (16, 256), (16, 1024)):
        q, k, v = _inputs(requests * length)
        q = q[:requests]
        pages = length // BLOCK
        order = torch.arange(requests * pages, dtype=torch.int32).view(requests, pages)
        ks, vs = (_heads_first(x.view(requests, length, KEY_HEADS, SIZE)) for x in (k, v))
        table.append(
            row(
                f"attention decode {requests} x 1 over {length} keys, 9 over 3 heads of 64",
                partial(
                    attention.paged,
                    q,
                    k.view(-1, BLOCK, KEY_HEADS, SIZE),
                    v.view(-1, BLOCK, KEY_HEADS, SIZE),
                    order,
                    torch.arange(requests + 1, dtype=torch.int32),
                    torch.full((requests,), length, dtype=torch.int32),
                    SCALE,
                ),
                _native(q[:, :, None], ks, vs, causal=False),
                "torch sdpa bf16",
                2.0,
            )
        )
    return table
