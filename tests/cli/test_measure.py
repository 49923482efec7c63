import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from samebits import cli, mismatch
from samebits.errors import Refused
from samebits.measure import measure, read
from samebits.measure.smells import rounding_step


def log_softmax(logits, temperature=1.0):
    z = logits / temperature
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


class World:
    """Sequences of sampled tokens with their whole logit rows; log-probabilities in fp32."""

    def __init__(self, sequences=24, length=60, vocabulary=200, seed=0):
        self.rng = np.random.default_rng(seed)
        shape = (sequences, length, vocabulary)
        spread = self.rng.uniform(1.0, 4.0, (sequences, length, 1))
        self.logits = self.rng.standard_normal(shape) * spread
        noise = self.rng.gumbel(size=shape)
        self.tokens = (self.logits + noise).argmax(-1)
        self.rollout = self.chosen(log_softmax(self.logits))

    def chosen(self, rows):
        return np.take_along_axis(rows, self.tokens[..., None], -1)[..., 0].astype(np.float32)


@pytest.fixture
def world():
    return World()


def rows(rollout, trainer, **more):
    return [
        {"id": f"s{i}", "rollout_logprobs": a, "trainer_logprobs": b}
        | {key: values[i] for key, values in more.items()}
        for i, (a, b) in enumerate(zip(rollout.tolist(), trainer.tolist(), strict=True))
    ]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def report(tmp_path):
    def run(lines, **options):
        return measure(read([write(tmp_path / "dump.jsonl", lines)]), **options)

    return run


def first(found, name, kind, confidence=("high", "medium")):
    smell = found.smells[0]
    assert (smell.name, smell.kind) == (name, kind), [s.name for s in found.smells]
    assert smell.confidence in confidence
    return smell.numbers


# --- counts ---


def test_equal(world, report):
    found = report(rows(world.rollout, world.rollout))
    assert (found.verdict, found.exit_code) == ("EQUAL", 0)
    assert found.totals.tokens == world.rollout.size
    assert found.totals.mismatches == 0
    assert found.smells == ()
    assert (found.totals.is_ratio_max, found.sequence_ratio_max) == (1.0, 1.0)


def test_too_few_tokens_prove_nothing_but_one_difference_does(world, report):
    few = world.rollout[:1, :20]
    assert report(rows(few, few)).exit_code == 3
    assert report(rows(few, few), min_tokens=20).exit_code == 0
    other = few.copy()
    other[0, 3] = np.nextafter(other[0, 3], np.float32(-9))
    found = report(rows(few, other))
    assert (found.exit_code, found.totals.mismatches) == (1, 1)


def test_one_ulp_in_one_of_many_tokens_is_different(world, report):
    other = world.rollout.copy()
    other[4, 7] = np.nextafter(other[4, 7], np.float32(0))
    found = report(rows(world.rollout, other))
    assert (found.verdict, found.totals.mismatches) == ("DIFFERENT", 1)
    assert [b.name for b in found.worst_sequences] == ["s4"]
    assert {b.name: b.mismatches for b in found.by_position}["1..7"] == 1


def test_counts_follow_their_definitions(world, report):
    d = world.rng.normal(0, 0.01, world.rollout.shape)
    other = (world.rollout + d).clip(max=0).astype(np.float32)
    found = report(rows(world.rollout, other))
    gap = other.astype(np.float64) - world.rollout.astype(np.float64)
    assert found.totals.max_abs == pytest.approx(np.abs(gap).max())
    assert found.totals.mean_abs == pytest.approx(np.abs(gap).mean())
    assert found.totals.k3_kl == pytest.approx((np.exp(gap) - 1 - gap).mean())
    assert found.totals.is_ratio_max == pytest.approx(np.exp(gap).max())
    assert found.sequence_ratio_max == pytest.approx(np.exp(gap.sum(1)).max())
    for table in (found.by_position, found.by_probability):
        assert sum(b.tokens for b in table) == gap.size
        assert sum(b.mismatches for b in table) == found.totals.mismatches
        assert sum(b.share for b in table) == pytest.approx(1)


def test_masked_padding_does_not_count(world, report):
    other = world.rollout.copy()
    other[:, 50:] = 5.0  # positive: only a mask makes this readable
    mask = [[1] * 50 + [0] * 10] * len(other)
    found = report(rows(world.rollout, other, response_mask=mask))
    assert (found.verdict, found.totals.tokens) == ("EQUAL", 24 * 50)


# --- smells ---


def test_noise_of_16_bit_kernels(world, report):
    other = world.rollout + world.rng.normal(0, 0.01, world.rollout.shape)
    found = report(rows(world.rollout, other.clip(max=0).astype(np.float32)))
    assert first(found, "other rounding", "numeric")["mean"] == pytest.approx(0.008, rel=0.2)
    assert "16-bit" in found.smells[0].says


def test_noise_of_fp32_order(world, report):
    other = world.rollout * (1 + world.rng.normal(0, 1e-7, world.rollout.shape))
    found = report(rows(world.rollout, other.astype(np.float32)))
    first(found, "other rounding", "numeric")
    assert "fp32" in found.smells[0].says


@pytest.mark.parametrize(
    ("temperature", "noise"), [(0.6, 0), (0.8, 0), (1.3, 0), (1 / 0.98, 2e-3), (0.99, 2e-3)]
)
def test_temperature_on_one_side(world, report, temperature, noise):
    other = world.chosen(log_softmax(world.logits, temperature))
    other += world.rng.normal(0, noise, other.shape).astype(np.float32)
    found = report(rows(world.rollout, other.clip(max=0)))
    slope = first(found, "temperature", "semantic")["slope"]
    assert (slope > 1) == (temperature < 1)


def test_constant_factor_and_its_base(world, report):
    found = report(rows(world.rollout, (world.rollout / np.log(2)).astype(np.float32)))
    assert first(found, "constant factor", "semantic")["factor"] == pytest.approx(1.4427, rel=1e-4)
    assert "base-2" in found.smells[0].says
    found = report(rows(world.rollout, world.rollout * np.float32(0.7)))
    assert first(found, "constant factor", "semantic")["factor"] == pytest.approx(0.7)


def test_constant_offset(world, report):
    found = report(rows(world.rollout, world.rollout - np.float32(0.003)))
    numbers = first(found, "constant offset", "semantic")
    assert numbers["offset"] == pytest.approx(-0.003, rel=1e-3)


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_by_one_token(world, report, shift):
    found = report(rows(world.rollout, np.roll(world.rollout, shift, 1)))
    assert first(found, "shifted tokens", "semantic")["shift"] == shift


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_truncated_support_on_one_side(world, report, side):
    streams = {"rollout": world.rollout, "trainer": world.rollout.copy()}
    streams[side] = world.rollout.copy()
    streams[side][:, ::10] = -np.inf
    found = report(rows(streams["rollout"], streams["trainer"]))
    assert first(found, "truncated support", "semantic")["infinite"] == found.unmatched == 24 * 6
    assert found.exit_code == 1
    assert side in found.smells[0].says


def test_equal_infinities_are_equal(world, report):
    both = world.rollout.copy()
    both[0, 0] = -np.inf
    found = report(rows(both, both))
    assert found.verdict == "EQUAL"
    assert (found.infinite, found.unmatched, found.totals.tokens) == (1, 0, both.size - 1)
    assert found.reason.endswith("; 1 more are the same infinity on both sides")
    assert report(rows(world.rollout, world.rollout)).infinite == 0


def test_infinities_are_counted_where_people_read(world, tmp_path, capsys):
    both = world.rollout.copy()
    both[:, ::10] = -np.inf
    path = write(tmp_path / "dump.jsonl", rows(both, both))
    assert cli.run(["measure", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"tokens          {both.size:,} in 24" in shown
    assert "infinite        144, the same on both sides" in shown
    assert cli.run(["measure", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["infinite"] == 144


def test_renormalised_after_top_p(world, report):
    p = np.exp(log_softmax(world.logits))
    order = np.sort(p, -1)[..., ::-1]
    kept = (order.cumsum(-1) - order) < 0.9
    smallest = np.where(kept, order, 1).min(-1, keepdims=True)
    cut = np.where(p >= smallest, p, 0)
    inside = np.take_along_axis(cut, world.tokens[..., None], -1)[..., 0] > 0
    mass = cut.sum(-1)
    rollout = np.where(inside, world.rollout - np.log(mass), world.rollout).astype(np.float32)
    found = report(rows(rollout.clip(max=0), world.rollout))
    assert 0.85 < first(found, "renormalised support", "semantic")["least_mass"] < 0.95
    assert "higher in the rollout" in found.smells[0].says


def test_padding_counted(world, report):
    other = world.rollout.copy()
    other[:, 55:] = 0
    first(report(rows(world.rollout, other)), "padding counted", "semantic")


def test_unrelated_rows(world, report):
    first(report(rows(world.rollout, np.roll(world.rollout, 5, 0))), "unrelated values", "semantic")


def test_few_sequences_carry_it(world, report):
    other = world.rollout.copy()
    other[3] = World(seed=9).rollout[3]
    found = report(rows(world.rollout, other))
    first(found, "few sequences", "semantic")
    assert "s3" in found.smells[0].says


def test_one_bad_sequence_of_forty_is_named_alone(report):
    world = World(sequences=40)
    other = world.rollout.copy()
    other[7] = World(sequences=40, seed=9).rollout[7]
    found = report(rows(world.rollout, other))
    assert first(found, "few sequences", "semantic")["sequences"] == 1
    assert found.smells[0].says.endswith("first s7")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [(np.nan, np.nan), (-1.0, -np.inf), (-np.inf, np.nan)])
def test_without_a_finite_token_nothing_is_compared(report, values):
    streams = [np.full((2, 64), value, np.float32) for value in values]
    found = report(rows(*streams))
    assert (found.verdict, found.totals.tokens) == ("NOT_OBSERVED", 0)
    assert "nothing to compare" in found.reason
    assert {smell.name for smell in found.smells} <= {"not a number", "truncated support"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tokens", [1, 7, 99])
def test_a_handful_of_tokens_gives_no_confidence(world, report, tokens):
    few = world.rollout.reshape(1, -1)[:, :tokens]
    found = report(rows(few, few - np.float32(0.5)))
    assert (found.exit_code, found.totals.mismatches) == (1, tokens)
    assert found.smells and {smell.confidence for smell in found.smells} == {"low"}
    if tokens == 1:
        assert found.smells[0].name != "constant offset"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [-1e48, -1e38, -3e38])
def test_values_at_the_end_of_fp32(world, report, value):
    left, right = world.rollout.astype(np.float64), world.rollout.astype(np.float64)
    left[0, 0] = value
    for pair in ((left, right), (right, left)):
        found = report(rows(*pair))
        assert found.exit_code == 1
        assert not np.isnan(
            [found.totals.k3_kl, found.totals.max_abs, found.sequence_ratio_max]
        ).any()
    assert report(rows(left, left)).verdict == "EQUAL"


def test_infinite_k3():
    left, right = np.array([-np.inf, -1.0]), np.array([-1.0, -1.0])
    assert mismatch.measure(left, right).k3_kl == np.inf


def test_nan_is_a_difference(world, report):
    broken = world.rollout.copy()
    broken[2, 2] = np.nan
    found = report(rows(broken, broken))
    assert (found.exit_code, found.unmatched) == (1, 1)
    first(found, "not a number", "semantic")


def test_other_tokens_come_first(world, tmp_path):
    left = [
        {"id": i, "logprobs": a, "tokens": t}
        for i, (a, t) in enumerate(zip(world.rollout.tolist(), world.tokens.tolist(), strict=True))
    ]
    right = [{**row, "tokens": [row["tokens"][0] + 1, *row["tokens"][1:]]} for row in left]
    found = measure(read([write(tmp_path / "r.jsonl", left), write(tmp_path / "t.jsonl", right)]))
    assert found.exit_code == 1
    assert first(found, "other tokens", "semantic")["differing"] == 24


# --- dumps that cannot show bits ---


def bf16(x):
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize(
    "narrow",
    [
        lambda x: np.round(x.astype(np.float64), 4),
        lambda x: np.vectorize(lambda v: float(f"{v:.5g}"))(x.astype(np.float64)),
        bf16,
        lambda x: x.astype(np.float16),
    ],
)
def test_a_rounded_dump_is_not_judged(world, report, narrow):
    rounded = narrow(world.rollout)
    for other in (rounded, world.rollout):
        found = report(rows(rounded, other))
        assert (found.verdict, found.exit_code) == ("NOT_OBSERVED", 3)
    first(report(rows(rounded, world.rollout)), "rounded dump", "format")
    far = (world.rollout + world.rng.normal(0, 0.5, world.rollout.shape)).clip(max=0)
    assert report(rows(rounded, narrow(far.astype(np.float32)))).exit_code == 1


@pytest.mark.parametrize("spelling", [float, lambda v: float(str(v)), lambda v: float(f"{v:.9g}")])
def test_full_fp32_in_any_spelling_is_judged(world, spelling):
    assert rounding_step(np.array([spelling(v) for v in world.rollout.ravel()])) == 0


# --- reading ---


def test_spellings_of_verl(world, report):
    lines = [
        {
            "uid": "p",  # one for a whole group: no key of a line, and none is needed
            "rollout_log_probs": a,
            "old_log_probs": a,
            "responses": t,
            "response_mask": [1] * len(a),
        }
        for a, t in zip(world.rollout.tolist(), world.tokens.tolist(), strict=True)
    ]
    assert report(lines).verdict == "EQUAL"


def test_gzip_and_two_files_in_another_order(world, tmp_path):
    left = [{"id": i, "logprobs": a} for i, a in enumerate(world.rollout.tolist())]
    with gzip.open(tmp_path / "r.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in left)
    right = write(tmp_path / "t.jsonl", left[::-1])
    assert measure(read([tmp_path / "r.jsonl.gz", right])).verdict == "EQUAL"


GOOD = {"id": "1", "rollout_logprobs": [-1.0, -2.0], "trainer_logprobs": [-1.0, -2.0]}


@pytest.mark.parametrize(
    ("text", "error_id"),
    [
        ("", "SB1001"),
        ("{", "SB1001"),
        ("[1]", "SB1002"),
        (json.dumps(GOOD)[:-1] + ', "id": "2"}', "SB0306"),
        (json.dumps(GOOD)[:-1] + ', "rollout_logprobs": [-1.0, -2.5]}', "SB0306"),
        (json.dumps({**GOOD, "trainer_logprobs": [-1.0]}), "SB1002"),
        (json.dumps({**GOOD, "trainer_logprobs": [-1.0, "x"]}), "SB1002"),
        (json.dumps({**GOOD, "trainer_logprobs": "text"}), "SB1002"),
        (json.dumps({**GOOD, "old_log_probs": [-1.0, -2.0]}), "SB1002"),
        (json.dumps({"id": 1, "rollout_logprobs": [-1.0]}), "SB1002"),
        (json.dumps({**GOOD, "mask": [1]}), "SB1002"),
        (json.dumps({**GOOD, "mask": [1, 2]}), "SB1002"),
        (json.dumps({**GOOD, "tokens": [1]}), "SB1002"),
        (json.dumps({**GOOD, "tokens": ["a", "b"]}), "SB1002"),
        (json.dumps({**GOOD, "rollout_logprobs": [0.9, 0.8]}), "SB1003"),
        ('{"id": ' + "1" * 5000 + "}", "SB1001"),
        ("[" * 100_000, "SB1001"),
        (json.dumps({**GOOD, "rollout_logprobs": [-(10**400), -1]}), "SB1002"),
        (json.dumps({**GOOD, "tokens": [1, 1 << 70]}), "SB1002"),
    ],
)
def test_bad_lines(tmp_path, capsys, text, error_id):
    path = tmp_path / "dump.jsonl"
    path.write_text(text)
    assert cli.run(["measure", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(error_id)
    assert path.read_text() == text


def test_what_is_no_object_is_named_in_english(tmp_path):
    path = tmp_path / "dump.jsonl"
    for text, kind in {"1": "a number", '"1"': "a text", "[1]": "a list", "null": "null"}.items():
        path.write_text(text)
        with pytest.raises(Refused, match="SB1002") as caught:
            read([path])
        assert caught.value.seen == f"dump.jsonl:1: {kind}"


def test_unreadable_files(tmp_path):
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"id": 1}\n' * 99)[:-9])
    (tmp_path / "plain.jsonl.gz").write_text("{}")
    for name in ("absent.jsonl", "cut.jsonl.gz", "plain.jsonl.gz"):
        with pytest.raises(Refused, match=r"SB100[12]"):
            read([tmp_path / name])


def test_hints_fit_what_is_wrong_with_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.jsonl").write_text("{")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}")[:-9])
    hints = {
        "absent.jsonl": "ls .",
        "folder/absent.jsonl": "ls folder",
        ".": "ls .",
        "a b.jsonl": "sed -n 1p 'a b.jsonl' | tail -c 300",
        "cut.jsonl.gz": "zcat cut.jsonl.gz | head -c 300",
        "empty.jsonl": "head -c 300 empty.jsonl",
    }
    for name, hint in hints.items():
        with pytest.raises(Refused, match="SB1001") as caught:
            read([Path(name)])
        assert caught.value.hint == hint


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_line_that_cannot_be_read_is_named(world, tmp_path, suffix):
    path = tmp_path / f"dump.jsonl{suffix}"
    opened = gzip.open if suffix else open
    whole = "".join(json.dumps(row) + "\n" for row in rows(world.rollout, world.rollout)[:20])
    for cut in (whole[:-50].encode(), whole.encode()[:-50] + b"\xff\n"):
        with opened(path, "wb") as file:
            file.write(cut)
        with pytest.raises(Refused, match="SB1001") as caught:
            read([path])
        assert caught.value.seen.startswith(f"{path}:20: ")
        assert "line 1" not in caught.value.seen
        shown = subprocess.run(caught.value.hint, shell=True, capture_output=True).stdout
        assert shown == cut.splitlines(keepends=True)[19][-300:]


def test_a_byte_order_mark_is_skipped(world, tmp_path):
    path = write(tmp_path / "dump.jsonl", rows(world.rollout, world.rollout))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert measure(read([path])).verdict == "EQUAL"


def test_progress_of_a_large_file_goes_to_stderr(world, tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "dump.jsonl", rows(world.rollout, world.rollout))
    assert cli.run(["measure", str(path)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.modules["samebits.measure.read"], "_LARGE", 0)
    assert cli.run(["measure", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "dump.jsonl" in err and "dump.jsonl" not in out


def test_a_dash_is_standard_input(world, monkeypatch):
    lines = "".join(json.dumps(line) + "\n" for line in rows(world.rollout, world.rollout))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert cli.run(["measure", "-"]) == 0


def test_files_that_do_not_join(tmp_path):
    line = {"logprobs": [-1.0]}
    good = write(tmp_path / "good.jsonl", [{"id": 1, **line}, {"id": 2, **line}])
    cases = {
        "no id": [line],
        "in one file only": [{"id": 1, **line}],
        "second time": [{"id": 1, **line}] * 2,
    }
    for words, lines in cases.items():
        with pytest.raises(Refused, match="SB1004") as caught:
            read([good, write(tmp_path / "bad.jsonl", lines)])
        assert words in caught.value.seen
    with pytest.raises(Refused, match="SB1004"):
        read([good] * 3)
    longer = write(tmp_path / "long.jsonl", [{"id": i, "logprobs": [-1.0] * i} for i in (1, 2)])
    with pytest.raises(Refused, match="SB1002"):
        read([good, longer])


def test_command_prints_tables_or_json(world, tmp_path, capsys):
    other = (world.rollout + world.rng.normal(0, 0.01, world.rollout.shape)).clip(max=0)
    other[0, 0] = -np.inf
    path = write(tmp_path / "dump.jsonl", rows(world.rollout, other.astype(np.float32)))
    assert cli.run(["measure", str(path)]) == 1
    shown = capsys.readouterr().out
    for words in (
        "K3 KL",
        "position in the sequence",
        "worst sequences",
        "1. semantic",
        "DIFFERENT",
    ):
        assert words in shown
    assert cli.run(["measure", "--json", str(path)]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["totals"]["tokens"] == world.rollout.size - 1
    assert found["verdict"] == "DIFFERENT"
