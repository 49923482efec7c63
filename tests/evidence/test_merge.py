import pytest

from samebits import evidence
from samebits.errors import Refused
from samebits.evidence import pairs

INTENT = dict.fromkeys(("kind", "machine", "isa", "torch", "numpy", "numba", "llvmlite"), "1")


def part(run, recipe, make_row, shard, legs, **changes):
    names = pairs.DENSE | {"D": ("trainer-tp1/rollout-tp1",)}
    rows = [make_row(leg, name, recipe, **changes) for leg in legs for name in names[leg]]
    return run(comparisons=rows, shard=shard)


def test_shards_of_one_leg_add_up(run, recipe, make_row, make_rows):
    rest = run(comparisons=[c for c in make_rows(recipe) if c["leg"] != "B"], shard="1of3")
    shards = [
        part(run, recipe, make_row, f"{i}of3", ["B"], tokens=400, streams=(c * 64, c * 64))
        for i, c in enumerate("ab", start=2)
    ]
    assert [shard.verdict for shard in shards] == ["NOT_OBSERVED"] * 2
    whole = evidence.merge([rest, *shards])
    (leg,) = [c for c in whole.predicate["comparisons"] if c["leg"] == "B"]
    assert whole.verdict == "EQUAL"
    assert leg["tokens"] == 800 and leg["control"]["mismatches"] == 180
    assert leg["hazards"]["preempted"] == 4 and len(leg["streams"]) == 2
    assert whole.predicate["shards"] == ["1of3", "2of3", "3of3"]
    assert evidence.merge([rest, shards[0]]).verdict == "NOT_OBSERVED"


def test_a_mismatch_in_one_shard_is_kept(run, recipe, make_row):
    first = {"sequence": 1, "position": 2, "token": 3, "left": "00", "right": "01"}
    good = part(run, recipe, make_row, "one", ["A", "B", "C", "D"])
    bad = part(
        run, recipe, make_row, "two", ["B"],
        mismatches=3, max_abs=0.5, first=first, streams=("a" * 64, "b" * 64),
    )  # fmt: skip
    for order in ([good, bad], [bad, good]):
        whole = evidence.merge(order)
        (leg,) = [c for c in whole.predicate["comparisons"] if c["leg"] == "B"]
        assert whole.verdict == "DIFFERENT" and leg["mismatches"] == 3
        assert leg["first_difference"] == first and leg["max_abs"]["decimal"] == "0.5"


def test_a_shard_given_twice_is_refused(run, recipe, make_row):
    shard = part(run, recipe, make_row, "one", ["A"])
    with pytest.raises(Refused, match="given twice"):
        evidence.merge([shard, shard])


@pytest.mark.parametrize(
    "changes",
    [
        {"trees": {"vllm": "4" * 40}},
        {"intent": INTENT | {"torch": "another"}},
        {"switches": {"compile": "on"}},
    ],
)
def test_shards_of_different_runs_are_refused(run, changes):
    one, two = run(shard="one"), run(shard="two", **changes)
    with pytest.raises(Refused, match="SB0806"):
        evidence.merge([one, two])


def test_nothing_to_merge_is_refused():
    with pytest.raises(Refused, match="SB0806"):
        evidence.merge([])
