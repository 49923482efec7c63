"""What an RL run asks: the prompts of a file, or drawn ids with a reward that anybody can count."""

import types

import pytest

from samebits import prompts
from samebits import recipe as recipes
from samebits.gates import rl, tasks


@pytest.fixture(scope="module")
def recipe():
    return recipes.load("qwen3.5-tiny")


def test_drawn_prompts_need_no_tokenizer(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "tokenizer_of", None)  # a call of it would fail
    settings = recipe.rl
    asked = tasks.of(recipe, tmp_path, rl._needed(settings))
    plan = rl._plan(asked, settings, settings["steps"])
    assert {len(step) for step in plan} == {settings["prompts_per_step"]}
    assert {step[0] for step in plan} == {asked.prompts[0]}
    others = [prompt.ids for step in plan for prompt in step[1:]]
    assert len(set(others)) == len(others)
    assert len(asked.prompts[0].ids) > recipe.engine["block_size"] > max(map(len, others))
    room = recipe.engine["max_model_len"] - settings["max_tokens"]
    assert len(asked.prompts[0].ids) < room
    assert all(3 <= i < recipe.config["vocab_size"] for ids in others for i in ids)


def test_prompts_of_a_control_over_large_pages_are_short(recipe):
    """Its first prompt returns in every step, and fills no page; the others are as long as ever."""
    few, many = (tasks.drawn(recipe, 3, paged=paged).prompts for paged in (False, True))
    assert len(few[0].ids) < 16 < recipe.engine["block_size"] < len(many[0].ids)
    assert [len(prompt.ids) for prompt in few[1:]] == [len(prompt.ids) for prompt in many[1:]]


def test_the_reward_is_the_share_of_tokens_in_half_of_the_vocabulary(recipe):
    asked = tasks.drawn(recipe, 2)
    size = recipe.config["vocab_size"]
    each = [asked.reward(asked.prompts[1], [token]) for token in range(size)]
    assert sum(each) == size / 2 and set(each) == {0.0, 1.0}
    mixed = [each.index(1.0), each.index(0.0), each.index(0.0), each.index(0.0)]
    assert asked.reward(asked.prompts[1], mixed) == 0.25
    assert tasks.drawn(recipe, 2).prompts == asked.prompts


def test_a_case_with_a_prompt_file_asks_its_prompts(tmp_path, monkeypatch):
    recipe = recipes.load("smollm2-135m")
    prompt = types.SimpleNamespace(ids=(1, 2), answer="4")
    texts = types.SimpleNamespace(decode=lambda ids, skip_special_tokens: "2 + 2 = 4")
    monkeypatch.setattr(prompts, "tokenizer_of", lambda model: texts)
    monkeypatch.setattr(prompts, "load", lambda recipe, tokenizer: [prompt])
    asked = tasks.of(recipe, tmp_path, 3)
    assert asked.prompts == [prompt] and asked.reward(prompt, [7]) == 1.0
