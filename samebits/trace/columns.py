"""One order of output columns for both engines and any number of ranks: the rollout's on one rank.

Engines fuse projections in ways of their own, and a rank holds a part of every one that is fused:

    attention      rollout  q (with output gates: q and gate of head 0, of head 1, ..), k, v
                   trainer  the same for each group of heads that share a key
    MLP            both     gate, up
    linear layers  both     q, k, v, z, b, a; the rollout in two products, q to z and b, a
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

# Products whose columns ranks split.
PRODUCTS = ("gemm.column", "gemm.bias")
# What one engine computes at once and the other in parts.
MERGED = (*PRODUCTS, "gdn.l2_norm")
# Regions whose weights are split over ranks by rows, so that digests of the parts add up.
_ROWS_SPLIT = ("embedding", *PRODUCTS, "gemm.lm_head", "gdn.conv", "gdn.gate")


# Beginning of the name of an operand that is a number and no tensor: float64 bits, no digest.
CONSTANT = "constant."


class Columns:
    """Columns of the outputs of one engine for a model with the configuration `config`."""

    def __init__(self, config: Mapping, *, trainer: bool) -> None:
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        linear = config.get("linear_num_key_heads") is not None
        gates = 2 if linear else 1
        self._order = _by_heads(heads, kv_heads, size, gates) if trainer else None
        q, k = gates * heads * size, kv_heads * size
        self._attention = (q + 2 * k,) if trainer else (q, k, k)
        self._linear: dict[str, tuple[int, ...]] = {}
        if linear:
            keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
            value_heads = config["linear_num_value_heads"]
            values = value_heads * config["linear_value_head_dim"]
            mixed = (keys, keys, values)
            self._linear = {
                "gemm.column": (*mixed, values, value_heads, value_heads),
                "gdn.conv": mixed,
                "gdn.l2_norm": (keys, keys),
                "gdn.gate": (1, 1),  # decay, strength
            }

    def sections(self, region: str, *, first: bool, linear: bool) -> tuple[int, ...]:
        """Relative widths of what a rank's output holds, each split over the ranks.

        first    of a layer's products (the other one is the MLP's)
        linear   in a linear layer
        """
        if region in PRODUCTS and not first:
            return (1, 1)
        if linear:
            return self._linear.get(region, (1,))
        return self._attention if region in PRODUCTS else (1,)

    def order(self, region: str, *, first: bool, linear: bool) -> np.ndarray | None:
        """Columns of the joined output in the common order, None where they are in it."""
        return self._order if region in PRODUCTS and first and not linear else None


def _by_heads(heads: int, kv_heads: int, size: int, gates: int) -> np.ndarray:
    """Columns of Megatron's fused projection in the order of heads, then all k, then all v.

    Megatron's groups hold q.., gate.. (with `gates` 2), k, v, each of `size` columns.
    """
    group = heads // kv_heads
    width = gates * group + 2
    blocks = [
        h // group * width + gate * group + h % group for h in range(heads) for gate in range(gates)
    ]
    blocks += [g * width + gates * group + i for i in (0, 1) for g in range(kv_heads)]
    return (np.array(blocks)[:, None] * size + np.arange(size)).ravel()


def widened(parts: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Patterns of bf16 beside patterns of fp32 become those of the same numbers in fp32."""
    if len({part.dtype for part in parts}) == 1:
        return parts
    return [p.astype(np.uint32) << 16 if p.dtype == np.uint16 else p for p in parts]


def joined(parts: Sequence[np.ndarray], sections: Sequence[int]) -> np.ndarray:
    """Outputs [rows, features of a rank] of all ranks, put together section by section."""
    if len(parts) == 1:
        return parts[0]
    width, whole = parts[0].shape[1], sum(sections)
    ends = [sum(sections[: i + 1]) * width for i in range(len(sections))]
    if any(end % whole for end in ends):
        raise ValueError(f"outputs of {width} columns do not hold parts in proportion {sections}")
    cuts = [end // whole for end in ends][:-1]
    pieces = [np.split(part, cuts, axis=1) for part in parts]
    return np.concatenate([piece[i] for i in range(len(sections)) for piece in pieces], axis=1)


def operands(region: str, parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Operands of a region over ranks: what all ranks hold, or the sum of digests of their parts.
    What cannot be added up to a digest of the whole is left out."""
    found = {}
    for name in (name for name in parts[0] if not name.endswith(".part")):
        values = [part[name] for part in parts]
        if name == "weight" and region in _ROWS_SPLIT:
            found[name] = _total(values)
        elif all(np.array_equal(values[0], other) for other in values):
            found[name] = values[0]
        elif f"{name}.part" in parts[0]:
            found[name] = _total([part[f"{name}.part"] for part in parts])
    return found


def _total(digests: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack(digests).sum(axis=0, dtype=np.uint64, keepdims=True)[0]
