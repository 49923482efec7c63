"""A contract binds to its case: one that the recipe does not ask for is refused before any work."""

import copy
import json
import shutil
from pathlib import Path

import pytest

from samebits import cli
from samebits import recipe as recipes
from samebits.contract import Contract
from samebits.contract.build import build, seal, write
from samebits.contract.fits import GDN, misfits
from samebits.errors import Refused
from samebits.gates import prove, sizes
from samebits.patching.workspace import Workspace
from samebits.weights import sources

CASES = recipes.cases_folder()


@pytest.fixture
def checkout(tmp_path, monkeypatch, operators):
    """Two cases with contracts of small operators, in a checkout of their own."""
    from samebits.ops import registry

    monkeypatch.setattr(registry, "implementations", lambda platform="cpu": operators)
    real = recipes.cases_folder()
    for case in ("qwen3-tiny", "smollm2-135m"):
        folder = tmp_path / "cases" / case
        folder.mkdir(parents=True)
        shutil.copy(real / case / "recipe.yaml", folder)
        write(build(recipes.load(folder), operators), folder / "contract.json")
    monkeypatch.setattr(Workspace, "find", classmethod(lambda cls: Workspace(tmp_path)))

    def never(recipe, *rest):
        raise AssertionError("weights were prepared for a run that had to be refused")

    monkeypatch.setattr(sources, "prepare", never)
    return tmp_path / "cases"


def refuse_everywhere(case: str, capsys, error: str = "SB0323") -> str:
    for verb in (["prove"], ["rl"], ["prove", "--locate", "0"]):
        assert cli.run([verb[0], case, *verb[1:]]) == 2
        assert error in capsys.readouterr().err
    text = ""
    for verb in ("show", "diff", "admit"):
        assert cli.run(["contract", verb, case]) == 2
        text = capsys.readouterr().err
        assert error in text
    return text


def test_the_contract_of_the_case_is_taken(checkout, capsys):
    assert cli.run(["contract", "diff", "smollm2-135m"]) == 0
    assert cli.run(["contract", "show", "smollm2-135m"]) == 0
    assert Contract.of(recipes.load("smollm2-135m")).case == "smollm2-135m"


def test_the_contract_of_another_case_is_refused(checkout, capsys):
    shutil.copy(checkout / "qwen3-tiny/contract.json", checkout / "smollm2-135m")
    text = refuse_everywhere("smollm2-135m", capsys)
    assert "model.case qwen3-tiny" in text and "samebits contract build smollm2-135m" in text
    assert cli.run(["contract", "show", str(checkout / "smollm2-135m")]) == 2
    assert cli.run(["contract", "show", str(checkout / "smollm2-135m/contract.json")]) == 2
    assert cli.run(["contract", "diff", "qwen3-tiny", "smollm2-135m"]) == 2
    capsys.readouterr()
    assert cli.run(["contract", "build", "smollm2-135m"]) == 0
    assert cli.run(["contract", "show", "smollm2-135m"]) == 0


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("trainer_tp: [1, 2]", "trainer_tp: [3]", "trainer_tp"),
        ("rollout_tp: [1, 2]", "rollout_tp: [1]", "rollout_tp"),
        ("kv_blocks: 256", "kv_blocks: 128", "deployment"),
        ("seed: 20240601", "seed: 5", "model.config_digest"),
        ("vocab_size: 1024", "vocab_size: 2048", "model.dims"),
        ("reduction_leaves: 2", "reduction_leaves: 4", "gemm.row.leaves"),
        ("vocabulary_leaves: 2", "vocabulary_leaves: 4", "logprob.leaves"),
        ("attention_partition: 256", "attention_partition: 128", "attention.partition"),
    ],
)
def test_a_recipe_that_changed_is_refused_until_its_contract_is_built(checkout, old, new, field):
    path = checkout / "qwen3-tiny/recipe.yaml"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    recipe = recipes.load("qwen3-tiny")
    with pytest.raises(Refused, match="SB0323") as error:
        prove.open_run("qwen3-tiny", sizes.Size())
    assert field in error.value.seen
    assert field in [name for name, _, _ in misfits(Contract.load(recipe.folder).data, recipe)]


def test_a_misfit_is_told_in_the_keys_that_differ(checkout):
    path = checkout / "qwen3-tiny/recipe.yaml"
    text = path.read_text()
    for old, new, seen in (
        ("kv_blocks: 256", "kv_blocks: 128", "deployment.kv_blocks 256"),
        ("vocab_size: 1024", "vocab_size: 2048", "model.dims.vocab_size 1024"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(Refused, match="SB0323") as error:
            Contract.of(recipes.load("qwen3-tiny"))
        assert error.value.seen.endswith(f"contract.json: {seen}")


def test_new_layouts_are_refused_by_every_command(checkout, capsys):
    path = checkout / "qwen3-tiny/recipe.yaml"
    path.write_text(path.read_text().replace("trainer_tp: [1, 2]", "trainer_tp: [3]"))
    refuse_everywhere("qwen3-tiny", capsys)


def test_a_claim_that_names_no_evidence_of_the_case_is_refused(checkout, capsys):
    file = checkout / "qwen3-tiny/contract.json"
    data = copy.deepcopy(dict(Contract.load(file).data))
    data["claims"]["topology"]["trainer_tp"]["evidence"] = "0" * 64
    file.write_bytes(seal(data).raw)
    for extra in ([], ["--digests"], ["--json"]):
        assert cli.run(["contract", "show", "qwen3-tiny", *extra]) == 2
        assert "SB0325" in capsys.readouterr().err
    assert cli.run(["contract", "diff", "qwen3-tiny"]) == 1
    capsys.readouterr()
    assert cli.run(["contract", "diff", "--json"]) == 1  # of all cases
    assert {row["case"] for row in json.loads(capsys.readouterr().out)} == {"qwen3-tiny"}


# Constants of Gated DeltaNet regions.


@pytest.fixture
def recurrent(checkout):
    """A hybrid case with a contract beside the others."""
    folder = checkout / "qwen3.5-tiny"
    folder.mkdir()
    shutil.copy(CASES / "qwen3.5-tiny/recipe.yaml", folder)
    shutil.copy(CASES / "qwen3.5-tiny/contract.json", folder)
    return folder


@pytest.mark.parametrize(
    ("region", "name", "value"),
    [
        ("gdn.core", "chunk", 32),
        ("gdn.core", "block", 8),
        ("gdn.core", "schedule", "cpr"),
        ("gdn.core", "output", "bf16"),
        ("gdn.core", "boundary_chained", "bf16"),
        ("gdn.core", "boundary_consumed", None),
        ("gdn.core", "state", "bf16"),
        ("gdn.gate", "A_log", "bf16"),
        ("gdn.conv", "window", "fp32"),
        ("gdn.l2_norm", "lanes", 8),
    ],
)
def test_a_resealed_contract_of_another_recurrence_is_refused(recurrent, region, name, value):
    recipe = recipes.load("qwen3.5-tiny")
    data = copy.deepcopy(dict(Contract.of(recipe).data))
    (entry,) = (e for e in data["composition"] if e["regions"] == [region])
    entry["constants"].pop(name, None)
    if value is not None:
        entry["constants"][name] = value
    sealed = seal(data)
    assert [field for field, _, _ in misfits(sealed.data, recipe)] == [f"{region}.{name}"]
    write(sealed, recipe.contract_path)
    with pytest.raises(Refused, match=f"SB0323.*(?s:.*){region}.{name}"):
        Contract.of(recipe)


def test_operators_register_what_the_schedules_fix():
    from samebits.ops import registry

    installed = registry.implementations("cpu")
    for region, constants in GDN.items():
        registered = dict(installed[region].constants)
        assert registered.pop("schedule", "contract") == "contract"
        assert registered == constants


# Folder, name and working directory.


def test_a_recipe_in_the_folder_of_another_case_is_refused(checkout, capsys):
    shutil.copy(checkout / "qwen3-tiny/recipe.yaml", checkout / "smollm2-135m/recipe.yaml")
    for target in (
        "smollm2-135m",
        checkout / "smollm2-135m",
        checkout / "smollm2-135m/recipe.yaml",
    ):
        with pytest.raises(Refused, match="SB0324"):
            recipes.load(target)
    assert cli.run(["verify", "smollm2-135m"]) == 2
    assert cli.run(["case", "show", "smollm2-135m"]) == 2


def test_a_link_to_another_case_is_refused(checkout):
    (checkout / "third").symlink_to(checkout / "qwen3-tiny")
    with pytest.raises(Refused, match="SB0324"):
        recipes.load("third")


def test_the_template_and_loose_recipes_keep_their_own_names(tmp_path):
    assert recipes.load(recipes.cases_folder() / "_template").case == "my-model"
    shutil.copy(recipes.find("qwen3-tiny"), tmp_path)
    assert recipes.load(tmp_path / "recipe.yaml").case == "qwen3-tiny"


def test_cases_and_patches_are_those_of_one_checkout(tmp_path, monkeypatch):
    real = Workspace.find().root
    for folder in ("cases/qwen3-tiny", "qwen3-tiny"):  # of no checkout, and one beside the caller
        (tmp_path / folder).mkdir(parents=True)
        text = recipes.find("qwen3-tiny").read_text()
        (tmp_path / folder / "recipe.yaml").write_text(text.replace("seed: 20240601", "seed: 5"))
    monkeypatch.chdir(tmp_path)
    assert recipes.cases_folder() == real / "cases"
    assert recipes.find("qwen3-tiny") == real / "cases/qwen3-tiny/recipe.yaml"
    assert recipes.find("./qwen3-tiny") == Path.cwd() / "qwen3-tiny/recipe.yaml"
