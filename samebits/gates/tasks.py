"""What an RL run asks, and how it rewards the answers.

A case with a prompt file asks its prompts. One without, because its model knows no text, asks drawn
token ids: the reward is the share of a response's tokens that are in one drawn half of the
vocabulary, which anybody can count and a policy gradient can raise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits import prompts
from samebits.recipe import Recipe

_SEED = 17
_SHORTEST, _LONGEST = 8, 48
_TWO = 2  # tokens of the prompt that a control repeats where no page has to be filled


@dataclass(frozen=True)
class Drawn:
    """A prompt of drawn token ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Tasks:
    """Prompts with `ids`, and `reward(prompt, token ids of a response)`.

    The first prompt is the one that returns in every step.
    """

    prompts: Sequence[Any]
    reward: Callable[[Any, Sequence[int]], float]


def of(recipe: Recipe, model: Path, count: int, *, paged: bool = True) -> Tasks:
    """All prompts of the case's file, or else `count` drawn ones; `paged` as of `drawn`."""
    if not prompts.path(recipe).exists():
        return drawn(recipe, count, paged=paged)
    tokenizer = prompts.tokenizer_of(model)
    return Tasks(
        prompts.load(recipe, tokenizer),
        lambda prompt, ids: prompts.reward(prompt, ids, tokenizer),
    )


def drawn(recipe: Recipe, count: int, *, paged: bool = True) -> Tasks:
    """Short prompts behind one that fills more than a block of the prefix cache, if `paged`; else
    behind one of two tokens."""
    draw = random.Random(_SEED)
    vocabulary = recipe.config["vocab_size"]
    rewarded = frozenset(draw.sample(range(vocabulary), vocabulary // 2))
    lengths = [recipe.engine["block_size"] + _LONGEST if paged else _TWO]
    lengths += [draw.randrange(_SHORTEST, _LONGEST) for _ in range(count - 1)]
    asked = [Drawn(tuple(draw.randrange(3, vocabulary) for _ in range(n))) for n in lengths]

    def reward(prompt: Drawn, ids: Sequence[int]) -> float:
        return sum(token in rewarded for token in ids) / len(ids)

    return Tasks(asked, reward)
