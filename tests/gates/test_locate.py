"""A differing log-probability is followed down to its region, on real engines too."""

import contextlib
import json
import random
import shutil
import types
from typing import ClassVar

import numpy as np
import pytest

from samebits import recipe as recipes
from samebits.contract import build
from samebits.errors import Refused
from samebits.evidence import comparison
from samebits.gates import capsule, locate
from samebits.gates.streams import Stream
from samebits.trace import Call
from samebits.weights import sources

TOKENS = [5, 6, 7, 8, 9]


def _arm(first_position: int, tokens, seed: int = 0, flip=None):
    """Two layers' worth of two calls; `flip` (call, row, column) changes one bit."""
    draw = np.random.default_rng(seed)
    outputs = [draw.integers(0, 65536, (5, 3)).astype(np.uint16) for _ in range(2)]
    values = draw.integers(0, 1 << 29, 5).astype(np.uint32)
    if flip is not None:
        call, row, column = flip
        outputs[call][row, column] ^= 1
        values[row:] ^= 1  # everything that sees the row changes
    stream = Stream()
    stream.add(0, first_position, tokens[first_position:], values[first_position - 1 : 4])
    calls = [
        Call(0, region, output, {"input": np.arange(5, dtype=np.uint64)})
        for region, output in zip(("norm.rms", "attention"), outputs, strict=True)
    ]
    return locate.Arm(stream, calls)


def test_equal_arms_have_nothing_to_locate():
    arms = {"padded": _arm(1, TOKENS), "prefill": _arm(1, TOKENS)}
    assert locate.pair(arms, "padded", "prefill") == locate.Located(None, None)


def test_the_first_region_in_forward_order_is_named():
    arms = {"decode": _arm(3, TOKENS), "prefill": _arm(1, TOKENS, flip=(1, 2, 0))}
    found = locate.pair(arms, "decode", "prefill")
    assert found.first is not None and found.region is not None
    assert found.first.position == 3
    assert (found.region.region, found.region.element) == ("attention", (2, 0))


def test_rows_after_another_sampled_token_are_not_compared():
    changed = [*TOKENS[:3], 1, 2]
    arms = {"decode": _arm(3, changed, flip=(0, 3, 0)), "prefill": _arm(1, TOKENS)}
    assert locate.pair(arms, "decode", "prefill") == locate.Located(None, None)


def test_calls_that_do_not_correspond_are_said_to_be_untraced():
    one = _arm(1, TOKENS)
    arms = {"padded": one, "prefill": locate.Arm(one.stream, one.calls[1:])}
    assert "not traced: call 0" in str(locate.pair(arms, "padded", "prefill").note)


class _FakeRun:
    options: ClassVar[dict[str, int]] = {}
    flag = ""

    class recipe:
        case = "toy"
        gdn_schedule = None
        engine: ClassVar[dict[str, int]] = {"max_model_len": 16}

    model = None

    def __init__(self, folder):
        self.folder = folder


@pytest.fixture
def run(tmp_path):
    capsule.write([capsule.Request((5, 6, 7), 1, 2, "x")], tmp_path / "capsule.json")
    (tmp_path / "rollout_stress.json").write_text(json.dumps({"sequences": [TOKENS]}))
    return _FakeRun(tmp_path)


def _record(leg: str, name: str, sequence: int = 0, position: int = 3):
    return comparison(
        leg,
        name,
        "s",
        tokens=4,
        mismatches=1,
        streams=("a" * 64, "b" * 64),
        command="samebits prove toy",
        max_abs=0.5,
        first={
            "sequence": sequence,
            "position": position,
            "token": 8,
            "left": "bf800000",
            "right": "bf800001",
        },
    )


def test_every_mismatching_comparison_gets_a_report(run, monkeypatch):
    traced = []

    def arms(run, request, tokens, *, sequence):
        traced.append(sequence)
        assert (list(request.prompt), tokens) == ([5, 6, 7], TOKENS)
        good, bad = _arm(1, TOKENS), _arm(1, TOKENS, flip=(0, 1, 2))
        return {"decode": _arm(3, TOKENS), "prefill": good, "padded": bad, "packed": good}

    monkeypatch.setattr(locate, "arms", arms)
    equal = _record("B", "decode/prefill") | {"first_difference": None, "mismatches": 0}
    records = [
        equal,
        _record("C", "trainer-padded/prefill"),
        _record("C", "trainer-packed/prefill"),
        _record("A", "prefill-alone/prefill-batch"),
        _record("D", "trainer-tp2/rollout-tp1"),
        _record("E", "rollout/trainer-after-refits", sequence=2004),
    ]
    padded, packed, a, d, e = locate.reports(run, records)
    assert traced == [0]  # once for all
    assert (padded.layer, padded.region, padded.element) == (0, "norm.rms", (1, 2))
    assert "repeat: samebits prove toy --locate 0" in str(padded)
    assert "alone, both sides agree" in str(packed)
    assert "batch" in str(a.note) and "ranks" in str(d.note)
    assert e.step == 2 and e.command == "samebits rl toy --steps 2"


def test_an_engine_that_fails_does_not_hide_the_difference(run, monkeypatch):
    def arms(*_, **__):
        raise Refused("SB0512", seen="gone", required="a running engine", hint="samebits doctor")

    monkeypatch.setattr(locate, "arms", arms)
    (report,) = locate.reports(run, [_record("B", "decode/prefill")])
    assert "SB0512" in str(report.note) and report.left.bits == "bf800000"


@pytest.fixture
def hybrid(run, monkeypatch):
    monkeypatch.setattr(run.recipe, "gdn_schedule", "cpr")
    return run


def test_a_hybrid_difference_is_located_to_the_token_at_once(hybrid, monkeypatch):
    monkeypatch.setattr(locate, "arms", lambda *_, **__: pytest.fail("engines were started"))
    records = [_record("B", "decode/prefill"), _record("A", "prefill-alone/prefill-batch")]
    decode, batch = locate.reports(hybrid, records)
    assert decode.note == locate.FUSED and decode.region is None and decode.position == 3
    assert "batch" in str(batch.note)  # its own reason comes first


def test_a_hybrid_sequence_alone_is_compared_untraced(hybrid, monkeypatch):
    started = []

    @contextlib.contextmanager
    def engine(*args, **options):
        started.append(options["trace"])
        yield types.SimpleNamespace(score=lambda *_, **__: None, generate=lambda *_: [])

    good, bad = (_arm(1, TOKENS, flip=flip).stream for flip in (None, (1, 2, 0)))
    monkeypatch.setattr(locate.RolloutSettings, "of", lambda *_, **options: options)
    monkeypatch.setattr(locate, "RolloutEngine", lambda settings: engine(**settings))
    monkeypatch.setattr(locate.stages, "trainer", engine)
    for name, stream in {"scored": good, "decoded": good, "trained": bad}.items():
        monkeypatch.setattr(locate.workload, name, lambda *_, stream=stream, **__: stream)
    found = locate.sequence_alone(hybrid, 0)
    assert started == [None, None]
    assert [report.comparison for report in found] == [
        "padded/prefill",
        "packed/prefill",
        "decode/padded",
    ]
    assert {(r.note, r.position, r.region) for r in found} == {(locate.FUSED, 3, None)}


def test_reports_are_written_and_an_old_file_goes(tmp_path, run):
    path = tmp_path / "difference.json"
    locate.write(locate.reports(run, [_record("A", "prefill-alone/prefill-batch")]), path)
    assert json.loads(path.read_text())[0]["position"] == 3
    locate.write([], path)
    assert not path.exists()


@pytest.mark.parametrize("sequence", [1, 7])
def test_a_sequence_that_no_run_has_is_refused(run, sequence):
    with pytest.raises(Refused, match="SB0911"):
        locate.sequence_alone(run, sequence)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The small case with a contract of the present sources."""
    folder = tmp_path_factory.mktemp("qwen3-tiny")
    shutil.copy(recipes.find("qwen3-tiny"), folder)
    recipe = recipes.load(folder)
    build.write(build.build(recipe), recipe.contract_path)
    return recipe, sources.prepare(recipe)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("rollout", "trainer", "region"),
    [("k_cut_by_rows", None, "gemm.column"), (None, "rope_base_doubled", "rope")],
)
def test_a_fault_on_one_side_is_found_in_its_region(tiny, rollout, trainer, region):
    recipe, model = tiny
    run = types.SimpleNamespace(recipe=recipe, model=model)
    draw = random.Random(3)
    request = capsule.Request(tuple(draw.randrange(3, 1024) for _ in range(80)), 5, 4, "x")
    tokens = [*request.prompt, *(draw.randrange(3, 1024) for _ in range(4))]
    arms = locate.arms(run, request, tokens, rollout_fault=rollout, trainer_fault=trainer)
    for layout in ("padded", "packed"):
        found = locate.pair(arms, layout, "prefill")
        assert found.first is not None and found.region is not None
        assert (found.region.layer, found.region.region) == (0, region)
        assert found.region.left != found.region.right
        # The calls before it lined up and agreed, and so did what the region was given.
        assert " left, " not in found.region.operands["input"]
        assert (" left, " in found.region.operands.get("angles", "")) == (region == "rope")
    if rollout is None:  # the other engine agrees with itself
        assert locate.pair(arms, "decode", "prefill") == locate.Located(None, None)
