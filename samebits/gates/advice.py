"""What to raise where a comparison was not strong enough: a hint for a reason of the verdict."""

from __future__ import annotations

import re

_PATTERNS = (
    (
        r"hazard resumed_from_state never fired",
        "more tokens than the engine has pages for: raise `requests` and `response`",
    ),
    (
        r"hazard (preempted|preempted_inside_chunk) never fired",
        "more tokens than the stress engine has pages for: raise `requests` and `response`, or "
        "lower `stress_blocks`",
    ),
    (
        r"hazard batch_16 never fired",
        "sixteen requests in one step: raise `requests` to 16 at least",
    ),
    (
        r"hazard prefix_hit never fired",
        "prompts that share whole blocks: longer prompts or, where pages hold no states, a smaller "
        "`block_size` of the engine",
    ),
    (
        r"hazard prefix_cache_invalidated never fired",
        "no whole block was cached: raise `max_tokens` of `rl`, or use a smaller `block_size`",
    ),
    (
        r"control (stock|k_cut_by_rows) (did not diverge|compared)",
        "the rows of the control agree, or are few: raise `control_requests`, `control_response` "
        "or `control_prompt`",
    ),
    (r"tokens of the \d+ that a row needs", "raise `requests`, `response` or `alone`"),
    (r"tokens of the \d+ that the recipe asks for", "raise `requests`, `response` or `alone`"),
)


def of(reason: str, *, recorded: bool) -> str | None:
    """The hint for a reason of `evidence.judge`, None where sizes are no cure.

    recorded   whether it is of a run with `--record`: only that takes its sizes from the recipe
    """
    for pattern, hint in _PATTERNS:
        if re.search(pattern, reason):
            where = "under `run` of the recipe"
            return f"{hint} ({where if recorded else f'a larger run; {where} with --record'})"
    return None
