"""What a published configuration asks for, region by region."""

import json

import pytest

from samebits import cli
from samebits.casework import published as reading
from samebits.errors import Refused
from samebits.ops import registry


def test_a_supported_model_has_no_gap(published, operators):
    assert reading.gaps(reading.read(published())) == []


def test_a_supported_hybrid_has_no_gap(published, hybrid, operators):
    assert reading.gaps(reading.read(published(hybrid))) == []


@pytest.mark.parametrize("model", ["qwen2", "mimo"])
def test_a_bias_of_queries_keys_and_values_is_no_gap_where_the_class_has_one(
    published, operators, model, request
):
    path = published(request.getfixturevalue(model))
    config = reading.read(path)
    assert reading.gaps(config) == [] and reading.architecture(config) == "qwen2"
    found = reading.dimensions(config, path)
    assert found["head_dim"] == config["hidden_size"] // config["num_attention_heads"]
    del operators["gemm.bias"]
    assert [gap.region for gap in reading.gaps(config)] == ["gemm.bias"]


@pytest.mark.parametrize("entry", ["mlp_bias", "use_bias"])
def test_another_bias_is_a_gap_there_too(published, operators, qwen2, entry):
    (gap,) = reading.gaps(reading.read(published(qwen2, **{entry: True})))
    assert gap.region == "gemm.row_bias" and entry in gap.because


def test_heads_that_do_not_divide_the_hidden_size_are_refused_where_they_have_to(published, mimo):
    with pytest.raises(Refused) as caught:
        reading.read(published(mimo, head_dim=64))
    assert "heads of 64" in caught.value.seen
    reading.read(published(head_dim=32))  # llama takes any


GAPS = [
    ({"num_experts": 128}, "moe.combine"),
    ({"n_routed_experts": 8, "n_shared_experts": 1}, "moe.shared"),
    ({"kv_lora_rank": 512}, "attention.mla"),
    ({"index_topk": 2048}, "attention.sparse"),
    ({"linear_attn_config": {"x": 1}}, "kda.core"),
    ({"ssm_state_size": 128}, "mamba.core"),
    ({"layer_types": ["linear_attention", "full_attention"]}, "gdn.core"),
    ({"sliding_window": 4096}, "attention.window"),
    ({"layer_types": ["sliding_attention"]}, "attention.window"),
    ({"layer_types": ["chunked_attention"]}, "attention.chunked"),
    ({"attention_bias": True}, "gemm.row_bias"),
    ({"mlp_bias": True}, "gemm.row_bias"),
    ({"qkv_bias": True}, "gemm.bias"),
    ({"model_type": "qwen2"}, "gemm.bias"),
    ({"qk_norm": True}, "norm.rms"),
    ({"is_causal": False}, "attention.whole"),
    ({"dual_chunk_attention_config": {"chunk_size": 4}}, "attention.chunked"),
    ({"hidden_act": "gelu"}, "act.gelu_mul"),
    ({"rms_norm_eps": None, "layer_norm_eps": 1e-5}, "norm.layer"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, "rope.scaled"),
    ({"rope_scaling": {"type": "yarn"}}, "rope.scaled"),
    ({"rope_parameters": {"mrope_section": [1, 2]}}, "rope.sections"),
    ({"partial_rotary_factor": 0.5}, "rope.partial"),
    ({"final_logit_softcapping": 30.0}, "logits.softcap"),
    ({"embedding_multiplier": 12.0}, "embedding.scale"),
    ({"vision_config": {"depth": 2}}, "vision.encoder"),
    ({"quantization_config": {"bits": 4}}, "gemm.quantized"),
    ({"attn_output_gate": True}, "attention.gate"),
    ({"is_encoder_decoder": True}, "attention.cross"),
]


@pytest.mark.parametrize(("changes", "region"), GAPS)
def test_each_entry_names_the_region_it_needs(published, operators, changes, region):
    found = reading.gaps(reading.read(published(**changes)))
    assert region in [gap.region for gap in found]
    entry = next(iter(changes))
    assert any(gap.region == region and gap.because for gap in found), entry


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"hidden_act": "swish"},
        {"logit_scale": 1.0},
        {"num_experts": 0},
        {"rope_scaling": {"rope_type": "default"}},
    ],
)
def test_neutral_entries_are_no_gap(published, operators, changes):
    assert reading.gaps(reading.read(published(**changes))) == []


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 4096}, {"layer_types": ["sliding_attention"]}]
)
def test_a_window_stays_a_gap_and_says_that_its_operator_is_there(published, operators, changes):
    assert "attention.window" in registry.unrouted("cpu")
    (gap,) = reading.gaps(reading.read(published(**changes)))
    assert gap.region == "attention.window"
    assert gap.because.endswith("an operator exists, neither engine routes to it")
    (other,) = reading.gaps(reading.read(published(kv_lora_rank=512)))
    assert "operator" not in other.because


def test_gdn_heads_of_another_size_are_a_gap(published, hybrid, operators):
    (gap,) = reading.gaps(reading.read(published(hybrid, linear_key_head_dim=64)))
    assert gap.region == "gdn.core" and "64" in gap.because


def test_an_architecture_that_no_engine_hook_knows_is_a_gap_of_its_own(published, operators):
    config = reading.read(published(architectures=["MistralForCausalLM"], model_type="mistral"))
    (gap,) = reading.gaps(config)
    assert gap.region == "engine hooks" and "MistralForCausalLM" in gap.because


def test_a_region_without_an_operator_is_a_gap(published, operators):
    del operators["rope"]
    assert [gap.region for gap in reading.gaps(reading.read(published()))] == ["rope"]


def test_every_region_of_an_architecture_has_a_real_operator():
    for name in ("llama", "qwen2", "qwen3", "qwen3_5_text"):
        assert reading.covered(name) == registry.regions_of(name)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"architectures": []}', '{"model_type": "llama"}']
)
def test_what_is_no_configuration_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(Refused, match="SB0920"):
        reading.read(path)


def test_dimensions_are_those_of_a_recipe(published):
    path = published()
    found = reading.dimensions(reading.read(path), path)
    assert found["rms_norm_eps"] == "1e-5" and found["rope_theta"] == "500000"
    assert found["eos_token_id"] == 128001 and found["num_hidden_layers"] == 16
    assert "full_attention_interval" not in found


def test_a_dimension_that_is_left_out_is_refused(published):
    path = published(intermediate_size=None)
    with pytest.raises(Refused, match="intermediate_size"):
        reading.dimensions(reading.read(path), path)


def test_an_irregular_interval_is_refused(published, hybrid):
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    path = published(hybrid, layer_types=kinds)
    with pytest.raises(Refused, match="regular interval"):
        reading.dimensions(json.loads(path.read_text()), path)


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (["sparse", *["linear_attention"] * 2, "full_attention"], "regular interval"),
        (["linear_attention", "full_attention"] * 2, "full_attention_interval 4, and 2 by"),
    ],
)
def test_layer_types_are_read_beside_a_stated_interval(published, hybrid, kinds, said):
    path = published(hybrid, layer_types=kinds, num_hidden_layers=4, full_attention_interval=4)
    with pytest.raises(Refused, match=said):
        reading.dimensions(json.loads(path.read_text()), path)


def test_other_dimensions_than_published_are_named(published):
    path = published()
    config = reading.read(path)
    mine = reading.dimensions(config, path)
    assert reading.differences(config, {**mine, "num_hidden_layers": 2}, path) == []
    assert reading.differences(config, {**mine, "rms_norm_eps": "0.00001"}, path) == []
    assert len(reading.differences(config, {**mine, "hidden_size": 64}, path)) == 1
    assert len(reading.differences(config, {**mine, "num_hidden_layers": 17}, path)) == 1


NO_MODEL = [
    {"hidden_size": "576"},
    {"hidden_size": {}},
    {"hidden_size": -576},
    {"hidden_size": 576.5},
    {"hidden_size": 2048.0},
    {"hidden_size": True},
    {"hidden_size": 2**20 + 1},
    {"num_hidden_layers": -3},
    {"num_hidden_layers": 1025},
    {"num_attention_heads": 0},
    {"num_attention_heads": 30},
    {"head_dim": None, "hidden_size": 2049},
    {"vocab_size": 10**22},
    {"rope_theta": "x"},
    {"rope_theta": float("nan")},
    {"rope_theta": 10**40},
    {"rope_scaling": {"rope_theta": "x"}},
    {"rope_scaling": []},
    {"rms_norm_eps": 0},
    {"hidden_act": []},
    {"hidden_act": "si\x1b[31mlu"},
    {"layer_types": [[]]},
    {"num_experts": "8"},
    {"tie_word_embeddings": "no"},
    {"eos_token_id": ["x"]},
    {"architectures": ["LlamaForCausalLM\n"]},
]


@pytest.mark.parametrize("changes", NO_MODEL, ids=str)
def test_values_that_no_model_has_are_refused_when_read(checkout, published, capsys, changes):
    path = published(**changes)
    with pytest.raises(Refused, match="SB0920"):
        reading.read(path)
    for verb in (["plan", str(path)], ["case", "new", "fresh", "--config", str(path)]):
        assert cli.run(verb) == 2
        said = capsys.readouterr()
        assert "SB0920" in said.err and "\x1b" not in said.err and said.out == ""
    assert not (checkout / "cases" / "fresh").exists()


@pytest.mark.parametrize("literal", ["1e400", "-1e400", "Infinity", "NaN", "9" * 5000])
def test_numbers_that_are_none_are_refused(published, literal):
    path = published()
    path.write_text(path.read_text().replace("500000.0", literal))
    with pytest.raises(Refused, match="SB0920"):
        reading.read(path)


def test_layer_types_are_as_many_as_layers(published, hybrid):
    path = published(hybrid, num_hidden_layers=20)
    with pytest.raises(Refused, match="24 layer_types for 20 layers"):
        reading.dimensions(reading.read(path), path)
