"""A differing log-probability is followed down to its region; engines are stood in for."""

import json
import types
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from samebits.engines.rollout_wire import Completion
from samebits.errors import Different, Refused
from samebits.evidence import comparison
from samebits.gates import capsule, legs, locate, rl
from samebits.gates.locate import arms, pairs, refit, reporting
from samebits.gates.locate.arms import Arm, Arms, Subject
from samebits.gates.streams import Stream
from samebits.trace import Call, Scored, digests

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
        Call(0, region, output, {"input": np.arange(5, dtype=np.uint64)}, np.arange(5))
        for region, output in zip(("norm.rms", "attention"), outputs, strict=True)
    ]
    return Arm(stream, calls)


GOOD = _arm(1, TOKENS)


def test_equal_arms_have_nothing_to_locate():
    found = pairs.pair({"padded": GOOD, "prefill": GOOD}, "padded", "prefill")
    assert found == pairs.Located("padded", "prefill", None, None) and not found.differs


def test_the_first_region_in_forward_order_is_named():
    found = {"decode": _arm(3, TOKENS), "prefill": _arm(1, TOKENS, flip=(1, 2, 0))}
    located = pairs.pair(found, "decode", "prefill")
    assert located.first is not None and located.region is not None
    assert located.first.position == 3
    assert (located.region.region, located.region.element) == ("attention", (2, 0))


def test_rows_after_another_sampled_token_are_not_compared():
    changed = [*TOKENS[:3], 1, 2]
    found = {"decode": _arm(3, changed, flip=(0, 3, 0)), "prefill": GOOD}
    assert not pairs.pair(found, "decode", "prefill").differs


def test_calls_that_do_not_correspond_are_said_to_be_untraced():
    found = {"padded": GOOD, "prefill": Arm(GOOD.stream, GOOD.calls[1:])}
    assert "not traced: call 0" in str(pairs.pair(found, "padded", "prefill").note)


def test_a_difference_of_the_batch_is_looked_for_in_the_batch():
    bad = _arm(1, TOKENS, flip=(0, 1, 2))
    found = {"decode": GOOD, "prefill": GOOD, "decode-mixed": bad, "prefill-batch": GOOD}
    located = pairs.search(found, pairs.behind("decode/prefill"), 2)
    assert (located.left, located.right) == ("decode-mixed", "prefill-batch")
    assert located.region is not None and located.region.element == (1, 2)
    found["decode"] = bad  # the smaller pair comes first
    assert pairs.search(found, pairs.behind("decode/prefill"), 2).left == "decode"


def _compared(case, stages_of, run_of, monkeypatch) -> set[str]:
    from samebits import recipe as recipes

    run = run_of(case)
    records, _, _ = legs.judge(run, stages_of(recipes.load(case)))
    return {record["name"] for record in records}


@pytest.mark.parametrize("case", ["qwen3-tiny", "smollm2-135m", "qwen3.5-tiny"])
def test_every_comparison_of_the_evidence_has_arms_behind_it(case, stages_of, run_of, monkeypatch):
    compared = _compared(case, stages_of, run_of, monkeypatch)
    assert len(compared) > 5
    for name in compared:
        for arm in [arm for pair in pairs.behind(name) or ["none"] for arm in pair]:
            kind, _, ranks = arm.partition("-tp")
            assert kind in arms._MAKERS, f"{name}: {arm}"
            assert not ranks or kind in arms._OF_RANKS
    assert pairs.behind("decode/other") is None


class _FakeRun:
    flag = ""

    class recipe:
        case = "toy"
        platform = "cpu"
        engine: ClassVar[dict[str, int]] = {"max_model_len": 16}
        evidence_path = Path("evidence.json")

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


@pytest.fixture
def computed(monkeypatch):
    """Arms by name, put in place of engines; every engine that would start is listed."""
    found, started = {}, []

    def maker(name):
        def make(subject, *ranks):
            started.append((name, *ranks))
            assert (list(subject.request.prompt), subject.tokens) == ([5, 6, 7], TOKENS)
            suffix = f"-tp{ranks[0]}" if ranks else ""
            return {name + suffix: found[name + suffix]}

        return make

    for table in (arms._MAKERS, arms._OF_RANKS):
        for name in list(table):
            monkeypatch.setitem(table, name, maker(name))
    return types.SimpleNamespace(found=found, started=started)


def test_the_first_comparison_of_a_leg_is_traced(run, computed):
    bad = _arm(1, TOKENS, flip=(0, 1, 2))
    computed.found.update(dict.fromkeys(("decode", "prefill", "prefill-batch"), GOOD))
    computed.found["padded"] = bad
    computed.found["decode-mixed"] = _arm(3, TOKENS, flip=(1, 2, 1))
    equal = _record("B", "decode/prefill") | {"first_difference": None, "mismatches": 0}
    records = [
        _record("A", "decode-alone/decode-mixed", position=4),
        equal,
        _record("C", "trainer-padded/prefill"),
        _record("C", "trainer-packed/prefill", position=2),
        _record("D", "trainer-tp1/rollout-tp1"),
        _record("D", "trainer-tp2/rollout-tp1", position=2),
        _record("E", pairs.REFITS, sequence=2004),
        _record("F", "decode-rows/trainer-rows"),
    ]
    records[-1]["first_difference"] |= {"left": "1" * 32, "right": "2" * 32}
    a, padded, packed, one, two, e, f = locate.reports(run, records)
    assert (padded.layer, padded.region, padded.element) == (0, "norm.rms", (1, 2))
    assert (padded.element_left.who, padded.element_right.who) == (
        "trainer, padded",
        "rollout, prefill",
    )
    assert "repeat: samebits prove toy --locate 0 --pair trainer-padded/prefill" in str(padded)
    assert padded.agree == "1 of 4 tokens of the sequence: position 1"
    assert "agree     1 of 4" in str(padded)
    assert (a.region, a.element, a.step) == ("attention", (2, 1), None)
    assert a.element_right.who == "rollout, decode, mixed"
    same, before = "same first difference as leg C", "not traced: leg C, trainer-padded/prefill"
    assert str(one.note).startswith(same) and str(f.note).startswith(same)
    assert all(str(r.note).startswith(before) for r in (packed, two, e))
    assert e.step == 2 and e.command == f"samebits prove toy --locate 2004 --pair {pairs.REFITS}"
    assert {name for name, *_ in computed.started} == {
        *("decode", "decode-mixed", "padded", "prefill"),
    }
    assert len(computed.started) == len(set(computed.started))  # every arm once for all


def test_leg_b_is_not_traced_once_leg_a_led_to_a_region(run, computed):
    computed.found.update(dict.fromkeys(("decode", "prefill"), GOOD))
    computed.found["prefill-batch"] = _arm(1, TOKENS, flip=(0, 1, 2))
    computed.found["decode-mixed"] = GOOD
    records = [
        _record("A", "prefill-alone/prefill-batch", position=2),
        _record("B", "decode/prefill", position=4),
    ]
    a, b = locate.reports(run, records)
    assert a.region == "norm.rms" and b.region is None
    assert str(b.note).startswith("not traced: leg A, prefill-alone/prefill-batch, compares")
    assert "led to norm.rms" in str(b.note) and b.command.endswith("--pair decode/prefill")
    assert {name for name, *_ in computed.started} == {"prefill", "prefill-batch"}


def test_leg_b_is_traced_where_leg_a_led_nowhere(run, computed):
    computed.found.update(dict.fromkeys(("prefill", "prefill-batch"), GOOD))
    computed.found["decode"] = _arm(3, TOKENS, flip=(0, 1, 2))
    records = [
        _record("A", "prefill-alone/prefill-batch", position=2),
        _record("B", "decode/prefill", position=4),
    ]
    a, b = locate.reports(run, records)
    assert a.note == reporting.AGREE and b.region == "norm.rms"


def test_a_difference_of_the_last_step_says_what_both_sides_called(run, computed):
    """Logits agree; only one side makes log-probabilities by the shared operator."""
    logits = np.arange(20, dtype=np.uint32).reshape(5, 4)
    head = Call(None, "gemm.lm_head", logits, {}, np.arange(5))
    streams = Stream(), Stream()
    for stream, last in zip(streams, (1, 2), strict=True):
        stream.add(0, 3, TOKENS[3:], np.array([7, last], np.uint32))
    scored = [Scored("sampling", "log_softmax", rows, 1) for rows in (1, 4)]
    computed.found["decode"] = Arm(streams[0], [head], scored=scored)
    computed.found["prefill"] = Arm(streams[1], [head])
    (report,) = locate.one_sequence(run, 0, "decode/prefill")
    assert report.region == "logprob" and report.element == (3, 9)
    assert (report.element_left.who, report.element_left.bits) == ("rollout, decode", "00000001")
    (digest,) = digests.of_rows(logits[3:4].astype(np.uint64))
    assert report.operands == {
        "input": f"{int(digest):016x}",
        "calls": "log_softmax of 1 to 4 rows in 2 calls left, none of ops.logprob right",
    }
    assert "operand   calls log_softmax of 1 to 4 rows" in str(report)


def test_a_leg_without_a_red_one_before_it_is_traced(run, monkeypatch, computed):
    bad = _arm(1, TOKENS, flip=(0, 1, 2))
    computed.found.update({"padded-tp2": bad} | dict.fromkeys(("prefill", "prefill-tp2"), GOOD))
    refitted = {"decode": _arm(3, TOKENS), "padded": _arm(1, TOKENS, flip=(1, 0, 0))}
    subject = Subject(run, 2004, TOKENS)
    monkeypatch.setattr(refit, "arms", lambda run, sequence: (subject, refitted))
    records = [
        _record("D", "trainer-tp2/rollout-tp1"),
        _record("D", "trainer-tp2/rollout-tp2"),
        _record("E", pairs.REFITS, sequence=2004),
    ]
    d, both, e = locate.reports(run, records)
    assert d.element_left.who == "trainer, padded, tp2" and d.region == "norm.rms"
    assert both.region is None and "same first difference as leg D" in str(both.note)
    assert (e.step, e.layer, e.region, e.element) == (2, 0, "attention", (0, 0))


def test_reports_come_one_by_one(run, computed):
    computed.found.update(dict.fromkeys(("decode", "prefill", "prefill-batch", "packed"), GOOD))
    computed.found |= {"decode-mixed": GOOD, "packed-batch": GOOD}
    records = [
        _record("A", "decode-alone/decode-mixed"),
        _record("C", "trainer-packed/prefill", position=2),
    ]
    found = locate.reports(run, records)
    assert next(found).note == reporting.AGREE
    assert {name for name, *_ in computed.started} == {"decode", "decode-mixed"}
    assert next(found).note == reporting.AGREE


def test_a_difference_that_is_gone_is_not_equal(run, monkeypatch, computed):
    names = ("decode", "prefill", "padded", "packed", "decode-mixed", "prefill-batch")
    computed.found.update(dict.fromkeys((*names, "padded-batch"), GOOD))
    assert locate.one_sequence(run, 0) == []  # no run has said anything
    records = [_record("B", "decode/prefill"), _record("C", "trainer-padded/prefill", sequence=5)]
    statement = types.SimpleNamespace(predicate={"comparisons": records})
    (run.folder / "evidence.json").write_text("{}")
    monkeypatch.setattr(reporting.Statement, "load", lambda path: statement)
    (whole,) = locate.one_sequence(run, 0)
    (asked,) = locate.one_sequence(run, 0, "decode/prefill")
    assert whole == asked and asked.note == reporting.AGREE and asked.left.bits == "bf800000"
    (other,) = locate.one_sequence(run, 0, "trainer-padded/prefill")
    assert other.note == reporting.ELSEWHERE and other.sequence == 5
    assert {whole.note, other.note} < {*locate.GONE}
    records[0]["first_difference"] = None
    assert locate.one_sequence(run, 0, "decode/prefill") == []


def test_a_sequence_that_only_the_cache_made_differ_is_said_to_be_stale(run, monkeypatch):
    cached = _arm(3, TOKENS, flip=(0, 2, 1))
    found = {"decode": _arm(3, TOKENS), "padded": GOOD, "padded-batch": GOOD}
    found |= {"decode-batch": _arm(3, TOKENS), refit.AS_RUN: cached}
    subject = Subject(run, 2000, TOKENS)
    monkeypatch.setattr(refit, "arms", lambda run, sequence: (subject, found))
    (report,) = locate.one_sequence(run, 2000, pairs.REFITS)
    assert report.note == refit.STALE and refit.STALE in locate.GONE
    assert report.left.bits != report.right.bits and report.position == 3
    assert report.left.who == "rollout, decode, as run" and report.region is None
    (told,) = locate.reports(run, [_record("E", pairs.REFITS, sequence=2000)])
    assert told.note == refit.STALE
    del found[refit.AS_RUN]  # no token of it was cached
    assert locate.one_sequence(run, 2000, pairs.REFITS) == []


def test_tokens_that_are_cached_right_after_a_reset_are_different(run, tmp_path, monkeypatch):
    """No trace can be made of them; what they are is the answer."""
    done = Completion((8, 9), np.zeros(2, np.uint32), 2, "length", "0")
    engine = types.SimpleNamespace(
        generate=lambda requests: [done for _ in requests], reset_prefix_cache=lambda: 0
    )
    config = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 8}
    monkeypatch.setattr(run.recipe, "config", config, raising=False)
    asked = [types.SimpleNamespace(prompt=(5, 6, 7))]
    live = tmp_path / "rollout", tmp_path / "trainer"
    with pytest.raises(Different, match="2 cached tokens right after a reset"):
        refit._arms(run, 2000, engine, None, asked, live)


def test_an_engine_that_fails_does_not_hide_the_difference(run, monkeypatch):
    calls = []

    def fails(subject):
        calls.append(subject.number)
        raise Refused("SB0512", seen="gone", required="a running engine", hint="samebits doctor")

    monkeypatch.setitem(arms._MAKERS, "decode", fails)
    records = [_record("A", "decode-alone/decode-mixed"), _record("B", "decode/prefill")]
    records[1]["first_difference"]["position"] = 2
    found = list(locate.reports(run, records))
    assert all("SB0512" in str(report.note) for report in found)
    assert found[0].left.bits == "bf800000" and calls == [0]
    with pytest.raises(Refused, match="SB0512"):  # asked for by hand, it is the answer
        locate.one_sequence(run, 0)


def test_a_trace_that_cannot_be_read_does_not_hide_the_difference(run, monkeypatch):
    def fails(subject):
        raise ValueError("the trace holds no row of the sequence")

    monkeypatch.setitem(arms._MAKERS, "decode-mixed", fails)
    monkeypatch.setitem(arms._MAKERS, "decode", lambda subject: {"decode": GOOD})
    (report,) = locate.reports(run, [_record("A", "decode-alone/decode-mixed")])
    assert "no row of the sequence" in str(report.note) and report.position == 3


def test_a_gpu_computes_a_difference_again_on_request_only(run, monkeypatch, computed):
    monkeypatch.setattr(run.recipe, "platform", "sm90")
    (report,) = locate.reports(run, [_record("C", "trainer-padded/prefill")])
    assert computed.started == [] and "not traced" in str(report.note)
    assert report.command == "samebits prove toy --locate 0 --pair trainer-padded/prefill"


def test_a_sequence_that_is_not_in_a_batch_has_no_arm_there(run, monkeypatch):
    monkeypatch.setitem(arms._MAKERS, "decode-batch", lambda subject: {})
    found = Arms(Subject(run, 17, TOKENS))
    with pytest.raises(ValueError, match="sequence 17 is not part of decode-batch"):
        found["decode-batch"]


def test_one_sequence_is_compared_in_all_pairs_or_in_one(run, computed):
    computed.found.update(dict.fromkeys(("decode", "prefill", "packed"), GOOD))
    computed.found |= {"padded": _arm(1, TOKENS, flip=(1, 3, 0))}
    found = locate.one_sequence(run, 0)
    assert [r.comparison for r in found] == ["padded/prefill", "decode/padded"]
    assert {(r.position, r.region, r.element) for r in found} == {(4, "attention", (3, 0))}
    computed.started.clear()
    (again,) = locate.one_sequence(run, 0, "trainer-padded/prefill")
    assert (again.region, again.element, again.left.who) == ("attention", (3, 0), "trainer, padded")
    assert computed.started == [("padded",), ("prefill",)]
    (third,) = locate.one_sequence(run, 0, found[0].comparison)  # as the report says
    assert third == found[0]


@pytest.mark.parametrize(
    ("sequence", "pair", "error_id"),
    [(1, None, "SB0911"), (7, None, "SB0911"), (0, "decode/other", "SB0926")],
)
def test_a_sequence_or_pair_that_no_run_has_is_refused(run, sequence, pair, error_id):
    with pytest.raises(Refused, match=error_id):
        locate.one_sequence(run, sequence, pair)


def test_without_a_run_the_refusal_names_the_command_that_needs_none(run):
    (run.folder / "capsule.json").unlink()
    with pytest.raises(Refused, match="SB0911") as caught:
        locate.one_sequence(run, 0)
    assert caught.value.hint == "samebits trace toy"
    assert "(samebits prove toy)" in caught.value.required


@pytest.mark.parametrize("sequence", [3, 2009])
def test_a_sequence_that_the_rl_run_has_not_is_refused(run, monkeypatch, sequence):
    def run_rl(run, *, steps, arithmetic, look):
        assert (steps, arithmetic) == (2, "aligned")
        look.at(None, None, [1, 2])

    monkeypatch.setattr(rl, "run_rl", run_rl)
    with pytest.raises(Refused, match="SB0911"):
        locate.one_sequence(run, sequence, pairs.REFITS)


def test_reports_are_written_and_an_old_file_goes(tmp_path, run, computed):
    computed.found.update(dict.fromkeys(("prefill", "prefill-batch"), GOOD))
    path = tmp_path / "difference.json"
    locate.write(list(locate.reports(run, [_record("A", "prefill-alone/prefill-batch")])), path)
    assert json.loads(path.read_text())[0]["position"] == 3
    locate.write([], path)
    assert not path.exists()
