"""`samebits case new`: a folder that its own checks accept, or nothing at all."""

import json

import pytest
import yaml

from samebits import cli
from samebits import recipe as recipes
from samebits.casework import layouts, memory
from samebits.contract.build import build
from samebits.gates import workload
from samebits.gates.sizes import Size


def new(*args: str) -> int:
    return cli.run(["case", "new", *args])


def left(checkout) -> list[str]:
    return sorted(path.name for path in (checkout / "cases").iterdir())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3_5_text"])
def test_every_architecture_gives_a_case_that_a_contract_can_be_built_for(
    checkout, operators, architecture, capsys
):
    assert new("fresh", "--architecture", architecture) == 0
    assert "samebits contract build fresh" in capsys.readouterr().out
    recipe = recipes.load("fresh")
    assert recipe.architecture == architecture and layouts.problems_of(recipe) == []
    assert set(recipe.legs) == set("ABCDEFO") and recipe.rl is not None
    build(recipe, operators)
    names = sorted(path.name for path in recipe.folder.iterdir())
    assert names == ["broke.md", "ledger.json", "recipe.md", "recipe.yaml"]
    assert "<model>" not in recipe.path.with_name("recipe.md").read_text()


def test_published_dimensions_with_few_layers(checkout, published, capsys):
    path = published()
    assert new("fresh", "--config", str(path), "--json") == 0
    assert "config.json" in json.loads(capsys.readouterr().out)["files"]
    recipe = recipes.load("fresh")
    assert recipe.config["hidden_size"] == 2048 and recipe.config["vocab_size"] == 128256
    assert recipe.config["num_hidden_layers"] == 2
    assert (recipe.folder / "config.json").read_bytes() == path.read_bytes()
    text = recipe.path.read_text()
    assert 'rms_norm_eps: "1e-5"' in text and "# Leg D compares" in text


@pytest.mark.parametrize("model", [None, "hybrid"])
def test_the_slow_control_of_a_recorded_run_is_as_short_as_that_of_a_quick_one(
    checkout, published, request, model
):
    base = {} if model is None else {"base": request.getfixturevalue(model)}
    assert new("fresh", "--config", str(published(**base))) == 0
    recipe = recipes.load("fresh")
    record, quick = (Size.of(recipe, quick=quick, record=not quick) for quick in (False, True))
    assert (record.stock_rl_steps, record.stock_rl_prompts) == (2, 1)
    assert (quick.stock_rl_steps, quick.stock_rl_prompts) == (2, 1)
    assert record.control_requests >= quick.control_requests
    assert record.control_prompt >= quick.control_prompt
    # A control is read on CONTROL_TOKENS or more; leg O compares what the controls scored.
    assert record.control_requests * record.control_response >= recipe.legs["O"].tokens


def test_layers_and_series_can_be_chosen(checkout, published):
    assert (
        new("fresh", "--config", str(published()), "--layers", "3", "--series", "qwen3-tiny") == 0
    )
    recipe = recipes.load("fresh")
    assert recipe.config["num_hidden_layers"] == 3
    assert dict(recipe.series) == dict.fromkeys(("vllm", "megatron", "verl"), "qwen3-tiny")


def test_a_model_that_ranks_cannot_share_claims_one_rank(checkout, published):
    path = published(num_attention_heads=9, num_key_value_heads=3, hidden_size=576)
    assert new("fresh", "--config", str(path)) == 0
    recipe = recipes.load("fresh")
    assert recipe.trainer_tp == recipe.rollout_tp == (1,) and "D" not in recipe.legs
    assert layouts.problems_of(recipe) == []


def test_a_hybrid_gets_one_interval_and_pages_as_large_as_a_state(checkout, published, hybrid):
    assert new("fresh", "--config", str(published(hybrid))) == 0
    recipe = recipes.load("fresh")
    assert recipe.config["num_hidden_layers"] == recipe.config["full_attention_interval"] == 4
    block = recipe.engine["block_size"]
    state = memory.state_bytes(recipe.config, "chunk_row", layers=1)
    assert block % 64 == 0
    assert block * memory.kv_bytes(recipe.config, layers=1) - state >= 0
    assert (block - 64) * memory.kv_bytes(recipe.config, layers=1) < state
    assert (block, recipe.engine["max_model_len"]) == (1024, 2048)
    assert 1024 < recipe.engine["max_num_batched_tokens"] < 2048


def test_a_hybrid_with_large_pages_runs_few_tokens(checkout, published, hybrid, tmp_path):
    """Twice as many as its four prompts of a page have, at most, and what every leg asks for."""
    assert new("fresh", "--config", str(published(hybrid))) == 0
    recipe = recipes.load("fresh")
    for quick in (False, True):
        size = Size.of(recipe, quick=quick, record=not quick)
        requests = workload.main(recipe, tmp_path, size.requests, size.response, 257)
        total = sum(len(r.prompt) + r.max_tokens for r in requests)
        assert recipe.legs["C"].tokens < 2 * total < 2 * 1.3 * 4 * 1024
        assert len(requests) * size.response * 3 >= recipe.legs["B"].tokens
        rl = recipe.rl
        samples = rl["prompts_per_step"] * rl["samples_per_prompt"] * rl["max_tokens"]
        assert (rl["steps"] - 1) * samples >= recipe.legs["E"].tokens


def test_the_templates_page_is_what_a_hybrid_recipe_has():
    """The rule reproduces the block sizes of both cases that were proved with theirs."""
    for case in ("qwen3.5-tiny", "qwen3.5-tiny-cpr"):
        recipe = recipes.load(case)
        state = memory.state_bytes(recipe.config, recipe.gdn_schedule, layers=1)
        token = memory.kv_bytes(recipe.config, layers=1)
        assert recipe.engine["block_size"] == -(-state // token // 64) * 64


def test_nothing_is_overwritten(checkout, capsys):
    assert new("fresh", "--architecture", "llama") == 0
    ledger = checkout / "cases" / "fresh" / "ledger.json"
    ledger.write_text("mine")
    for name in ("fresh", "qwen3-tiny"):
        assert new(name, "--architecture", "llama") == 2
        assert "SB0915" in capsys.readouterr().err
    assert ledger.read_text() == "mine"


def test_an_empty_folder_is_left_alone(checkout, capsys):
    (checkout / "cases" / "fresh").mkdir()
    assert new("fresh", "--architecture", "llama") == 2
    assert "SB0915" in capsys.readouterr().err
    assert list((checkout / "cases" / "fresh").iterdir()) == []


def test_a_dangling_link_is_not_overwritten(checkout, capsys):
    (checkout / "cases" / "fresh").symlink_to(checkout / "nowhere")
    assert new("fresh", "--architecture", "llama") == 2
    assert "SB0915" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["Upper", "--architecture", "llama"], "SB0314"),
        (["../out", "--architecture", "llama"], "SB0314"),
        (["x" * 300, "--architecture", "llama"], "SB0314"),
        (["fresh", "--architecture", "llama", "--series", "nope"], "SB0102"),
        (["fresh", "--architecture", "llama", "--layers", "9" * 20], "SB0314"),
        (["fresh", "--architecture", "mamba"], "SB0916"),
        (["fresh"], "one of --config"),
        (["fresh", "--config", "absent.json"], "SB0303"),
    ],
)
def test_bad_input_leaves_nothing(checkout, capsys, args, error):
    before = left(checkout)
    assert new(*args) == 2
    assert error in capsys.readouterr().err
    assert left(checkout) == before


def test_no_more_layers_than_the_published_model_has(checkout, published, capsys):
    before, path = left(checkout), str(published())
    for layers in ("17", "9" * 20):
        assert new("fresh", "--config", path, "--layers", layers) == 2
        said = capsys.readouterr().err
        assert "SB0314" in said and f"{layers} layers" in said and "at most 16" in said
    assert left(checkout) == before
    assert new("fresh", "--config", path, "--layers", "16") == 0


def test_a_refused_draft_is_named_by_its_case(checkout, capsys):
    assert new("fresh", "--architecture", "llama", "--layers", "1025") == 2
    said = capsys.readouterr().err
    assert "recipe.yaml of fresh, model/config, at num_hidden_layers: 1025" in said
    assert "/.fresh." not in said


def test_both_sources_at_once_are_refused(checkout, published, capsys):
    assert new("fresh", "--config", str(published()), "--architecture", "llama") == 2
    assert "one of --config" in capsys.readouterr().err


def test_a_model_with_missing_regions_is_refused_and_leaves_nothing(checkout, published, capsys):
    before = left(checkout)
    config = published(num_experts=128, rope_scaling={"rope_type": "yarn"})
    assert new("fresh", "--config", str(config)) == 2
    said = capsys.readouterr().err
    assert "SB0916" in said and "moe.route (num_experts=128)" in said and "rope.scaled" in said
    assert left(checkout) == before


def test_templates_say_how_to_fill_them_in_and_load(checkout):
    for name in ("recipe.yaml", "hybrid.yaml"):
        data = yaml.safe_load((checkout / "cases" / "_template" / name).read_text())
        assert data["case"] == "my-model"
    assert recipes.known_cases() == ["qwen3-tiny"]
