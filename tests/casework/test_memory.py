"""Bytes that are counted from dimensions are those of the tensors that engines really hold."""

import math

import pytest

from samebits import recipe as recipes
from samebits import runtime
from samebits.casework import memory
from samebits.gates import stages
from samebits.hooks.vllm.gdn import state
from samebits.weights import sources


@pytest.mark.parametrize("case", ["qwen2-tiny", "qwen3-tiny", "qwen3.5-tiny"])
def test_parameters_are_those_of_the_model(case, tmp_path):
    recipe = recipes.load(case)
    shapes = sources._configure(recipe, tmp_path)
    counted = sum(math.prod(shape) for shape in shapes.values())
    biased = case == "qwen2-tiny"
    assert memory.parameters(recipe.config, not biased, qkv_bias=biased) == counted


def test_parameters_of_a_tied_llama():
    config = recipes.load("smollm2-135m").config
    assert memory.parameters(config, qk_norm=False) == 134_515_008  # as published


def test_parameters_of_a_model_with_a_bias():
    config = recipes.load("qwen3-tiny").config
    plain, biased = (memory.parameters(config, False, qkv_bias=bias) for bias in (False, True))
    assert biased - plain == 4 * (4 + 2 + 2) * 64


@pytest.mark.parametrize("biased", [False, True])
def test_ranks_share_all_but_norms(biased):
    config = recipes.load("qwen3-tiny").config
    one, two = (memory.parameters(config, True, tp, qkv_bias=biased) for tp in (1, 2))
    norms = config["num_hidden_layers"] * (2 * config["hidden_size"] + 2 * config["head_dim"])
    norms += config["hidden_size"]
    assert 2 * (two - norms) == one - norms


@pytest.mark.parametrize("case", ["qwen3.5-tiny", "qwen3.5-tiny-cpr"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("aligned", [True, False])
def test_states_are_those_of_the_rollout_engine(monkeypatch, case, ranks, aligned):
    recipe = recipes.load(case)
    config, schedule = recipe.config, recipe.gdn_schedule
    monkeypatch.setattr(runtime, "aligned", lambda *_: aligned)
    monkeypatch.setattr(state, "schedule", lambda: schedule)

    class Text:
        def __getattr__(self, name):
            return config[name]

    counted = memory.state_bytes(config, schedule if aligned else None, ranks)
    assert counted == 3 * state.page_bytes(Text(), ranks)


def test_keys_and_values_of_full_attention_only():
    dense, hybrid = (recipes.load(case).config for case in ("qwen3-tiny", "qwen3.5-tiny"))
    assert memory.kv_bytes(dense) == 4 * 2 * 2 * 64 * 2
    assert memory.kv_bytes(hybrid, tp=2) == 1 * 2 * 1 * 256 * 2
    assert memory.state_bytes(dense, "chunk_row") == 0


def test_a_pass_has_fewer_tokens_where_layers_leave_no_room(monkeypatch):
    recipe = recipes.load("qwen3-8b-h200")
    assert stages.micro_tokens(recipe) == (4 << 30) // (4 * 151936)  # of logits alone
    deep = recipe.data["model"]["config"] | {"num_hidden_layers": 36}
    monkeypatch.setitem(recipe.data["model"], "config", deep)
    few = stages.micro_tokens(recipe)
    assert 2048 < few < 7067
    # Logits of 151936 columns take 10 bytes each, a layer's activations about 150 KB.
    assert few * (1_519_360 + 36 * 150_000) == pytest.approx(24 << 30, rel=0.02)
    assert stages.micro_tokens(recipes.load("qwen3-tiny")) == 512
    # With Adam's moments such a model fills the chip, and a step that trains has less room.
    assert recipe.optimizer == "adam"
    assert stages.rl_alone(recipe)
    assert stages.micro_tokens(recipe, training=True) == pytest.approx(few / 3, abs=1)


def test_an_rl_run_is_alone_where_its_parameters_fill_the_chip():
    assert not stages.rl_alone(recipes.load("qwen3-8b-h200"))  # four layers
    assert not stages.rl_alone(recipes.load("qwen3-8b-full-h200"))  # does not train
    assert not stages.rl_alone(recipes.load("qwen3.5-tiny"))
    deep = recipes.load("qwen3.5-9b-h200")
    assert deep.optimizer == "sgd" and stages.rl_alone(deep)
    del deep.data["rl"]
    assert not stages.rl_alone(deep)  # does not train either
    count = memory.parameters(deep.config, qk_norm=False)
    assert memory.rl_bytes(deep.config, "sgd") == 12 * count
    assert memory.rl_bytes(deep.config, "adam") == 20 * count
    assert 8.5e9 < count < 9.5e9
