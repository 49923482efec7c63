"""Evidence binds to its case, its sources, what it read and what it claims: forgeries with a true
integrity digest, and files that were put into another folder."""

import copy
import shutil

import pytest

from samebits import cases, cli, evidence
from samebits import recipe as recipes
from samebits.contract import canonical
from samebits.errors import Refused
from samebits.evidence import current
from samebits.evidence.statement import VERIFIER, Statement, integrity


def refused(path) -> str:
    with pytest.raises(Refused) as error:
        evidence.verify(path)
    assert error.value.exit_code == 2
    return error.value.error_id


def names(data, found):
    """The subject without those entries, and the sources without those names."""
    data["subject"] = [s for s in data["subject"] if s["name"] not in found]
    sources = data["predicate"]["sources"]
    data["predicate"]["sources"] = [s for s in sources if s["name"] not in found]


# Another case.


@pytest.fixture
def other(tmp_path, good):
    """A second case, in whose folder the first one's evidence was put."""
    folder = tmp_path / "cases" / "other-tiny"
    (folder / "evidence").mkdir(parents=True)
    text = recipes.find("qwen3-tiny").read_text()
    (folder / "recipe.yaml").write_text(text.replace("case: qwen3-tiny", "case: other-tiny"))
    (folder / "evidence" / "evidence.json").write_bytes(good.raw)
    return folder


def test_evidence_of_another_case_is_refused(other, capsys):
    for target in (other, other / "evidence" / "evidence.json"):
        assert refused(target) == "SB0810"
    assert cli.run(["verify", str(other)]) == 2
    assert "EQUAL" not in capsys.readouterr().out
    assert cases.status(str(other)).verdict == "SB0810"


def test_a_file_outside_of_cases_is_judged_by_the_case_that_it_names(good, tmp_path):
    path = tmp_path / "kept.json"
    path.write_bytes(good.raw)
    assert evidence.verify(path).statement.case == "qwen3-tiny"


def test_a_case_name_that_is_a_path_is_refused(forge, tmp_path):
    def edit(data):
        predicate = data["predicate"]
        for entry in data["subject"]:
            entry["name"] = entry["name"].replace("/qwen3-tiny", f"/{tmp_path}/cases/qwen3-tiny")
        predicate["parameters"]["case"] = f"x/..{tmp_path}/cases/qwen3-tiny"
        predicate["claim"]["id"] = f"{predicate['parameters']['case']}/rollout-equals-trainer"

    moved = tmp_path / "moved.json"
    shutil.move(forge(edit), moved)
    with pytest.raises(Refused):
        evidence.verify(moved)


# What a run read.


def test_weights_are_recorded(good, recipe):
    (record,) = good.predicate["resolvedDependencies"]
    digest = canonical.digest(recipe.data["model"])
    assert record == {"uri": "weights:counter-hash", "digest": {"sha256": digest}}
    real = recipes.load("smollm2-135m")
    named = current.dependencies(real)
    assert {real.source["sha256"], real.source["wheel_sha256"]} < set(named.values())
    assert named["prompts.jsonl"] == canonical.sha256((real.folder / "prompts.jsonl").read_bytes())


def test_changed_added_and_removed_prompts_are_stale(run, recipe):
    file = recipe.folder / "prompts.jsonl"
    file.write_text("one\n")
    evidence.write(run(), recipe.evidence_path)
    assert evidence.verify(recipe.folder).status == "EQUAL"
    file.write_text("two\n")
    result = evidence.verify(recipe.folder)
    assert (result.exit_code, result.stale) == (3, ("prompts.jsonl changed",))
    file.unlink()
    assert evidence.verify(recipe.folder).stale == ("prompts.jsonl changed",)
    evidence.write(run(), recipe.evidence_path)
    file.write_text("one\n")
    assert evidence.verify(recipe.folder).stale == ("prompts.jsonl is not recorded",)


def test_evidence_without_its_weights_is_stale(run, recipe):
    evidence.write(run(dependencies={}), recipe.evidence_path)
    assert evidence.verify(recipe.folder).stale == ("weights:counter-hash is not recorded",)


# What it stands on.


@pytest.mark.parametrize(
    "gone",
    ["hooks/vllm", "hooks/verl", "implementation/rope.cpu.1", "implementation/gemm.row.cpu.1"],
)
def test_a_source_that_is_left_out_is_refused(forge, gone):
    assert refused(forge(lambda data: names(data, {gone}))) == "SB0809"


def test_sources_cut_to_one_are_refused(forge):
    def edit(data):
        names(data, {s["name"] for s in data["predicate"]["sources"][1:]})

    assert refused(forge(edit)) == "SB0809"


def test_another_source_than_the_bound_one_is_refused(forge):
    def edit(data):
        source = next(s for s in data["predicate"]["sources"] if "rope" in s["name"])
        source["modules"] = ["samebits.bits"]
        source["content_hash"] = current.source_hash(["samebits.bits"])
        for entry in data["subject"]:
            if entry["name"] == source["name"]:
                entry["digest"]["sha256"] = source["content_hash"]

    assert refused(forge(edit)) == "SB0809"


@pytest.mark.parametrize("part", ["contract/", "recipe/", "implementation/rope", "hooks/vllm"])
def test_a_subject_that_is_left_out_is_refused(forge, part):
    def edit(data):
        data["subject"] = [s for s in data["subject"] if not s["name"].startswith(part)]

    assert refused(forge(edit)) == "SB0804"


def test_a_subject_cut_to_its_trees_is_refused(forge):
    def edit(data):
        data["subject"] = [s for s in data["subject"] if s["name"].startswith("tree/")]

    assert refused(forge(edit)) == "SB0804"


def test_a_subject_with_another_digest_or_given_twice_is_refused(forge):
    def change(data):
        data["subject"][-1]["digest"]["sha256"] = "0" * 64

    def double(data):
        data["subject"].append(copy.deepcopy(data["subject"][0]))

    assert [refused(forge(edit)) for edit in (change, double)] == ["SB0804"] * 2


def test_a_tree_that_is_not_named_is_never_equal(forge):
    def edit(data):
        data["subject"] = [s for s in data["subject"] if s["name"] != "tree/vllm"]

    assert evidence.verify(forge(edit)).status == "STALE"


# What it claims.


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"id": "qwen3-tiny/everything"}, "SB0804"),
        ({"id": "smollm2-135m/rollout-equals-trainer"}, "SB0804"),
        ({"sentence": "All models are equal on all chips."}, "SB0801"),
        ({"covered": ["engine_decode", "GPU"]}, "SB0809"),
        ({"covered": ["engine_decode"]}, "SB0809"),
    ],
)
def test_a_claim_is_that_of_the_case_and_its_contract(forge, changes, error):
    assert refused(forge(lambda data: data["predicate"]["claim"].update(changes))) == error


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"finished": "tomorrow"}, "SB0801"),
        ({"finished": "2025-01-01"}, "SB0801"),
        ({"finished": "2025-13-41T00:00:00Z"}, "SB0804"),
        ({"finished": "2024-01-01T00:00:00Z"}, "SB0804"),
    ],
)
def test_a_run_has_a_time(forge, changes, error):
    def edit(data):
        data["predicate"]["environment"]["happenstance"].update(changes)

    assert refused(forge(edit)) == error


def test_fewer_layouts_than_the_recipe_claims_are_refused(forge):
    def edit(data):
        predicate = data["predicate"]
        predicate["parameters"]["layouts"] = {"trainer_tp": [2], "rollout_tp": [1, 2]}
        predicate["comparisons"] = [
            c
            for c in predicate["comparisons"]
            if c["leg"] != "D" or c["name"].startswith("trainer-tp2")
        ]

    assert refused(forge(edit)) == "SB0807"
    assert refused(forge(lambda d: d["predicate"]["parameters"].pop("layouts"))) == "SB0807"


def test_an_rl_run_that_is_left_out_is_refused(recipe, good):
    text = (recipe.folder / "recipe.yaml").read_text()
    text += "rl: {steps: 2, prompts_per_step: 1, samples_per_prompt: 2, max_tokens: 4,\n"
    text += '  learning_rate: "1e-5", algorithm: grpo, seed: 1}\n'
    (recipe.folder / "recipe.yaml").write_text(text)
    changed = recipes.load(recipe.folder)
    data = copy.deepcopy(good.data)
    data["predicate"]["parameters"]["recipe"] = changed.digest
    for entry in data["subject"]:
        if entry["name"] == "recipe/qwen3-tiny":
            entry["digest"]["sha256"] = changed.digest
    data["predicate"]["integrity"] = integrity(data)
    recipe.evidence_path.parent.mkdir()
    recipe.evidence_path.write_bytes(canonical.encode(data))
    assert refused(recipe.folder) == "SB0807"


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c.update(max_abs=evidence.number(0.0)),
        lambda c: c.update(tokens=1, mismatches=1),
    ],
)
def test_a_control_that_shows_nothing_is_refused(forge, edit):
    path = forge(lambda data: edit(data["predicate"]["comparisons"][0]["control"]))
    assert refused(path) == "SB0803"


def test_a_control_of_something_else_than_the_pair_is_refused(forge):
    def edit(data):
        data["predicate"]["comparisons"][0]["control"]["max_abs"] = None

    assert refused(forge(edit)) == "SB0804"


def test_a_switch_that_names_a_fault_is_refused(forge):
    def edit(data):
        data["predicate"]["parameters"]["switches"]["SAMEBITS_FAULT"] = "k_cut_by_rows"

    assert refused(forge(edit)) == "SB0803"


def test_one_shard_of_nine_is_refused(forge):
    assert refused(forge(lambda d: d["predicate"].update(shards=["1of9"]))) == "SB0803"


def test_a_wider_oracle_factor_is_refused(run, recipe):
    record = evidence.oracle(
        "prefill/fp32-hugging-face",
        "no further from fp32 than stock",
        tokens=50,
        aligned=(3.0, 3.0),
        stock=(1.0, 2.0),
        control=("rope_base_doubled", 50, 50.0),
        command="samebits prove qwen3-tiny",
    )
    data = copy.deepcopy(run(oracles=[record]).data)
    data["predicate"]["oracle"][0]["factor"] = evidence.number(10.0)
    data["predicate"]["verdict"] = "EQUAL"
    data["predicate"]["integrity"] = integrity(data)
    with pytest.raises(Refused, match="SB0804"):
        Statement.parse(canonical.encode(data), "forged")


def test_an_older_verifier_is_stale_and_an_unknown_one_refused(forge):
    def edit(version):
        return lambda data: data["predicate"]["verifier"].update(version=version)

    assert refused(forge(edit("999"))) == "SB0801"
    assert VERIFIER["version"] != "1"
    result = evidence.verify(forge(edit("1")))
    assert (result.status, result.exit_code) == ("STALE", 3)
