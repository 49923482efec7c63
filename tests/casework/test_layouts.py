"""`samebits plan`: refusals, counts from shapes, and times from records or none."""

import json

import pytest

from samebits import cli
from samebits import recipe as recipes
from samebits.casework import layouts
from samebits.contract.fits import GDN


def plan(capsys, *args: str, expected: int = 0) -> dict:
    capsys.readouterr()
    assert cli.run(["plan", *args, "--json"]) == expected
    return json.loads(capsys.readouterr().out)


def test_a_published_model_needs_no_case(checkout, published, capsys):
    found = plan(capsys, str(published()), "--tp", "8", "--length", "1000")
    assert found["layout"]["refused"] == [] and found["regions"]["missing"] == []
    assert found["tensor_parallel"] == {"1": [], "2": [], "4": [], "8": []}
    memory = found["memory"]
    assert memory["layers"] == 16 and memory["kv_per_sequence"] == 1000 * memory["kv_per_token"]
    assert memory["weights_bf16"] == pytest.approx(1_235_814_400 * 2 / 8, rel=0.001)
    assert found["overhead"] == []


def test_heads_decide(checkout, published, capsys):
    found = plan(capsys, str(published(num_key_value_heads=4)), "--tp", "8", expected=2)
    assert found["layout"]["refused"] == ["4 key-value heads over 8 ranks"]
    assert found["memory"] is None


def test_leaves_of_a_recipe_decide_too(toy, capsys):
    found = plan(capsys, "toy", "--tp", "4", expected=2)
    assert any("leaves of row-parallel sums" in why for why in found["layout"]["refused"])
    assert plan(capsys, "toy", "--tp", "2")["layout"]["refused"] == []


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--tp", "3"], "power of two"),
        (["--ep", "2"], "expert"),
        (["--pp", "2"], "pipeline"),
        (["--cp", "2"], "context"),
        (["--sp"], "sequence"),
    ],
)
def test_axes_that_nobody_proved_are_refused(checkout, capsys, args, word):
    assert cli.run(["plan", "qwen3-tiny", *args]) == 2
    out, err = capsys.readouterr()
    assert "SB0919" in err and word in err and "regions covered" in out


def test_missing_regions_are_refused_after_the_report(checkout, published, capsys):
    path = str(published(num_experts=64))
    found = plan(capsys, path, expected=2)
    assert {gap["region"] for gap in found["regions"]["missing"]} >= {"moe.route", "moe.combine"}
    assert found["memory"] is None and found["overhead"] == []
    assert cli.run(["plan", path]) == 2
    out, err = capsys.readouterr()
    assert "SB0916" in err and "not measured" in out and "not counted" in out


def test_a_hybrid_shows_its_states_beside_those_of_stock(checkout, published, hybrid, capsys):
    found = plan(capsys, str(published(hybrid)), "--tp", "2")
    memory = found["memory"]
    assert memory["state_per_sequence"] > memory["stock_state_per_sequence"] > 0
    assert cli.run(["plan", str(published(hybrid))]) == 0
    assert "stock" in capsys.readouterr().out


def test_a_case_is_planned_with_all_published_layers(checkout, published, capsys):
    assert cli.run(["case", "new", "fresh", "--config", str(published())]) == 0
    memory = plan(capsys, "fresh")["memory"]
    assert (memory["layers"], memory["proved_layers"]) == (16, 2)
    assert cli.run(["plan", "fresh"]) == 0
    assert "16 layers (2 in the case)" in capsys.readouterr().out


def test_times_come_from_records_of_the_same_dimensions_only(toy, capsys):
    assert plan(capsys, "toy")["overhead"] == []
    toy.bench()
    rows = plan(capsys, "toy")["overhead"]
    assert [row["ratio"] for row in rows] == [0.5, 0.5] and rows[0]["case"] == "toy"
    assert plan(capsys, "qwen3-tiny")["overhead"] == rows  # the same dimensions, more layers
    path = toy.folder / "recipe.yaml"
    path.write_text(path.read_text().replace("hidden_size: 256", "hidden_size: 512"))
    assert plan(capsys, "qwen3-tiny")["overhead"] == []


def test_sums_that_leaves_do_not_cut_are_refused(toy, capsys):
    path = toy.folder / "recipe.yaml"
    path.write_text(path.read_text().replace("intermediate_size: 512", "intermediate_size: 511"))
    assert any("FFN of 511" in why for why in layouts.problems_of(toy.recipe))
    assert cli.run(["plan", "toy"]) == 2


def test_a_file_that_is_none_is_refused(checkout, capsys):
    assert cli.run(["plan", "absent.json"]) == 2
    assert "SB0303" in capsys.readouterr().err
    assert cli.run(["plan", "nothing"]) == 2
    assert "SB0322" in capsys.readouterr().err


def test_dimensions_of_a_recipe_are_those_of_a_model_too(toy, capsys):
    path = toy.folder / "recipe.yaml"
    path.write_text(path.read_text().replace("vocab_size: 1024", f"vocab_size: {10**22}"))
    assert cli.run(["plan", "toy"]) == 2
    said = capsys.readouterr()
    assert "SB0314" in said.err and "vocab_size" in said.err and "weights" not in said.out


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("linear_key_head_dim: 128", "linear_key_head_dim: 64", "the rollout takes 128 only"),
        ("linear_value_head_dim: 128", "linear_value_head_dim: 64", "the rollout takes 128 only"),
    ],
)
def test_what_an_engine_refuses_at_its_start_is_not_admissible(checkout, capsys, old, new, why):
    assert cli.run(["case", "new", "fresh", "--architecture", "qwen3_5_text"]) == 0
    assert plan(capsys, "fresh")["layout"]["refused"] == []
    path = checkout / "cases" / "fresh" / "recipe.yaml"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    (said,) = plan(capsys, str(path), expected=2)["layout"]["refused"]
    assert why in said and new.partition(": ")[0] in said
    assert layouts.problems_of(recipes.load("fresh")) == [said]


def test_a_page_that_ends_inside_a_chunk_is_refused_before_a_layout_is_looked_at(checkout, capsys):
    assert cli.run(["case", "new", "fresh", "--architecture", "qwen3_5_text"]) == 0
    path = checkout / "cases" / "fresh" / "recipe.yaml"
    path.write_text(path.read_text().replace("block_size: 256", "block_size: 96"))
    assert cli.run(["plan", str(path)]) == 2
    said = capsys.readouterr().err
    assert "SB0328" in said and "block_size 96" in said and "a multiple of 64" in said
    (problem,) = layouts.problems_of(recipes.load("fresh"))
    assert problem.startswith("block_size 96: ")


def test_the_sizes_are_those_that_the_engine_asks_for():
    from samebits.casework import published
    from samebits.hooks.vllm.gdn import config
    from samebits.ops.gdn import CHUNK

    assert config.HEAD_DIM == published.HEAD_DIM and GDN["gdn.core"]["chunk"] == CHUNK
