import pytest

from samebits import recipe as recipes
from samebits.errors import Refused


@pytest.fixture
def edited(tmp_path):
    """Writes a changed copy of a recipe and returns its path."""

    def edit(old: str, new: str):
        text = recipes.find("qwen3-tiny").read_text()
        assert text.count(old) == 1
        path = tmp_path / "recipe.yaml"
        path.write_text(text.replace(old, new))
        return path

    return edit


def test_recipes_give_the_configs_of_their_models(recipe):
    config = recipe.hf_config()
    assert isinstance(config["rms_norm_eps"], float)
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert set(recipe.legs) >= {"A", "B", "C"}


def test_comments_and_layout_do_not_change_the_digest(edited):
    path = edited("case: qwen3-tiny\n", "# a comment\ncase:   'qwen3-tiny'\n")
    assert recipes.load(path).digest == recipes.load("qwen3-tiny").digest


def test_a_case_computes_on_a_cpu_unless_it_says_otherwise(edited):
    there = recipes.load("qwen3-tiny")
    gpu = recipes.load(edited("case: qwen3-tiny\n", "case: qwen3-tiny\nplatform: sm90\n"))
    assert (there.platform, gpu.platform) == ("cpu", "sm90")
    assert gpu.digest != there.digest


def test_the_scope_says_what_a_case_shows_less_than(edited, tmp_path):
    path = edited("case: qwen3-tiny\n", "case: qwen3-tiny\n")
    legs = "not claimed: E, F, O, rl"
    assert recipes.load(path).scope == f"drawn weights; {legs}"
    published = tmp_path / recipes.PUBLISHED
    published.write_text('{"num_hidden_layers": 28}')
    layers = recipes.load(path).config["num_hidden_layers"]
    assert recipes.load(path).scope == f"proxy: {layers} of 28 layers, drawn weights; {legs}"
    published.write_text(f'{{"num_hidden_layers": {layers}}}')
    assert recipes.load(path).scope == f"drawn weights; {legs}"
    assert recipes.load("smollm2-135m").scope == "not claimed: D"  # real weights, whole depth
    assert recipes.qualified("EQUAL", "") == "EQUAL"
    assert recipes.qualified("EQUAL", legs) == f"EQUAL ({legs})"


def test_a_value_changes_the_digest(edited):
    path = edited("vocab_size: 1024", "vocab_size: 2048")
    assert recipes.load(path).digest != recipes.load("qwen3-tiny").digest


@pytest.mark.parametrize(
    ("old", "new", "error_id"),
    [
        ("case: qwen3-tiny\n", "case: qwen3-tiny\nextra: 1\n", "SB0314"),
        ("  kv_blocks: 256\n", "  kv_blocks: 256\n  kv_blocks: 128\n", "SB0306"),
        ('rms_norm_eps: "1e-6"', "rms_norm_eps: 0.000001", "SB0305"),
        ('rms_norm_eps: "1e-6"', 'rms_norm_eps: "small"', "SB0314"),
        ('rms_norm_eps: "1e-6"', 'rms_norm_eps: "nan"', "SB0314"),
        ("architecture: qwen3", "architecture: mamba", "SB0314"),
        ("kind: counter-hash", "kind: download", "SB0314"),
        ("case: qwen3-tiny\n", "case: qwen3-tiny\nplatform: sm80\n", "SB0314"),
        ("  block_size: 16\n", "", "SB0314"),
        ("case: qwen3-tiny", "case: [", "SB0314"),
        ("contract:\n", "contract:\n  gdn_schedule: cpr\n", "SB0314"),
        ("    head_dim: 64\n", "    head_dim: 64\n    linear_num_key_heads: 2\n", "SB0314"),
        ("architecture: qwen3", "architecture: qwen3_5_text", "SB0314"),
    ],
)
def test_a_bad_recipe_is_refused(edited, old, new, error_id):
    with pytest.raises(Refused) as refused:
        recipes.load(edited(old, new))
    assert refused.value.error_id == error_id


def test_an_unknown_case_is_refused_with_the_known_ones():
    with pytest.raises(Refused, match="qwen3-tiny"):
        recipes.load("no-such-case")


def test_a_case_says_which_layers_of_the_published_model_it_leaves_out(tmp_path):
    assert recipes.load("qwen3-8b-h200").left_out == ("32 of 36 layers",)
    assert recipes.load("qwen3-tiny").left_out == ()
    source = recipes.load("qwen3-8b-h200").folder
    text = (source / "recipe.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(text.replace("_layers: 4 #", "_layers: 36 #"))
    loaded = recipes.load(tmp_path)
    assert loaded.left_out == ()
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    assert loaded.left_out == ()
    for broken in ("[", "[]", "{}", '{"num_hidden_layers": null}'):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(Refused, match="SB0920"):
            _ = loaded.left_out


def test_one_number_has_one_spelling(tmp_path):
    """1e-06 is 1e-6 for a recipe, its digest, and the contract that is built from it."""
    text = recipes.load("qwen3-tiny").path.read_text()
    assert '"1e-6"' in text
    folder = tmp_path / "qwen3-tiny"
    folder.mkdir()
    for spelling in ("1e-06", "0.000001", "1E-6"):
        (folder / "recipe.yaml").write_text(text.replace('"1e-6"', f'"{spelling}"'))
        found = recipes.load(folder / "recipe.yaml")
        assert found.config["rms_norm_eps"] == "1e-6"
        assert found.digest == recipes.load("qwen3-tiny").digest
    (folder / "recipe.yaml").write_text(text.replace('"1e-6"', '"2e-6"'))
    assert recipes.load(folder / "recipe.yaml").digest != recipes.load("qwen3-tiny").digest
