"""The project's own pins, lists and headers; and its trees where they have been built."""

import pytest

from samebits.patching import check, pins, trees
from samebits.patching.header import lint
from samebits.patching.series import Series
from samebits.patching.workspace import Workspace

WORKSPACE = Workspace.find()
PINS = pins.patched(WORKSPACE)
CASES = [(pin, model) for pin in PINS for model in Series(WORKSPACE, pin.name).models]


def test_upstreams():
    assert [pin.name for pin in PINS] == ["vllm", "megatron", "verl"]
    assert pins.get(WORKSPACE, "fla-core").trees is None
    assert {model for _, model in CASES} >= {"smollm2-135m", "qwen3-tiny"}


def test_no_index_address_in_the_pins():
    text = (WORKSPACE.patches / "pins.yaml").read_text()
    assert "pypi" not in text
    assert "index" not in text


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
def test_lists_and_headers(pin):
    series = Series(WORKSPACE, pin.name)
    assert series.problems() == []
    assert {name: lint(patch, pin.tag) for name, patch in series.files.items()} == {
        name: [] for name in series.order
    }


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
def test_every_patch_is_the_projects_own(pin):
    maintainers = "samebits maintainers <maintainers@users.noreply.github.com>"
    for patch in Series(WORKSPACE, pin.name).files.values():
        assert f"\nFrom: {maintainers}\n" in patch.content
        assert f"\nSigned-off-by: {maintainers}\n" in patch.content


@pytest.mark.parametrize(("pin", "model"), CASES, ids=lambda value: getattr(value, "name", value))
def test_built_tree_is_the_recorded_one(pin, model):
    recorded = (pin.trees or {}).get(model)
    assert recorded, f"samebits patch export {pin.name} --record"
    if not trees.tree_folder(WORKSPACE, pin.name, recorded).is_dir():
        pytest.skip(f"not built: samebits patch apply {pin.name} --model {model}")
    assert trees.tree_path(pin.name, model, WORKSPACE).name == recorded


@pytest.mark.slow
@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.name)
def test_series_checks_in_full(pin):
    """Applies the whole series on the pinned sdist, which is fetched when it is not there."""
    assert check.check(WORKSPACE, pin) == []
