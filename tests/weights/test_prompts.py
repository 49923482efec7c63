import dataclasses
import json
import shutil

import pytest

from samebits import prompts, recipe
from samebits.errors import Refused


class Words:
    """A tokenizer of whole words; its template adds one token on each side."""

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        assert add_generation_prompt
        assert return_dict
        (message,) = messages
        assert message["role"] == "user"
        return {"input_ids": [0, *(len(word) for word in message["content"].split()), 1]}

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(i) for i in ids if i > 2)


PROMPT = prompts.Prompt((1, 2), "12", "sum", "7 + 5")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 1.1),
        ("12.", 1.1),
        ("7 + 5 = 12.", 1.0),
        ("12 is 7 + 5", 0.0),
        ("-12", 0.1),
        ("112", 0.1),
        ("the answer", 0.0),
        ("", 0.0),
    ],
)
def test_reward(text, value):
    ids = [*map(ord, text), 2]
    assert prompts.reward(PROMPT, ids, Words()) == pytest.approx(value)


def test_committed_prompts_of_the_case():
    loaded = prompts.load(recipe.load("smollm2-135m"), Words())
    assert len(loaded) == len({p.question for p in loaded}) > 60
    assert {p.task for p in loaded} == {"basic_arithmetic", "chain_sum"}
    for p in loaded:
        left, sign, right = p.question.split("Answer")[0].strip(" .=").split()[-3:]
        total = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert p.answer == str(total)
        assert p.ids == (0, *(len(word) for word in p.question.split()), 1)


@pytest.mark.parametrize(
    "edit",
    [
        lambda lines: lines[1:],
        lambda lines: lines[:1],
        lambda lines: [],
        lambda lines: [*lines, "{"],
        lambda lines: [*lines, json.dumps({"task": "t", "question": "q"})],
        lambda lines: [*lines, json.dumps({"task": "t", "question": "q", "answer": 3})],
        lambda lines: [*lines, "3"],
    ],
)
def test_broken_files_are_refused(tmp_path, edit):
    case = recipe.load("smollm2-135m")
    shutil.copy(case.path, tmp_path)
    lines = (case.folder / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "prompts.jsonl").write_text("\n".join(edit(lines)))
    with pytest.raises(Refused, match="SB1007"):
        prompts.load(dataclasses.replace(case, path=tmp_path / "recipe.yaml"), Words())


def test_a_case_without_prompts_is_refused():
    with pytest.raises(Refused, match="SB1007"):
        prompts.load(recipe.load("qwen3-tiny"), Words())


def test_a_case_may_name_the_prompts_of_another(tmp_path):
    owner = recipe.load("smollm2-135m")
    case = recipe.load("smollm2-135m-h200")
    assert case.data["prompts"] == owner.case
    assert prompts.path(case) == owner.folder / "prompts.jsonl"
    alone = dataclasses.replace(case, path=tmp_path / "cases" / case.case / "recipe.yaml")
    with pytest.raises(Refused, match="SB1007"):  # never proved on synthetic prompts instead
        prompts.path(alone)
