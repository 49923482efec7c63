"""Runs in a process with the patched tree: the products of a GPU's model that are to be admitted.

Prints JSON: N, K, leaves, dtype of the output, whether with a bias, of the layers of a Qwen2 on
one rank and on one of two.
"""

from __future__ import annotations

import json

import torch
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from samebits.hooks.vllm.cuda.worker import products


def layer(kind: type, rows: int, columns: int, *, biased: bool = False, tp: int = 1):
    """A layer that has nothing but what `products` looks at."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    made.weight = torch.nn.Parameter(torch.empty(rows, columns))
    made.bias = torch.nn.Parameter(torch.empty(rows)) if biased else None
    made.tp_size = tp
    return made


def found(tp: int) -> list[list]:
    model = torch.nn.ModuleList(
        [
            layer(linear.QKVParallelLinear, 96 // tp, 64, biased=True, tp=tp),
            layer(linear.RowParallelLinear, 64, 64 // tp, tp=tp),
            layer(linear.MergedColumnParallelLinear, 256 // tp, 64, tp=tp),
            layer(ParallelLMHead, 128 // tp, 64, tp=tp),
        ]
    )
    return [[str(part) for part in shape] for shape in products(model)]


print(json.dumps([found(1), found(2)]))
