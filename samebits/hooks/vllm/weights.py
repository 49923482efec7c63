"""Live vLLM parameters as the logical tensors of the model, and back.

vLLM fuses q/k/v and gate/up and shards by rank; a logical tensor is what the published checkpoint
names. A view here is (name, logical shape, live slice, where the slice sits), so that checksums of
shards add up over ranks to the checksum of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from samebits import bits
from samebits.errors import Refused
from samebits.weights.checksums import Index, tensor_checksum


@dataclass(frozen=True)
class Shard:
    """`data` equals logical[index] of the tensor `name` with `shape`."""

    name: str
    shape: tuple[int, ...]
    index: Index
    data: torch.Tensor

    def checksum(self) -> int:
        """`tensor_checksum` of this shard; those of all shards add up to that of the tensor."""
        return tensor_checksum(self.data, shape=self.shape, index=self.index)


def load(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Copy logical tensors into the live parameters; returns how many came.

    Raises Refused SB0508 when a parameter was not filled. Tensors are consumed one by one.
    """
    count = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal count
        for name, tensor in tensors:
            count += 1
            yield name, tensor

    filled = set(model.load_weights(counted()))
    missing = sorted(name for name, _ in model.named_parameters() if name not in filled)
    if missing:
        raise Refused(
            "SB0508",
            seen=f"{len(missing)} parameters not filled ({', '.join(missing[:3])})",
            required="a tensor for every parameter",
            hint="samebits explain SB0508",
        )
    return count


def shards(model: Any, rank: int) -> Iterator[Shard]:
    """Every logical tensor's part that this rank owns; replicated ones belong to rank 0.

    A module with a method `samebits_shards(path, rank)` describes itself and all that is inside.
    """
    packed = model.packed_modules_mapping
    tied = model.config.tie_word_embeddings
    described = None
    for path, module in model.named_modules():
        if (tied and path == "lm_head") or (described and path.startswith(described)):
            continue
        if hasattr(module, "samebits_shards"):
            described = f"{path}."
            yield from module.samebits_shards(path, rank)
        elif isinstance(module, (QKVParallelLinear, MergedColumnParallelLinear)):
            yield from _fused(path, module, packed, rank)
        elif isinstance(module, RowParallelLinear):
            local = module.weight.shape[1]
            place = slice(rank * local, (rank + 1) * local)
            shape = (module.weight.shape[0], module.input_size)
            yield Shard(f"{path}.weight", shape, (slice(None), place), module.weight.data)
        elif isinstance(module, VocabParallelEmbedding):
            own = module.shard_indices
            rows = own.org_vocab_end_index - own.org_vocab_start_index
            yield Shard(
                f"{path}.weight",
                (module.org_vocab_size, module.embedding_dim),
                (slice(own.org_vocab_start_index, own.org_vocab_end_index), slice(None)),
                module.weight.data[:rows],
            )
        elif isinstance(module, ReplicatedLinear) or not list(module.children()):
            for name, parameter in module.named_parameters(recurse=False):
                if rank == 0:
                    whole = tuple(slice(None) for _ in parameter.shape)
                    yield Shard(f"{path}.{name}", tuple(parameter.shape), whole, parameter.data)


def _fused(path: str, module, packed: dict[str, list[str]], rank: int) -> Iterator[Shard]:
    """Split one fused column-parallel weight [sum of parts, K], and its bias [sum of parts], into
    its published parts."""
    parent, _, leaf = path.rpartition(".")
    parts = packed[leaf]
    if isinstance(module, QKVParallelLinear):
        q, kv = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        local = [q, kv, kv]
        whole = [
            module.total_num_heads * module.head_size,
            *[module.total_num_kv_heads * module.head_size] * 2,
        ]
    else:
        whole = list(module.output_sizes)
        local = [size // module.tp_size for size in whole]
    start = 0
    for name, rows, total in zip(parts, local, whole, strict=True):
        for kind, parameter in module.named_parameters(recurse=False):
            data = parameter.data[start : start + rows]
            place = (slice(rank * rows, (rank + 1) * rows), *(slice(None) for _ in data.shape[1:]))
            yield Shard(f"{parent}.{name}.{kind}", (total, *data.shape[1:]), place, data)
        start += rows


def names(model: Any) -> list[str]:
    """Published names of all logical tensors, the same on every rank."""
    return [shard.name for shard in shards(model, 0)]


def checksums(model: Any, rank: int) -> dict[str, str]:
    """Logical tensor -> hex checksum of this rank's part (`bits.add_digests` sums ranks)."""
    return {shard.name: bits.hex_digest(shard.checksum()) for shard in shards(model, rank)}
