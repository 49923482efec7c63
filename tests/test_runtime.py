"""The switches of a process, and how they reach the processes of an engine."""

from dataclasses import replace

import pytest

from samebits import recipe as recipes
from samebits import runtime
from samebits.engines.rollout import RolloutSettings
from samebits.engines.trainer_process import _environment
from samebits.errors import Refused
from samebits.ops.registry import REGIONS, TOGETHER


def test_a_process_computes_on_a_cpu_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("SAMEBITS_PLATFORM", raising=False)
    assert runtime.platform() == "cpu"
    monkeypatch.setenv("SAMEBITS_PLATFORM", "sm90")
    assert runtime.platform() == "sm90"


def test_an_unknown_platform_is_refused(monkeypatch):
    monkeypatch.setenv("SAMEBITS_PLATFORM", "sm80")
    with pytest.raises(Refused) as refused:
        runtime.platform()
    assert refused.value.error_id == "SB0326"


@pytest.mark.parametrize("platform", runtime.PLATFORMS)
def test_the_recipes_platform_reaches_both_engines_whatever_the_caller_has(
    monkeypatch, tmp_path, platform
):
    monkeypatch.setenv("SAMEBITS_PLATFORM", "cpu" if platform == "sm90" else "sm90")
    recipe = recipes.load("smollm2-135m")
    recipe = replace(recipe, data={**recipe.data, "platform": platform})
    rollout = RolloutSettings.of(recipe, tmp_path).environment()
    assert rollout["SAMEBITS_PLATFORM"] == platform
    trainer = _environment((), None, "aligned", None, None, recipe.platform)
    assert trainer["SAMEBITS_PLATFORM"] == platform


def test_some_regions_can_be_aligned_and_such_a_process_is_a_control(monkeypatch):
    monkeypatch.setenv("SAMEBITS_ARITHMETIC", runtime.only(["rope", "attention"]))
    assert runtime.arithmetic() == "only:attention,rope"
    assert runtime.aligned("rope") and not runtime.aligned("norm.rms")
    assert runtime.regions() == {"rope", "attention"}
    assert not runtime.aligned()
    # Whatever it names: with all of them, too.
    monkeypatch.setenv("SAMEBITS_ARITHMETIC", runtime.only(REGIONS))
    assert runtime.regions() == set(REGIONS) and not runtime.aligned()


def test_aligned_and_stock_say_the_same_of_every_region(monkeypatch):
    for value, answer in (("aligned", True), ("stock", False)):
        monkeypatch.setenv("SAMEBITS_ARITHMETIC", value)
        assert runtime.aligned() is answer
        assert {runtime.aligned(region) for region in REGIONS} == {answer}


@pytest.mark.parametrize(
    "value", ["", "only:", "only:softmax", "only:rope,", "rope", "only:gdn.core", "Aligned"]
)
def test_an_arithmetic_that_is_none_is_refused(monkeypatch, value):
    monkeypatch.setenv("SAMEBITS_ARITHMETIC", value)
    for ask in (runtime.arithmetic, runtime.aligned, runtime.regions):
        with pytest.raises(Refused, match="SB0301"):
            ask()


def test_the_regions_of_a_recurrent_layer_are_aligned_together(monkeypatch):
    monkeypatch.setenv("SAMEBITS_ARITHMETIC", runtime.only(TOGETHER))
    assert runtime.regions() == set(TOGETHER)
    monkeypatch.setenv("SAMEBITS_ARITHMETIC", runtime.only([*TOGETHER[1:], "rope"]))
    with pytest.raises(Refused) as refused:
        runtime.regions()
    assert "all of gdn.conv" in refused.value.required
