"""Prompts with verifiable answers: token ids in, token ids out.

A case's `prompts.jsonl` was written by `scripts/make_prompts.py` from reasoning-gym; its first line
names version, seed and tasks. The chat template is applied once, here; everything after works on
ids, because text that is tokenised again may give other tokens than those that were sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.errors import Refused, word
from samebits.recipe import Recipe

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
FILE = "prompts.jsonl"
_RIGHT, _FORMAT = 1.0, 0.1
_FIELDS = {"task", "question", "answer"}


@dataclass(frozen=True)
class Prompt:
    """`ids` are the templated prompt's tokens, generation prompt included."""

    ids: tuple[int, ...]
    answer: str
    task: str
    question: str


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer of a prepared model folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def path(recipe: Recipe) -> Path:
    """The prompt file of a case; a case without one is proved on synthetic prompts.

    `prompts` of a recipe names another case whose file it is; SB1007 where that has none.
    """
    owner = recipe.data.get("prompts")
    if owner is None:
        return recipe.folder / FILE
    file = recipe.folder.parent / owner / FILE
    if not file.is_file():
        raise Refused(
            "SB1007",
            seen=f"recipe of {recipe.case}: prompts of {owner}, which has no {FILE}",
            required="a case beside it with a prompt file",
            hint="samebits case list",
        )
    return file


def load(recipe: Recipe, tokenizer: Any) -> list[Prompt]:
    """All prompts of a case, in file order. Raises Refused SB1007 for a missing or broken file."""
    file = path(recipe)
    try:
        header, *rows = [json.loads(line) for line in file.read_text().splitlines()]
        if "generator" not in header or "seed" not in header:
            raise ValueError("line 1 does not name its generator and seed")
        for number, row in enumerate(rows, start=2):
            if set(row) != _FIELDS or not all(type(value) is str for value in row.values()):
                raise ValueError(f"line {number} needs exactly the texts {sorted(_FIELDS)}")
        if not rows:
            raise ValueError("no prompt")
    except (OSError, ValueError, TypeError) as problem:
        raise Refused(
            "SB1007",
            seen=f"{file.name} of {recipe.case}: {problem}",
            required="a header line, then one prompt a line",
            hint=f"git -C {word(file.parent)} checkout -- {word(file.name)}",
        ) from None
    return [
        Prompt(encode(row["question"], tokenizer), row["answer"], row["task"], row["question"])
        for row in rows
    ]


def encode(question: str, tokenizer: Any) -> tuple[int, ...]:
    """Token ids of one user turn under the model's chat template."""
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )
    return tuple(encoded["input_ids"])


def reward(prompt: Prompt, token_ids: Sequence[int], tokenizer: Any) -> float:
    """1 when the last number of the text is the answer, plus 0.1 for a text that is only a number.

    `token_ids` are the sampled tokens, end of text included when it was sampled.
    """
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True).strip()
    numbers = _NUMBER.findall(text)
    right = bool(numbers) and numbers[-1] == prompt.answer
    terse = _NUMBER.fullmatch(text.removesuffix(".")) is not None
    return _RIGHT * right + _FORMAT * terse
