"""Settings of the engines that stress a model with states: they follow from the tokens of a page.

A page holds the keys and values of `block_size` tokens, or one state; vLLM makes both equal. A
request takes a page for each state at once (one for every layer with a state, over the layers with
full attention), and one for every page of its tokens. What has to happen is that a decode crosses
the end of a page when none is free: as many prompts must be in flight as the pages hold to the last
one, before the first of them has its response. So the step grows with the page, and pages are few:
of large ones, as many as two prompts of `gates.capsule.large_paged` fill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samebits.casework import memory
from samebits.recipe import Recipe

# Tokens of a page up to twice which an engine is stressed by the numbers below as they stand.
PAGE = 256
# Without a prefix cache a prompt may be cut anywhere: slices of 65 tokens alone, of 64 beside one
# decode, of 63 beside two, and so on.
_SLICED = {"max_num_batched_tokens": 65, "max_num_seqs": 16, "kv_blocks": 26}
# With a prefix cache, states are kept at the ends of pages; too few of those for all requests.
_PAGED = {
    "cpu": {"max_num_batched_tokens": 640, "max_num_seqs": 16, "kv_blocks": 44},
    "sm90": {"max_num_seqs": 64, "kv_blocks": 176},
}
# Pages that a prefix cache of large ones has more: a state is copied into the page behind it, and
# those at the ends of pages outlive their request.
_CACHED = 4
# Tokens that a step of such an engine has beside those of a page.
_BESIDE = 128
# Sizes of a run over large pages: the least requests that fill a step of sixteen, and responses
# that cross the ends of pages and chunks. Few tokens do for every hazard and least number.
RUN: Mapping[str, Any] = {
    "requests": 16,
    "response": 16,
    "alone": 8,
    "control_requests": 16,
    "control_prompt": 320,
    "control_response": 20,
    "stock_rl_prompts": 1,
}
# Two steps behind a refit: one of their prompts fills a page, so that there is one to drop.
RL_STEPS = 3


def large(platform: str, page: int) -> bool:
    """Whether pages are so large that requests fill few of them, and slices grow with them."""
    return platform == "cpu" and page >= 2 * PAGE


def engine(platform: str, page: int) -> dict[str, int]:
    """Sizes of a new case's engines: the longest sequence, and a step, which hold pages."""
    if large(platform, page):
        return {"max_model_len": 2 * page, "max_num_batched_tokens": page + _BESIDE}
    return {"max_model_len": 4 * page, "max_num_batched_tokens": 2 * page + _BESIDE}


def step(page: int) -> int:
    """Tokens of a step that slices prompts: as many to a page as 65 to one of 256.

    Whole chunks and one token more, so that a slice is 1, 0, -1, ... tokens off a chunk's end, as
    65, 64, 63, ... are.
    """
    return 64 * max(1, page // PAGE) + 1


def states(recipe: Recipe) -> int:
    """Pages that the states of one request take."""
    return memory.page_groups(recipe.config)[2]


def tight(recipe: Recipe) -> int:
    """Pages that two prompts of a page or less fill to the last one, with their states, beside the
    page that vLLM never hands out."""
    return 1 + 2 * (states(recipe) + 1)


def _longest(recipe: Recipe, times: int) -> int:
    """Pages without which vLLM does not start: of the longest sequence, its states so many times,
    and the one that is never handed out."""
    sizes = recipe.engine
    return 1 + -(-sizes["max_model_len"] // sizes["block_size"]) + times * states(recipe)


def sliced(recipe: Recipe) -> dict[str, int]:
    """Engine of slices: no prefix cache, and preemption inside a chunk."""
    found = {**_SLICED, "prefix_caching": False}
    page = recipe.engine["block_size"]
    if large(recipe.platform, page):
        found |= {
            "max_num_batched_tokens": step(page),
            "kv_blocks": max(tight(recipe), _longest(recipe, 1)),
        }
    return found


def paged(recipe: Recipe) -> dict[str, int]:
    """Engine of cached states: vLLM wants a page in a step at least, as the recipe has it."""
    found = dict(_PAGED[recipe.platform])
    page = recipe.engine["block_size"]
    if large(recipe.platform, page):
        found |= {
            "max_num_batched_tokens": page + _BESIDE,
            "kv_blocks": max(tight(recipe) + _CACHED, _longest(recipe, 2)),
        }
    return found
