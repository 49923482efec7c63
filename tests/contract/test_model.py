import copy
import json

import pytest

from samebits import recipe as recipes
from samebits.contract import Contract, canonical
from samebits.contract.build import build, seal
from samebits.errors import NotObserved, Refused


def refused_id(raw: bytes) -> str:
    with pytest.raises(Refused) as refused:
        Contract.parse(raw)
    return refused.value.error_id


@pytest.fixture
def document(contract):
    return copy.deepcopy(contract.data)


def test_truncated_bytes_are_refused(contract):
    assert refused_id(contract.raw[:-10]) == "SB0303"


def test_an_unknown_key_is_refused(document):
    document["note"] = "x"
    assert refused_id(canonical.encode(document)) == "SB0304"


def test_an_unknown_inner_key_is_refused(document):
    document["composition"][0]["note"] = "x"
    assert refused_id(canonical.encode(document)) == "SB0304"


def test_a_missing_key_is_refused(document):
    del document["claims"]
    assert refused_id(canonical.encode(document)) == "SB0304"


def test_a_float_is_refused(document):
    document["composition"][0]["constants"]["eps"] = 1e-6
    raw = json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    assert refused_id(raw) == "SB0305"


def test_a_key_given_twice_is_refused(contract):
    raw = contract.raw.replace(b'"schema_version":1', b'"schema_version":1,"schema_version":1')
    assert refused_id(raw) == "SB0306"


def test_another_layout_of_the_same_json_is_refused(document):
    assert refused_id(json.dumps(document, indent=2).encode()) == "SB0321"


@pytest.mark.parametrize("name", ["semantic", "numerical_policy", "deployment", "platform"])
def test_a_wrong_digest_is_refused(document, name):
    document["digests"][name] = "0" * 64
    assert refused_id(canonical.encode(document)) == "SB0307"


def test_an_edited_constant_is_refused(document):
    entry = next(e for e in document["composition"] if e["regions"] == ["attention"])
    entry["constants"]["partition"] = 128
    assert refused_id(canonical.encode(document)) == "SB0307"


def test_edited_dimensions_are_refused(document):
    document["model"]["dims"]["hidden_size"] = 1024
    with pytest.raises(Refused, match="dims_digest"):
        seal(document)


def test_a_region_bound_twice_is_refused(document):
    document["composition"].append(document["composition"][0])
    with pytest.raises(Refused, match="bound twice"):
        seal(document)


def test_an_answer_of_an_unbound_region_is_refused(document):
    (record,) = document["platforms"].values()
    record["known_answers"]["gdn.core"] = "0" * 32
    with pytest.raises(Refused, match="not bound"):
        seal(document)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(Refused, match="SB0303"):
        Contract.load(tmp_path / "contract.json")


def test_both_kinds_of_config_are_the_same_model(contract):
    recipe = recipes.load("smollm2-135m")
    contract.check_model(recipe.hf_config())
    transformers = pytest.importorskip("transformers")
    contract.check_model(transformers.LlamaConfig(**recipe.hf_config()))


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": 512}, {"rope_theta": 10000.0}, {"rms_norm_eps": 1e-6}, {"rope_theta": None},
     {"attention_bias": True}, {"hidden_act": "gelu"}, {"architectures": ["Qwen3ForCausalLM"]}],
)  # fmt: skip
def test_another_model_is_refused(contract, change):
    config = recipes.load("smollm2-135m").hf_config() | change
    with pytest.raises(Refused, match="SB0311"):
        contract.check_model(config)


def test_the_contract_of_another_case_is_refused(contract, operators):
    other = recipes.load("qwen3-tiny")
    with pytest.raises(Refused, match="SB0311"):
        contract.check_model(other.hf_config())
    with pytest.raises(Refused, match="SB0311"):
        build(other, operators).check_model(recipes.load("smollm2-135m").hf_config())


def test_two_engines_with_different_contracts_are_refused(contract, operators):
    contract.check_peer(contract.digest)
    with pytest.raises(Refused, match="SB0312"):
        contract.check_peer(build(recipes.load("qwen3-tiny"), operators).digest)


def test_an_unclaimed_tensor_parallel_size_is_refused(contract):
    contract.check_tp("rollout", 1)
    with pytest.raises(Refused, match="SB0316"):
        contract.check_tp("trainer", 2)


def test_every_bound_region_must_be_served(contract):
    counts = dict.fromkeys(contract.regions, 3)
    contract.check_served(counts, ["engine_decode"])
    counts["rope"] = 0
    del counts["logprob"]
    with pytest.raises(NotObserved, match=r"rope, logprob"):
        contract.check_served(counts, ["engine_decode", "trainer_score"])
