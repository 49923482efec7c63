"""Contracts of a platform that this machine is not: built elsewhere, read and compared here."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from platforms import GPU

from samebits import recipe as recipes
from samebits.contract import platform
from samebits.contract.build import build, differences, seal
from samebits.errors import Refused
from samebits.ops import gpu, registry


@pytest.fixture
def sm90(fake_operator):
    """Small operators of the platform sm90."""
    return {
        region: fake_operator(region, answer=i, id=f"{region}.sm90.1", platform="sm90")
        for i, region in enumerate(registry.REGIONS)
    }


@pytest.fixture
def recipe():
    return recipes.load("smollm2-135m-h200")


@pytest.fixture
def gpu_machine(monkeypatch):
    monkeypatch.setattr("samebits.contract.build.require", lambda wanted: None)
    monkeypatch.setattr("samebits.contract.build.describe", lambda kind: dict(GPU))


@pytest.fixture
def built(recipe, sm90, gpu_machine):
    return build(recipe, sm90)


def test_it_says_its_platform_and_fits_no_recipe_of_another(built, recipe):
    assert built.platform == "sm90"
    built.check_recipe(recipe)
    cpu = replace(recipe, data={k: v for k, v in recipe.data.items() if k != "platform"})
    with pytest.raises(Refused, match="SB0323") as caught:
        built.check_recipe(cpu)
    assert "platform sm90" in caught.value.seen


def test_one_model_on_two_platforms_has_two_identities(built):
    data = {name: value for name, value in built.data.items() if name != "platform"}
    data["platforms"] = {}
    data["composition"] = [
        {**entry, "implementation": entry["implementation"].replace(".sm90.", ".cpu.")}
        for entry in data["composition"]
    ]
    assert seal(data).identity != built.identity


@pytest.mark.parametrize("part", ["composition", "platforms"])
def test_parts_of_another_platform_are_refused(built, part):
    data = dict(built.data)
    if part == "composition":
        first, *rest = data["composition"]
        data["composition"] = [{**first, "implementation": "embedding.cpu.1"}, *rest]
    else:
        cpu = platform.describe()
        key = platform.canonical.digest(cpu)
        data["platforms"] = {key: {"description": cpu, "known_answers": {}}}
    with pytest.raises(Refused, match="SB0307"):
        seal(data)


def test_without_the_chip_it_is_not_built(recipe, sm90, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    gpu.prepare.cache_clear()
    with pytest.raises(Refused, match="SB0451"):
        build(recipe, sm90)
    assert not platform.here("sm90") and platform.here("cpu")


def test_without_the_chip_it_is_compared_with_its_recorded_answers(built, recipe, sm90):
    same = build(recipe, sm90, previous=built, probe=False)
    assert differences(built.data, same.data) == [] and same.raw == built.raw
    sm90["rope"] = replace(sm90["rope"], modules=("samebits.bits",))
    changed = build(recipe, sm90, previous=built, probe=False)
    fields = [field for field, _, _ in differences(built.data, changed.data)]
    assert any("rope.content_hash" in field for field in fields)
    assert any(field.endswith("known_answers.rope") for field in fields)


def test_a_process_of_another_platform_does_not_bind_it(built, sm90, monkeypatch):
    monkeypatch.delenv("SAMEBITS_PLATFORM", raising=False)
    with pytest.raises(Refused, match="SB0327"):
        built.bind("trainer", sm90)


def test_a_process_of_its_platform_binds_it(built, sm90, monkeypatch):
    monkeypatch.setenv("SAMEBITS_PLATFORM", "sm90")
    monkeypatch.setattr(platform, "require", lambda wanted: None)
    monkeypatch.setattr(platform, "describe", lambda kind: dict(GPU))
    assert built.bind("trainer", sm90).status == "known"


def test_a_description_names_chip_and_tools(monkeypatch, tmp_path):
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
    monkeypatch.setattr(gpu, "prepare", lambda index: 132)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__file__=str(tool)))
    found = platform.describe("sm90")
    assert tuple(sorted(found)) == tuple(sorted(platform.FIELDS["sm90"])) == tuple(sorted(GPU))
    assert (found["chip"], found["ptxas"], found["cuda"]) == ("NVIDIA H200", "12.9", "13.0")


def test_the_real_operators_cover_the_gpu_case(recipe):
    installed = registry.implementations("sm90")
    assert set(registry.regions_of(recipe.architecture)) <= set(installed)
    unbuilt = build(recipe, probe=False)
    assert unbuilt.data["platforms"] == {} and unbuilt.platform == "sm90"
