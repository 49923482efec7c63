"""What stops a run before anything is downloaded or started."""

import copy

import pytest

from samebits import recipe as recipes
from samebits.contract import Contract
from samebits.contract.build import seal
from samebits.errors import Refused
from samebits.gates import prove, sizes
from samebits.ops import gpu
from samebits.patching import trees
from samebits.weights import sources

CASE = "qwen3-tiny"


class Reached(Exception):
    """The run would go on with the model."""


@pytest.fixture
def prepared(monkeypatch):
    """Names of the trees that were looked at; preparing the model is the end of this test."""
    looked: list[str] = []
    monkeypatch.setattr(trees, "tree_path", lambda upstream, model: looked.append(upstream))

    def prepare(recipe):
        looked.append("model")
        raise Reached

    monkeypatch.setattr(sources, "prepare", prepare)
    return looked


def test_trees_of_the_series_come_before_the_model(prepared):
    with pytest.raises(Reached):
        prove.open_run(CASE, sizes.Size())
    assert prepared == [*recipes.load(CASE).series, "model"]
    assert {"vllm", "megatron"} <= set(prepared)


def test_an_edited_tree_is_refused_before_anything_starts(prepared, monkeypatch):
    def edited(upstream, model):
        if upstream == "megatron":
            raise Refused("SB0114", seen="edited", required="as built", hint="samebits explain")

    monkeypatch.setattr(trees, "tree_path", edited)
    with pytest.raises(Refused, match="SB0114"):
        prove.open_run(CASE, sizes.Size())
    assert prepared == []


def test_a_changed_operator_is_refused_before_anything_starts(prepared, monkeypatch):
    bound = Contract.of(recipes.load(CASE))
    data = copy.deepcopy(dict(bound.data))
    for entry in data["composition"]:
        if "rope" in entry["regions"]:
            entry["content_hash"] = "0" * 64
    changed = seal(data, bound.path)
    monkeypatch.setattr(Contract, "of", classmethod(lambda cls, recipe: changed))
    with pytest.raises(Refused, match="SB0309") as caught:
        prove.open_run(CASE, sizes.Size())
    assert caught.value.seen.startswith("rope: source of rope.cpu.")
    assert caught.value.hint == f"samebits contract diff {CASE}"
    assert prepared == []


def test_a_platform_that_this_machine_is_not_is_refused_before_anything(prepared, monkeypatch):
    gpu_only = "smollm2-135m-h200"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        Contract, "of", classmethod(lambda cls, recipe: prepared.append("contract"))
    )
    gpu.prepare.cache_clear()
    with pytest.raises(Refused, match="SB0451") as caught:
        prove.open_run(gpu_only, sizes.Size())
    assert (caught.value.seen, caught.value.hint) == ("no usable GPU", "samebits doctor")
    assert prepared == []
