"""Small fixed operators, so that contract rules are tested apart from any kernel."""

from __future__ import annotations

import pytest

from samebits import recipe as recipes
from samebits.contract.build import build
from samebits.ops import registry
from samebits.ops.registry import Implementation


def fake(region: str, answer: int = 7, **changes) -> Implementation:
    """An operator whose probe answers `answer` and whose source is `samebits.plan`."""
    fields = {
        "region": region,
        "id": f"{region}.cpu.1",
        "platform": "cpu",
        "constants": {"lanes": 16},
        "modules": ("samebits.plan",),
        "probe": lambda: answer,
    }
    return Implementation(**(fields | changes))


@pytest.fixture
def fake_operator():
    return fake


@pytest.fixture
def operators() -> dict[str, Implementation]:
    return {region: fake(region, answer=i) for i, region in enumerate(registry.REGIONS)}


@pytest.fixture(params=["smollm2-135m", "qwen3-tiny"])
def recipe(request) -> recipes.Recipe:
    return recipes.load(request.param)


@pytest.fixture
def contract(operators):
    return build(recipes.load("smollm2-135m"), operators)
