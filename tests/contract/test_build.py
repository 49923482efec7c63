import copy

import pytest

from samebits import recipe as recipes
from samebits.contract import Contract, canonical
from samebits.contract.build import admit, build, differences, seal, write
from samebits.contract.platform import Binding
from samebits.contract.sources import source_hash
from samebits.errors import Refused
from samebits.ops import registry


def edited_recipe(name, **changes):
    """A recipe with some leaves replaced, keys given as path strings."""
    recipe = recipes.load(name)
    data = copy.deepcopy(recipe.data)
    for path, value in changes.items():
        *outer, last = path.split("__")
        target = data
        for part in outer:
            target = target[part]
        target[last] = value
    return recipes.Recipe(recipe.path, data)


def test_build_gives_the_same_bytes_again(recipe, operators):
    first = build(recipe, operators)
    assert build(recipe, operators, first).raw == first.raw
    assert build(recipe, operators).raw == first.raw


def test_plans_and_constants_come_from_the_recipe(recipe, operators):
    contract = build(recipe, operators)
    assert contract.plan("gemm.row").leaves == recipe.leaves
    assert contract.plan("logprob").leaves == recipe.vocabulary_leaves
    assert contract.plan("gemm.column").leaves == 1
    assert contract.constants("attention")["partition"] == recipe.attention_partition
    with pytest.raises(Refused, match="SB0315"):
        contract.plan("gdn.core")


def test_committed_contracts_load_and_match_their_recipes(recipe):
    contract = Contract.load(recipe.folder)
    assert contract.case == recipe.case
    assert contract.plan("gemm.row").leaves == recipe.leaves
    contract.check_model(recipe.hf_config())


def test_a_region_without_operator_is_refused(recipe, operators):
    del operators["attention"]
    with pytest.raises(Refused, match="no implementation of attention"):
        build(recipe, operators)


def test_a_constant_that_the_source_fixes_cannot_be_chosen(recipe, operators, fake_operator):
    operators["attention"] = fake_operator("attention", constants={"partition": 32})
    with pytest.raises(Refused, match="SB0319"):
        build(recipe, operators)
    operators["gemm.row"] = fake_operator("gemm.row", constants={"leaves": "plan"})
    operators["attention"] = fake_operator("attention", constants={"partition": 256})
    assert build(recipe, operators).plan("gemm.row").leaves == recipe.leaves


@pytest.mark.parametrize(
    ("changes", "error_id"),
    [
        ({"contract__reduction_leaves": 3}, "SB0401"),
        ({"contract__vocabulary_leaves": 3}, "SB0401"),
        ({"contract__reduction_leaves": 1024}, "SB0402"),
        ({"layouts__trainer_tp": [1, 4]}, "SB0403"),
        ({"model__config__num_key_value_heads": 1}, "SB0316"),
    ],
)
def test_what_the_plan_cannot_express_is_refused(operators, changes, error_id):
    with pytest.raises(Refused) as refused:
        build(edited_recipe("qwen3-tiny", **changes), operators)
    assert refused.value.error_id == error_id


def test_deployment_settings_do_not_change_the_identity(operators):
    plain = build(recipes.load("qwen3-tiny"), operators)
    larger = build(edited_recipe("qwen3-tiny", engine__kv_blocks=4096), operators)
    assert larger.identity == plain.identity and larger.digest != plain.digest
    assert larger.digests["deployment"] != plain.digests["deployment"]


def test_leaves_change_the_numerical_policy_only(operators):
    plain = build(recipes.load("qwen3-tiny"), operators)
    finer = build(edited_recipe("qwen3-tiny", contract__reduction_leaves=4), operators)
    changed = {name for name in plain.digests if plain.digests[name] != finer.digests[name]}
    assert changed == {"numerical_policy"}
    assert [field for field, _, _ in differences(plain.data, finer.data)] == [
        "composition.gemm.row.constants.leaves",
        "digests.numerical_policy",
    ]


def test_other_bits_from_unchanged_source_are_refused_until_renewed(
    recipe, operators, fake_operator
):
    first = build(recipe, operators)
    operators["rope"] = fake_operator("rope", answer=99)
    with pytest.raises(Refused, match="SB0310"):
        build(recipe, operators, first)
    assert build(recipe, operators, first, renew=True).digest != first.digest


def test_changed_source_drops_the_other_platforms_answer(recipe, operators, fake_operator):
    other = {"kind": "cpu", "machine": "elsewhere"}
    key = canonical.digest(other)
    data = dict(build(recipe, operators).data)
    answers = {region: "0" * 32 for region in registry.regions_of(recipe.architecture)}
    data["platforms"] = data["platforms"] | {key: {"description": other, "known_answers": answers}}
    first = seal(data)
    operators["rope"] = fake_operator("rope", modules=("samebits.plan", "samebits.bits"))
    kept = build(recipe, operators, first).data["platforms"][key]["known_answers"]
    assert set(kept) == set(answers) - {"rope"}


def test_a_hybrid_contract_binds_its_own_regions_and_the_schedule(operators):
    recipe = recipes.load("qwen3.5-tiny")
    contract = build(recipe, operators)
    assert tuple(contract.regions) == registry.HYBRID
    core = next(e for e in contract.data["composition"] if e["regions"] == ["gdn.core"])
    assert core["constants"]["schedule"] == recipe.gdn_schedule


def test_admitting_adds_answers_and_keeps_the_identity(contract):
    new = {"kind": "cpu", "machine": "elsewhere"}
    answers = {region: "0" * 32 for region in contract.regions}
    sides = [
        Binding(role, "new platform", canonical.digest(new), new, answers)
        for role in ("rollout", "trainer")
    ]
    admitted = admit(contract, *sides)
    assert admitted.identity == contract.identity
    assert admitted.digests["platform"] != contract.digests["platform"]
    assert admitted.data["platforms"][canonical.digest(new)]["known_answers"] == answers


def test_admitting_refuses_two_engines_that_disagree(contract):
    new = {"kind": "cpu", "machine": "elsewhere"}
    key = canonical.digest(new)
    one = Binding("rollout", "new platform", key, new, {"rope": "0" * 32})
    two = Binding("trainer", "new platform", key, new, {"rope": "1" * 32})
    with pytest.raises(Refused, match="SB0320"):
        admit(contract, one, two)


def test_writing_is_idempotent_and_leaves_no_other_file(contract, tmp_path):
    path = tmp_path / "contract.json"
    assert write(contract, path) and not write(contract, path)
    assert Contract.load(path).digest == contract.digest
    assert [file.name for file in tmp_path.iterdir()] == ["contract.json"]


def test_source_hash_is_the_one_that_operators_report(fake_operator):
    modules = ("samebits.plan", "samebits.ops", "samebits.ops.registry")
    operator = fake_operator("rope", modules=modules)
    assert operator.content_hash() == source_hash(modules)
    with pytest.raises(Refused, match="SB0404"):
        source_hash(["samebits.no_such_module"])
