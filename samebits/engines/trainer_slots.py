"""Where published tensors live in one rank's Megatron model.

Megatron keeps what one product makes in one weight: q, k and v (and output gates) of a head group
side by side, gate over up, and the six inputs of a gated delta net one below the other. The views
here undo that, so loading and exporting are plain copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from samebits.engines.trainer_model import Architecture

Pick = Callable[[torch.nn.Parameter], torch.Tensor]


@dataclass(frozen=True)
class Slot:
    """Where one published tensor lives: a view of this rank's parameter.

    `view` has the shape of the rank's shard up to leading splits; `shard_dim` is the dimension of
    the published tensor that ranks cut, or None for a copy on every rank. `sections` are the sizes
    of consecutive parts of that dimension of which a rank takes its share each; None: one part.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None
    view: torch.Tensor
    sections: tuple[int, ...] | None = None

    def _sizes(self, ranks: int = 1) -> list[int]:
        assert self.shard_dim is not None
        sections = self.sections or (self.shape[self.shard_dim],)
        return [size // ranks for size in sections]

    def share(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """What `rank` of `ranks` holds of the published tensor, in the shape of `view`."""
        if self.shard_dim is not None:
            parts = whole.split(self._sizes(), self.shard_dim)
            mine = [part.chunk(ranks, self.shard_dim)[rank] for part in parts]
            whole = torch.cat(mine, self.shard_dim)
        return whole.reshape(self.view.shape)

    def local(self, ranks: int) -> torch.Tensor:
        """`view` as a contiguous tensor with the published tensor's dimensions."""
        shape = list(self.shape)
        if self.shard_dim is not None:
            shape[self.shard_dim] //= ranks
        return self.view.reshape(shape).contiguous()

    def index(self, rank: int, ranks: int) -> list[slice | np.ndarray]:
        """Where `local` of `rank` lies in the published tensor, as `checksums.axis_offsets` reads
        it; nothing for a copy, which is whole."""
        if self.shard_dim is None:
            return []
        starts = itertools.accumulate(self._sizes(), initial=0)
        parts = [
            start + np.arange(rank * size, (rank + 1) * size)
            for start, size in zip(starts, self._sizes(ranks), strict=False)
        ]
        return [*[slice(None)] * self.shard_dim, np.concatenate(parts)]

    def whole(self, shares: Sequence[torch.Tensor]) -> torch.Tensor:
        """The published tensor from `local` of every rank, rank by rank."""
        assert self.shard_dim is not None
        parts = [share.split(self._sizes(len(shares)), self.shard_dim) for share in shares]
        return torch.cat([p for part in zip(*parts, strict=True) for p in part], self.shard_dim)


def slots(
    arch: Architecture, model: Any, tp: int, of: Pick = torch.Tensor.detach
) -> Iterator[Slot]:
    """Every published tensor of `arch` with its place in this rank's `model`, in forward order.

    `of` picks what is looked at: the parameter itself, or a tensor of its shape such as its
    gradient.
    """
    h, f = arch.hidden, arch.ffn
    embedding = model.embedding.word_embeddings.weight
    yield Slot("model.embed_tokens.weight", (arch.vocab, h), 0, of(embedding))
    for i, layer in enumerate(model.decoder.layers):
        prefix = f"model.layers.{i}."
        yield Slot(prefix + "input_layernorm.weight", (h,), None, of(layer.input_layernorm.weight))
        mixer = _linear if arch.is_linear(i) else _attention
        yield from mixer(arch, layer.self_attention, prefix, tp, of)
        norm = of(layer.pre_mlp_layernorm.weight)
        yield Slot(prefix + "post_attention_layernorm.weight", (h,), None, norm)
        gate, up = of(layer.mlp.linear_fc1.weight).view(2, f // tp, h)
        yield Slot(prefix + "mlp.gate_proj.weight", (f, h), 0, gate)
        yield Slot(prefix + "mlp.up_proj.weight", (f, h), 0, up)
        yield Slot(prefix + "mlp.down_proj.weight", (h, f), 1, of(layer.mlp.linear_fc2.weight))
    yield Slot("model.norm.weight", (h,), None, of(model.decoder.final_layernorm.weight))
    if not arch.tied:
        yield Slot("lm_head.weight", (arch.vocab, h), 0, of(model.output_layer.weight))


def _attention(arch: Architecture, module: Any, prefix: str, tp: int, of: Pick) -> Iterator[Slot]:
    """Full attention; with output gates, a query head is published as its query, then its gate.

    A bias of the fused projection lies as the rows of its weight do.
    """
    prefix += "self_attn."
    h, d, heads, kv_heads = arch.hidden, arch.head_dim, arch.heads, arch.kv_heads
    groups, ratio, kinds = kv_heads // tp, heads // kv_heads, 1 + bool(arch.linear)
    for kind, rest in {"weight": (h,), **({"bias": ()} if arch.qkv_bias else {})}.items():
        fused = of(getattr(module.linear_qkv, kind))
        qkv = fused.view(groups, kinds * ratio + 2, d, *rest)
        q = qkv[:, :-2].unflatten(1, (kinds, ratio)).transpose(1, 2)
        yield Slot(f"{prefix}q_proj.{kind}", (kinds * heads * d, *rest), 0, q)
        yield Slot(f"{prefix}k_proj.{kind}", (kv_heads * d, *rest), 0, qkv[:, -2])
        yield Slot(f"{prefix}v_proj.{kind}", (kv_heads * d, *rest), 0, qkv[:, -1])
    yield Slot(prefix + "o_proj.weight", (h, heads * d), 1, of(module.linear_proj.weight))
    if arch.qk_norm:
        yield Slot(prefix + "q_norm.weight", (d,), None, of(module.q_layernorm.weight))
        yield Slot(prefix + "k_norm.weight", (d,), None, of(module.k_layernorm.weight))


def _linear(arch: Architecture, module: Any, prefix: str, tp: int, of: Pick) -> Iterator[Slot]:
    """A gated delta net: a rank's input projection holds its heads of q, k, v, z, b, a."""
    assert arch.linear is not None
    prefix += "linear_attn."
    h, heads = arch.hidden, arch.linear.value_heads
    qkv, v = arch.linear.channels, arch.linear.channels[-1]
    published = {"qkv": sum(qkv), "z": v, "b": heads, "a": heads}
    views = of(module.in_proj.weight).split([n // tp for n in published.values()])
    for (name, size), view in zip(published.items(), views, strict=True):
        sections = qkv if name == "qkv" else None
        yield Slot(f"{prefix}in_proj_{name}.weight", (size, h), 0, view, sections)
    width = arch.linear.conv_width
    conv = of(module.conv1d.weight)
    yield Slot(prefix + "conv1d.weight", (sum(qkv), 1, width), 0, conv, qkv)
    yield Slot(prefix + "A_log", (heads,), 0, of(module.A_log))
    yield Slot(prefix + "dt_bias", (heads,), 0, of(module.dt_bias))
    norm = of(module.out_norm.weight)
    yield Slot(prefix + "norm.weight", (arch.linear.value_dim,), None, norm)
    yield Slot(prefix + "out_proj.weight", (h, v), 1, of(module.out_proj.weight))
