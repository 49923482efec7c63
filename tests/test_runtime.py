"""The switches of a process, and how they reach the processes of an engine."""

from dataclasses import replace

import pytest

from samebits import recipe as recipes
from samebits import runtime
from samebits.engines.rollout import RolloutSettings
from samebits.engines.trainer_process import _environment
from samebits.errors import Refused


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
