"""Vocabulary-parallel embedding: ranks are combined by selection, never by adding zeros."""

from __future__ import annotations

from typing import Any

import torch

from samebits import runtime
from samebits.ops import embedding


def bound() -> bool:
    """Whether rows of the embedding are ours."""
    return runtime.aligned("embedding")


def lookup(layer: Any, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a `VocabParallelEmbedding`: ids [b, s] int64 -> [b, s, H] in the weight's dtype."""
    group = layer.tp_group if layer.tp_group.size() > 1 else None
    return embedding.lookup(ids, layer.weight, start=layer.vocab_start_index, group=group)
