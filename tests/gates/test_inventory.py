"""What a region inventory must not find, and the files that say so."""

import json

import pytest

from samebits.casework import inventory
from samebits.cli.trace import _sentence
from samebits.gates.inventory import ARMS, Inventory, _calls
from samebits.gates.locate.arms import Arm
from samebits.gates.locate.pairs import Located
from samebits.gates.streams import FirstDifference, Stream
from samebits.trace import RegionDifference, Scored

CALLS = {"embedding": 1, "gemm.row": 4}
BOUND = {"embedding": "embedding.cpu.1", "gemm.row": "gemm.row.cpu.1", "logprob": "logprob.cpu.1"}
ADD = ("forward", "pointwise", "aten.add.Tensor")


def made(
    bound=BOUND, calls=CALLS, watched=9, outside=ADD, pair=Located("decode", "prefill", None, None)
):
    return Inventory(
        "identity",
        bound,
        {arm: calls for arm in ARMS},
        {arm: watched for arm in ARMS},
        {arm: {outside: 2} for arm in ARMS},
        [pair],
    )


def problems(found):
    return {name: getattr(found, name) for name in inventory.PROBLEMS if getattr(found, name)}


def test_a_covered_model_has_no_problem():
    assert problems(made()) == {}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"bound": {**BOUND, "norm.rms": "norm.rms.cpu.1"}}, {"uncalled": ["norm.rms"]}),
        ({"calls": {**CALLS, "rope": 2}}, {"unbound": ["rope"]}),
        (
            {"outside": ("forward", "reduces", "aten.mm.default")},
            {"uncovered": ["aten.mm.default"]},
        ),
        ({"watched": 0}, {"unwatched": sorted(ARMS)}),
        ({"outside": ("sampling", "reduces", "aten.softmax.int")}, {}),
        (
            {"outside": ("sampling", "reduces", "aten.log_softmax.int")},
            {"uncovered": ["aten.log_softmax.int"]},
        ),
        (
            {"pair": Located("decode", "prefill", None, None, "not traced: x")},
            {"differing": ["decode/prefill"]},
        ),
    ],
)
def test_each_problem_is_named(changes, wanted):
    assert problems(made(**changes)) == wanted


def test_a_region_that_one_arm_leaves_out_is_uncalled():
    found = made()
    calls = {**found.calls, "packed": {"embedding": 1}}
    assert Inventory("i", BOUND, calls, found.watched, found.outside, []).uncalled == ["gemm.row"]


def test_the_last_line_counts_sampling_apart_and_names_the_first_region():
    line = _sentence("toy", made(outside=("sampling", "reduces", "aten.softmax.int")))
    assert "0 pointwise operators and 0 that reduce, and 0 and 1 while sampling; 0 of 1" in line
    assert line.endswith("pairs differ")
    region = RegionDifference(1, "act.silu_mul", (2, 3), "0000", "0001", 1, 9, {})
    line = _sentence("toy", made(pair=Located("padded", "prefill", None, region)))
    assert line.endswith("1 of 1 pairs differ, first in act.silu_mul of layer 1 (padded/prefill)")
    first = FirstDifference(0, 3, 8, "bf800000", "bf800001")
    line = _sentence("toy", made(pair=Located("decode", "prefill", first, None)))
    assert line.endswith("first in logprob (decode/prefill)")


def test_calls_that_make_log_probabilities_are_a_region():
    arm = Arm(Stream(), [], scored=[Scored("sampling", "log_softmax", 1, 5)])
    assert _calls(arm) == {"logprob": 5} and _calls(Arm(Stream(), [])) == {}


def test_the_file_holds_what_was_found():
    stored = json.loads(json.dumps(made().as_dict()))
    assert stored["contract"] == "identity" and stored["calls"]["decode"] == CALLS
    assert stored["outside"]["decode"] == [[*ADD, 2]]
    assert all(stored[name] == [] for name in inventory.PROBLEMS)
