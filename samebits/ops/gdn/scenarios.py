"""Inputs on which the schedules of `gdn` are tested and their errors are stated.

n     normal values, moderate decay
wide  q and k (before normalisation) and v scaled element by element by 2**-8 .. 2**8
g0    almost no decay
gneg  log decays down to -40: states are forgotten within a token
mix   mild decay with spikes to -100; beta at 1e-4 or 1 - 1e-4
corr  nearly parallel keys, no decay, beta near 1: the worst conditioned chunk
"""

from __future__ import annotations

import numpy as np
import torch

NAMES = ("n", "wide", "g0", "gneg", "mix", "corr")

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def make(
    name: str,
    tokens: int,
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    seed: int = 0,
) -> Operands:
    """q, k [T, HK, K], v [T, HV, V] bf16, g, beta [T, HV] fp32; q and k are normalised."""
    random = np.random.Generator(np.random.PCG64([NAMES.index(name), seed]))
    q = random.standard_normal((tokens, key_heads, key_dim))
    k = random.standard_normal((tokens, key_heads, key_dim))
    v = random.standard_normal((tokens, heads, value_dim))
    g = -0.3 * random.random((tokens, heads))
    beta = 1 / (1 + np.exp(-random.standard_normal((tokens, heads))))
    if name == "wide":
        q, k, v = (x * np.exp2(random.uniform(-8, 8, x.shape)) for x in (q, k, v))
    elif name == "g0":
        g = -1e-4 * random.random((tokens, heads))
    elif name == "gneg":
        g = -40 * random.random((tokens, heads))
    elif name == "mix":
        g = np.where(random.random((tokens, heads)) < 0.05, -100.0, g)
        beta = np.where(random.random((tokens, heads)) < 0.5, 1e-4, 1 - 1e-4)
    elif name == "corr":
        k = random.standard_normal((1, key_heads, key_dim)) + 0.1 * k
        g = np.zeros((tokens, heads))
        beta = 1 - 1e-2 * random.random((tokens, heads))
    half = [torch.from_numpy(x).bfloat16() for x in (_unit(q), _unit(k), v)]
    return half[0], half[1], half[2], torch.from_numpy(g).float(), torch.from_numpy(beta).float()
