"""Bytes that are counted from dimensions are those of the tensors that engines really hold."""

import math

import pytest

from samebits import recipe as recipes
from samebits import runtime
from samebits.casework import memory
from samebits.gates import pages, stages, tasks
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
    assert not stages.rl_alone(recipes.load("qwen3.5-9b-h200"))  # does not train either
    deep = recipes.load("qwen3.5-9b-rl-h200")
    assert deep.optimizer == "sgd" and stages.rl_alone(deep)
    count = memory.parameters(deep.config, qk_norm=False)
    assert memory.rl_bytes(deep.config, "sgd") == 12 * count
    assert memory.rl_bytes(deep.config, "adam") == 20 * count
    assert 8.5e9 < count < 9.5e9


GIB = 1 << 30


def test_a_pass_of_recurrent_layers_has_fewer_tokens_and_one_of_stock_fewest():
    recipe = recipes.load("qwen3.5-9b-rl-h200")
    ours, theirs = (memory.recurrent_bytes(recipe.config, stock=stock) for stock in (False, True))
    plain = memory.pass_bytes(recipe.config)
    # Torch's rule keeps 13,056 bytes for a token and head, as autograd's saved tensors add up.
    assert theirs == pytest.approx(24 * (32 * 13_056 + 180_000), rel=0.02)
    assert stages.micro_tokens(recipe) == (24 * GIB) // plain  # nothing is kept for a score
    assert stages.micro_tokens(recipe, training=True) == 8 * GIB // (plain + ours)
    stock = stages.micro_tokens(recipe, training=True, stock=True)
    assert stock == 8 * GIB // (plain + theirs)
    longest = tasks._LONGEST + recipe.rl["max_tokens"]
    assert longest <= stock < 2 * longest  # one of its sequences at a time
    assert memory.recurrent_bytes(recipes.load("qwen3-8b-h200").config, stock=True) == 0


def test_refits_at_full_depth_fit_one_gpu():
    """Parameters, pages, and the longest sequence of a step, or what a refit receives."""
    recipe = recipes.load("qwen3.5-9b-rl-h200")
    assert stages.rl_alone(recipe)
    config, engine = recipe.config, recipe.engine
    weights = 2 * memory.parameters(config, qk_norm=False)
    full = config["num_hidden_layers"] // config["full_attention_interval"]
    page = full * engine["block_size"] * memory.kv_bytes(config, layers=1)
    assert page == 30 << 20
    pages_of_one = pages.states(recipe) + 2  # its prompt and response cross the end of a page
    assert engine["kv_blocks"] > engine["max_num_seqs"] * (pages_of_one - 1) + pages_of_one
    each = memory.pass_bytes(config) + memory.recurrent_bytes(config, stock=False)
    longest = engine["block_size"] + tasks._LONGEST + recipe.rl["max_tokens"]
    assert longest <= engine["max_model_len"]
    step = longest * each + 7 * GIB  # of the output layer: logits, its gradient in fp32 and bf16
    rest = engine["kv_blocks"] * page + 6 * GIB  # contexts, graphs, workspaces
    assert memory.rl_bytes(config, recipe.optimizer) + rest + max(step, weights) < 130 * GIB


def test_all_requests_of_a_step_decode_side_by_side():
    """Decode steps cost the same for few as for many, and there are tokens to spare."""
    recipe = recipes.load("qwen3.5-9b-rl-h200")
    sizes = recipe.rl
    assert sizes["prompts_per_step"] * sizes["samples_per_prompt"] <= recipe.engine["max_num_seqs"]
    each = sizes["prompts_per_step"] * sizes["samples_per_prompt"] * sizes["max_tokens"]
    assert (sizes["steps"] - 1) * each > 1.05 * recipe.legs["E"].tokens
