"""A text model inside a published file: judged there, taken out on request, said in its case."""

import hashlib
import json

import pytest

from samebits import cli
from samebits import recipe as recipes
from samebits.casework import published as reading
from samebits.casework import steps, text_model
from samebits.errors import Refused
from samebits.evidence import required

TAKEN = ("vision tower", "rotary sections", "multi-token prediction")


def regions(path) -> list[str]:
    return [gap.region for gap in reading.gaps(reading.read(path))]


def test_the_text_model_inside_is_judged_and_what_stands_around_it(published, composite, operators):
    assert regions(published(composite)) == ["vision.encoder", "rope.sections"]
    composite["text_config"] |= {"rms_norm_eps": None, "num_experts": 8}
    assert {"norm.layer", "moe.route"} <= {*regions(published(composite))}


def test_a_file_around_a_text_model_is_a_gap_whatever_it_holds(published, hybrid, operators):
    around = {"architectures": hybrid["architectures"], "text_config": hybrid}
    (gap,) = reading.gaps(reading.read(published(around)))
    assert gap.region == "engine hooks" and "more than its text model" in gap.because


def test_the_text_model_alone_has_no_gap_and_the_dimensions_of_a_plain_one(
    published, composite, hybrid, operators
):
    path = published(composite)
    config, parts = reading.text_only(path)
    assert reading.gaps(config) == [] and tuple(part.what for part in parts) == TAKEN
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    derived = config[recipes.TEXT_ONLY]
    assert derived["of"] == composite["architectures"][0] and derived["taken_out"] == [*TAKEN]
    assert derived["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert not [name for name in config if name.startswith(("mtp_", "vision_", "image_", "text_"))]
    assert config["rope_parameters"] == hybrid["rope_parameters"]
    assert reading.dimensions(config, path) == reading.dimensions(hybrid, path)


def test_a_derived_file_that_is_derived_again_keeps_what_was_taken_out_before(
    published, composite, operators
):
    path = published(composite)
    once, _ = reading.text_only(path)
    path = published(once | {"mtp_num_hidden_layers": 1})
    again, (part,) = reading.text_only(path)
    derived = again[recipes.TEXT_ONLY]
    assert derived["of"] == composite["architectures"][0]
    assert derived["taken_out"] == [*TAKEN, part.what]
    assert derived["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_is_text_already_stays_as_it_is(published, hybrid):
    path = published(hybrid)
    assert reading.text_only(path) == (hybrid, ())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn"},
        {"rope_type": "mrope"},
        {"mrope_section": [11, 11, 11]},
        {"mrope_section": [16, 16]},
        {"mrope_section": [33, -1, 0]},
        {"mrope_section": None},
        {"partial_rotary_factor": 0.5},
    ],
    ids=str,
)
def test_sections_that_are_not_known_to_be_plain_stay(published, composite, operators, rope):
    composite["text_config"]["rope_parameters"] |= rope
    config, parts = reading.text_only(published(composite))
    assert "rope.sections" in [gap.region for gap in reading.gaps(config)]
    assert "rotary sections" not in [part.what for part in parts]


def test_another_class_is_not_given_one_that_engines_know(published, composite, operators):
    composite["architectures"] = ["Qwen3VLForConditionalGeneration"]
    config, _ = reading.text_only(published(composite))
    assert "engine hooks" in [gap.region for gap in reading.gaps(config)]


def test_what_stands_outside_only_belongs_to_the_text_model_too(published, composite, operators):
    composite["quantization_config"] = {"bits": 4}
    del composite["text_config"]["tie_word_embeddings"]
    config, _ = reading.text_only(published(composite))
    assert config["tie_word_embeddings"] is True
    assert [gap.region for gap in reading.gaps(config)] == ["gemm.quantized"]


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"text_config": []},
        {"text_config": {"hidden_size": "1024"}},
        {"samebits_text_only": {"of": "X", "sha256": "0", "taken_out": []}},
    ],
    ids=str,
)
def test_a_file_that_contradicts_itself_or_holds_no_model_is_refused(published, composite, changes):
    with pytest.raises(Refused, match="SB0920"):
        reading.read(published(composite, **changes))


def test_a_refusal_names_the_option_where_it_helps(checkout, published, composite, capsys):
    path = str(published(composite))
    for verb in (["plan", path], ["case", "new", "fresh", "--config", path]):
        assert cli.run(verb) == 2
        assert f"hint: samebits {' '.join(verb)} --text-only\n" in capsys.readouterr().err
    assert not (checkout / "cases" / "fresh").exists()
    composite["text_config"]["num_experts"] = 8
    published(composite)
    for verb in (["plan", path], ["case", "new", "fresh", "--config", path]):
        assert cli.run(verb) == 2 and cli.run([*verb, "--text-only"]) == 2
        assert "hint: samebits explain SB0916" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb",
    [["plan", "qwen3-tiny"], ["case", "new", "fresh", "--architecture", "llama"]],
)
def test_the_option_is_for_published_files(checkout, verb, capsys):
    assert cli.run([*verb, "--text-only"]) == 2
    assert "--text-only takes a model out of" in capsys.readouterr().err


def test_plan_says_what_it_judges(checkout, published, composite, capsys):
    path = str(published(composite))
    assert cli.run(["plan", path, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["architecture"] == "qwen3_5_text" and found["memory"] is None
    assert found["text_model"] == {"of": composite["architectures"][0], "taken_out": []}
    assert cli.run(["plan", path, "--text-only"]) == 0
    assert f"left out: {', '.join(TAKEN)}" in capsys.readouterr().out


def test_a_case_says_what_it_was_derived_without(checkout, published, composite, capsys):
    path = published(composite)
    assert cli.run(["case", "new", "fresh", "--config", str(path), "--text-only"]) == 0
    assert f"left out of {path}: {', '.join(TAKEN)}" in capsys.readouterr().out
    recipe = recipes.load("fresh")
    assert recipe.architecture == "qwen3_5_text" and recipe.taken_out == TAKEN
    kept = recipe.folder / "config.json"
    assert reading.gaps(reading.read(kept)) == []
    for page in (recipe.path, recipe.folder / "recipe.md"):
        assert composite["architectures"][0] in page.read_text()
    assert hashlib.sha256(path.read_bytes()).hexdigest() in recipe.path.read_text()
    shown = (recipe.folder / "recipe.md").read_text().partition("## What is not shown")[2]
    assert "[11, 11, 10]" in shown and "image" in shown and "next token" in shown
    assert recipe.left_out == ("20 of 24 layers", *TAKEN)
    assert required.not_covered("cpu", recipe.left_out)[1:4] == TAKEN
    assert recipe.scope == "proxy: 4 of 24 layers, text model only, drawn weights"
    (intake, *_) = steps.progress("fresh").states
    assert intake.state == steps.DONE
    assert cli.run(["plan", "fresh"]) == 0
    assert "left out: vision tower" in capsys.readouterr().out


def test_a_case_of_a_published_text_model_says_nothing_of_the_kind(checkout, published, hybrid):
    assert cli.run(["case", "new", "fresh", "--config", str(published(hybrid)), "--text-only"]) == 0
    recipe = recipes.load("fresh")
    assert recipe.taken_out is None and recipe.left_out == ("20 of 24 layers",)
    assert recipe.scope == "proxy: 4 of 24 layers, drawn weights"
    assert "published ones" in recipe.path.read_text()


def test_every_class_that_is_named_is_one_that_engines_know():
    for name in text_model.CLASSES.values():
        assert reading.known(reading.architecture({"architectures": [name]}))
