"""Engine sizes of a model with states: what vLLM would refuse at a start is refused before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samebits.casework import memory
from samebits.errors import Refused
from samebits.recipe import Recipe


def page_tokens(config: Mapping[str, Any], schedule: str, platform: str) -> int:
    """Tokens of the smallest page: keys and values of one layer fill no less than the state of one,
    and it ends where a chunk does."""
    from samebits.ops.gdn import CHUNK

    state = memory.state_bytes(config, schedule, layers=1, platform=platform)
    token = memory.kv_bytes(config, layers=1)
    return -(-state // token // CHUNK) * CHUNK


def _unfit(recipe: Recipe) -> list[tuple[str, str]]:
    """(name, required) of sizes that do not fit cached states; reads the recipe alone."""
    if recipe.gdn_schedule is None:
        return []
    from samebits.ops.gdn import CHUNK

    sizes = recipe.engine
    page = sizes["block_size"]
    least = page_tokens(recipe.config, recipe.gdn_schedule, recipe.platform)
    longest = -(-sizes["max_model_len"] // page)
    wanted = {
        "block_size": (
            page >= least and page % CHUNK == 0,
            f"{least} at least, which hold a layer's state, and a multiple of {CHUNK}",
        ),
        "max_num_batched_tokens": (
            sizes["max_num_batched_tokens"] >= page,
            f"{page} at least, a page: vLLM caches states at the end of one",
        ),
        "kv_blocks": (
            sizes["kv_blocks"] > longest,
            f"more than the {longest} pages of a sequence of max_model_len",
        ),
    }
    return [(name, required) for name, (fits, required) in wanted.items() if not fits]


def problems(recipe: Recipe) -> list[str]:
    """Sizes that do not fit cached states, as "name seen: required"; reads the recipe alone."""
    return [f"{name} {recipe.engine[name]}: {required}" for name, required in _unfit(recipe)]


def check(recipe: Recipe) -> None:
    """SB0328 where `problems` finds some."""
    unfit = _unfit(recipe)
    if unfit:
        seen = ", ".join(f"{name} {recipe.engine[name]}" for name, _ in unfit)
        raise Refused(
            "SB0328",
            seen=f"{recipe.path}, engine: {seen}",
            required="; ".join(f"{name} of {required}" for name, required in unfit),
            hint="samebits explain SB0328",
        )
