"""Memory of a benchmark's engines: pages that hold all requests at once, and tokens of a pass.

What goes into an engine's settings is counted here, from a recipe's `model.config`; what an engine
then holds is read from it (`engine_worker`), and `short_of_pages` compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samebits.casework import memory
from samebits.ops.gdn import CHUNK

_GIB = 1 << 30
_SPARE = 64  # pages beyond those of all requests
_ALIGNED = 16  # tokens of which vLLM makes a page
# Bytes of an engine that are neither weights nor pages: contexts, graphs and activations, and
# beside them what fp32 logits of the longest prompt take, four times over.
_OTHER, _LOGITS = 4 * _GIB, 4 * 4 * 1024
_PASS = 0.85  # share of a GPU that a training pass may fill; the rest is fragments and workspaces


@dataclass(frozen=True)
class Cache:
    """block: tokens of a page; pages: how many there are for every group of layers; bytes: of all
    groups together."""

    block: int
    pages: int
    bytes: int


def cache(config: Mapping[str, Any], block: int, length: int, requests: int) -> Cache:
    """Pages of `block` tokens that hold `requests` sequences of `length` tokens at once.

    As vLLM lays them out (`memory.page_groups`).
    """
    group, full, linear = memory.page_groups(config)
    pages = (full * -(-length // block) + linear) * requests + _SPARE
    return Cache(block, pages, pages * group * block * memory.kv_bytes(config, layers=1))


def stock_block(config: Mapping[str, Any]) -> int:
    """Tokens of the page that vLLM makes as large as one of its own fp32 states."""
    state = memory.state_bytes(config, None, layers=1)
    whole = _ALIGNED * memory.kv_bytes(config, layers=1)
    return -(-state // whole) * _ALIGNED


def engine_bytes(config: Mapping[str, Any], weights: int, cached: int) -> int:
    """Of a whole engine: its weights, its pages and the rest."""
    return weights + cached + _OTHER + _LOGITS * config["vocab_size"]


def short_of_pages(held: Mapping[str, Any], requests: int) -> str | None:
    """Why the cache that an engine holds cannot hold all requests at once; None where it can.

    held   as `engine_worker.Measured.samebits_measured` tells it
    """
    each = sum(-(-group["sequence"] // group["page"]) for group in held["groups"])
    wanted = each * requests + 1  # vLLM keeps one page empty
    if held["pages"] >= wanted:
        return None
    return f"{held['pages']} pages, and {requests} requests of {each} need {wanted}"


def pass_sequences(
    config: Mapping[str, Any], weights: int, total: int, sequences: int, length: int
) -> int:
    """Sequences of `length` tokens in a micro-batch, a divisor of `sequences`; 0 if none fits.

    weights   bytes of the bf16 parameters; gradients are fp32
    total     bytes of the GPU
    Both arithmetics take as many, so the greater need counts: of the stock one, which keeps scores
    of attention.
    """
    left = total * _PASS - weights * 3
    each = length * _token_bytes(config, length)
    fitting = [n for n in range(1, sequences + 1) if sequences % n == 0 and n * each <= left]
    return max(fitting, default=0)


def _token_bytes(config: Mapping[str, Any], length: int) -> int:
    """What one token adds to a pass. A layer with scores keeps them in fp32 and bf16, and a mask
    of dropout; a recurrent one of ours some operands of a chunk."""
    layers = range(config["num_hidden_layers"])
    linear = sum(memory.is_linear(config, layer) for layer in layers)
    scores = 9 * config["num_attention_heads"] * length
    if not linear:
        return memory.pass_bytes(config) + scores * len(layers)
    inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    chunk = config["linear_num_value_heads"] * CHUNK * 4
    return memory.pass_bytes(config) + linear * (24 * inner * 2 + 2 * chunk)
