"""Semantic gates, before any number is compared: many mismatches are not of arithmetic.

Token ids go in and come out unchanged, the sampler draws from the whole plain softmax, raw
log-probabilities are reported, and no (prompt, seed) pair occurs twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from samebits.errors import Refused

if TYPE_CHECKING:
    from samebits.engines.rollout import RolloutEngine
    from samebits.recipe import Recipe

LOGPROBS_MODE = "raw_logprobs"
_SAMPLING = "temperature 1, whole vocabulary, no penalties, one seed per request"
_TOKEN_IDS = "in and out; the engine has no tokenizer"

# Settings that change the sampled distribution or its support; the engine must refuse each.
OUTSIDE: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": 0.1},
    "frequency_penalty": {"frequency_penalty": 0.1},
    "min_tokens": {"min_tokens": 2},
    "logit_bias": {"logit_bias": {3: 1.0}},
    "allowed_token_ids": {"allowed_token_ids": [1, 2]},
    "no_seed": {"seed": None},
}
_BY_RULE = ("SB0509", "SB0510")


def distinct(pairs: Iterable[tuple[Sequence[int], int]]) -> int:
    """Number of (prompt, seed) pairs; SB0913 when one occurs twice."""
    seen: dict[tuple[tuple[int, ...], int], int] = {}
    for index, (prompt, seed) in enumerate(pairs):
        first = seen.setdefault((tuple(prompt), seed), index)
        if first != index:
            raise Refused(
                "SB0913",
                seen=f"requests {first} and {index} share prompt and seed {seed}",
                required="a seed of its own for each sample of a prompt",
                hint="samebits explain SB0913",
            )
    return len(seen)


def ask(engine: RolloutEngine) -> dict[str, Any]:
    """What a running engine says of its semantics; `check` judges it."""
    return engine.semantics(OUTSIDE)


def check(found: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse an engine that samples, reports or reads text in another way than the claim says.

    SB0505 logprobs mode, SB0912 a setting that was accepted or not refused by rule, SB0914
    another vocabulary, SB0901 an engine that tokenises by itself.
    """
    if found["logprobs_mode"] != LOGPROBS_MODE:
        raise _refused("SB0505", f"logprobs_mode={found['logprobs_mode']}", LOGPROBS_MODE)
    if found["tokenizer"]:
        raise _refused("SB0901", "a rollout engine with a tokenizer", "token ids in and out")
    accepted = [name for name in OUTSIDE if found["refused"].get(name) not in _BY_RULE]
    if accepted:
        raise _refused("SB0912", f"not refused: {', '.join(accepted)}", "refusals SB0509, SB0510")
    wanted = recipe.config["vocab_size"]
    if found["vocabulary"] != wanted:
        raise _refused("SB0914", f"logits of {found['vocabulary']} tokens", f"of {wanted}")


def switches(found: Mapping[str, Any], pairs: int) -> dict[str, str]:
    """How evidence records the gates that passed."""
    return {
        "distinct_prompt_seed_pairs": str(pairs),
        "logprobs_mode": found["logprobs_mode"],
        "sampling": _SAMPLING,
        "sampling_refused": ", ".join(sorted(found["refused"])),
        "token_ids": _TOKEN_IDS,
        "vocabulary": str(found["vocabulary"]),
    }


def required(recipe: Recipe) -> dict[str, str]:
    """All switches but the number of pairs, as every run that passes `check` records them."""
    meant = {
        "logprobs_mode": LOGPROBS_MODE,
        "refused": OUTSIDE,
        "vocabulary": recipe.config["vocab_size"],
    }
    found = switches(meant, 0)
    del found["distinct_prompt_seed_pairs"]
    return found


def _refused(error_id: str, seen: str, required: str) -> Refused:
    return Refused(error_id, seen=seen, required=required, hint=f"samebits explain {error_id}")
