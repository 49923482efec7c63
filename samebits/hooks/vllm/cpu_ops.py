"""The operators of vLLM's CPU extension that its Python code cannot do without.

The source tree has no compiled extension. Its CPU worker, block table and rotary embedding call
`torch.ops._C`; the definitions below stand in for them. They only move indices, except
`rotary_embedding`, which is vLLM's own Python formula and serves the stock control alone.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_library: torch.library.Library | None = None  # a Library unregisters its operators when collected


def _extension_present() -> bool:
    """True when a compiled `vllm/_C*.so` exists: it defines the same names, and twice is fatal."""
    spec = importlib.util.find_spec("vllm")
    places = spec.submodule_search_locations if spec else None
    return any(next(Path(place).glob("_C*.so"), None) is not None for place in places or [])


def _init_cpu_memory_env(nodes: list[int]) -> None:
    """Memory binding to NUMA nodes: left to the operating system."""


def _compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """Slot of token t of request r: block_table[r, p // block_size] * block_size + p % block_size.

    Slots past the last token become -1 (padding).
    """
    tokens = int(query_start_loc[-1])
    counts = (query_start_loc[1:] - query_start_loc[:-1]).long()
    request = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    position = positions[:tokens].long()
    block = block_table[request, position // block_size].long()
    slot_mapping[:tokens] = block * block_size + position % block_size
    slot_mapping[tokens:] = -1


def _rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """In place, by vLLM's own native formula."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    new_query, new_key = RotaryEmbedding.forward_static(
        positions, query, key, head_size, cos_sin_cache.shape[-1], cos_sin_cache, is_neox
    )
    query.copy_(new_query)
    if key is not None and new_key is not None:
        key.copy_(new_key)


_OPERATORS = (
    ("init_cpu_memory_env(int[] nodes) -> ()", _init_cpu_memory_env),
    (
        "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, "
        "Tensor block_table, Tensor(a!) slot_mapping, SymInt block_size) -> ()",
        _compute_slot_mapping,
    ),
    (
        "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, "
        "Tensor cos_sin_cache, bool is_neox) -> ()",
        _rotary_embedding,
    ),
)


def define() -> None:
    """Define the operators once per process, unless the compiled extension will bring them."""
    global _library
    if _library is not None or _extension_present():
        return
    _library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in _OPERATORS:
        _library.define(schema)
        _library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
