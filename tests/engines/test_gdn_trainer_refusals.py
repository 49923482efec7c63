"""What the hybrid modules of the trainer refuse, asked without Megatron.

Stand-ins take the place of Megatron's modules, so that only this package's own lines run; the real
ones run in test_gdn_trainer.py.
"""

from __future__ import annotations

import importlib
import sys
import types
from types import SimpleNamespace as Namespace

import pytest
import torch

from samebits.errors import Refused

PACKAGE = "samebits.hooks.megatron"
LAYER = {"conv_bias": False, "use_qk_l2norm": True, "cp_size": 1, "sp_size": 1}
CONFIG = {
    "experimental_attention_variant": "gated_delta_net",
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": True,
    "attention_output_gate": True,
    "qk_layernorm": True,
}


class _StandIn(types.ModuleType):
    """A package: a capital name in it is a class of its own, any other a package again."""

    __path__: list[str] = []  # noqa: RUF012  (what makes a module a package)

    def __getattr__(self, name: str):
        if not name[0].isupper():  # `from X import name` then imports X.name
            raise AttributeError(name)
        made = type(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "megatron":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module) -> None:
        pass


@pytest.fixture(scope="module")
def hooks():
    """Layer and block specification on stand-ins; nothing imported here stays."""

    def ours():
        return {n for n in sys.modules if n.split(".")[0] == "megatron" or n.startswith(PACKAGE)}

    assert "megatron" not in sys.modules
    before, finder = ours(), _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield Namespace(
            layer=importlib.import_module(f"{PACKAGE}.gdn.layer"),
            spec=importlib.import_module(f"{PACKAGE}.gdn.spec"),
        )
    finally:
        sys.meta_path.remove(finder)
        for name in ours() - before:
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            vars(sys.modules.get(parent, types)).pop(child, None)


@pytest.fixture
def make(hooks, monkeypatch):
    """Build a layer as Megatron would have set it up."""

    def build(**changes):
        settings = LAYER | {"key_head_dim": 128, "value_head_dim": 128} | changes

        def init(self):
            torch.nn.Module.__init__(self)
            self.__dict__.update(settings)

        monkeypatch.setattr(hooks.layer.KeepsDecayInFp32, "__init__", init)
        return hooks.layer.GatedDeltaNet()

    monkeypatch.setattr(hooks.layer, "contracted_schedule", lambda *_: "cpr")
    return build


@pytest.mark.parametrize(
    "changes", [{"conv_bias": True}, {"use_qk_l2norm": False}, {"cp_size": 2}, {"sp_size": 2}]
)
def test_an_unproved_layer_is_not_built(make, changes):
    assert make().schedule == "cpr"
    with pytest.raises(Refused) as caught:
        make(**changes)
    assert caught.value.error_id == "SB0605"


@pytest.mark.parametrize("name", ["inference_context", "inference_params"])
def test_the_trainer_does_not_decode(make, name):
    with pytest.raises(Refused, match="inference context") as caught:
        make()(torch.zeros(1, 1, 4), None, **{name: object()})
    assert caught.value.error_id == "SB0605"


@pytest.mark.parametrize(
    "changes",
    [
        {"experimental_attention_variant": "dsa"},
        {"normalization": "LayerNorm"},
        {"layernorm_zero_centered_gamma": False},
        {"attention_output_gate": False},
        {"qk_layernorm": False},
    ],
)
def test_an_unproved_block_is_not_specified(hooks, changes):
    hooks.spec.refuse_unproved(Namespace(**CONFIG))
    ((name, value),) = changes.items()
    with pytest.raises(Refused, match=f"{name}={value}") as caught:
        hooks.spec.block_spec(Namespace(**CONFIG | changes))
    assert caught.value.error_id == "SB0605"
