import math

import pytest

from samebits import evidence
from samebits.errors import Refused
from samebits.evidence.verdict import streams_digest

FIRST = {"sequence": 3, "position": 7, "token": 11, "left": "bf800000", "right": "bf800001"}


def test_a_good_run_is_equal(good):
    assert (good.verdict, evidence.judge(good.predicate).reasons) == ("EQUAL", ())


def test_one_mismatch_is_different(run, recipe, make_rows):
    rows = make_rows(
        recipe, "B", mismatches=1, max_abs=1e-7, first=FIRST, streams=("a" * 64, "b" * 64)
    )
    statement = run(comparisons=rows)
    assert statement.verdict == "DIFFERENT"
    assert f"1 of {recipe.legs['B'].tokens}" in evidence.judge(statement.predicate).reasons[0]


def test_a_nan_on_both_sides_is_different(run, recipe, make_rows):
    rows = make_rows(recipe, "B", mismatches=1, max_abs=math.nan, first=FIRST)
    assert run(comparisons=rows).verdict == "DIFFERENT"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 1}, "1 tokens of the {wanted}"),
        ({"tokens": 0}, "no token was compared"),
        ({"hazards": {"split_mid_prompt": 5}}, "hazard preempted never fired"),
        ({"control": None}, "no negative control"),
        ({"control": evidence.control("stock", 100, 0, 0.0)}, "control stock did not diverge"),
        ({"control": evidence.control("stock", 100, 90, 0.0)}, "control stock did not diverge"),
        ({"control": evidence.control("stock", 31, 31, 1.0)}, "compared 31 tokens of the 32"),
        ({"control": evidence.control("easier_fault", 99, 9, 1.0)}, "not the one that the recipe"),
        ({"fault": "k_cut_by_rows"}, "planted fault k_cut_by_rows was active"),
    ],
)
def test_what_was_not_exercised_is_not_observed(run, recipe, make_rows, changes, reason):
    statement = run(comparisons=make_rows(recipe, "B", **changes))
    assert statement.verdict == "NOT_OBSERVED"
    assert reason.format(wanted=recipe.legs["B"].tokens) in "\n".join(
        evidence.judge(statement.predicate).reasons
    )


def test_a_leg_that_did_not_run_is_not_observed(run, recipe, make_row):
    statement = run(comparisons=[make_row(leg, "all", recipe) for leg in ("A", "B")])
    assert statement.verdict == "NOT_OBSERVED"
    assert "leg C did not run" in evidence.judge(statement.predicate).reasons


def test_layouts_of_one_leg_add_up_and_one_control_may_serve(run, recipe, make_rows):
    rows = make_rows(recipe, "D", tokens=200)
    for record in rows[-3:]:
        record["control"] = None
    assert run(comparisons=rows).verdict == "EQUAL"


@pytest.mark.parametrize("gone", [-1, -2, -3, -4])
def test_every_claimed_layout_must_be_compared(run, recipe, make_rows, gone):
    rows = make_rows(recipe)
    layouts = rows.pop(gone)["layouts"]
    statement = run(comparisons=rows)
    assert statement.verdict == "NOT_OBSERVED"
    assert evidence.judge(statement.predicate).reasons == (
        f"leg D: trainer {layouts['left']} was not compared with rollout {layouts['right']}",
    )


def test_a_layout_that_the_recipe_does_not_claim_is_not_observed(run, recipe, make_row, make_rows):
    rows = [*make_rows(recipe), make_row("D", "more", recipe, layouts=("tp4", "tp1"))]
    assert run(comparisons=rows).verdict == "NOT_OBSERVED"


@pytest.mark.parametrize(
    "setting", [("SAMEBITS_FAULT", "k_cut_by_rows"), ("fault", "rank_order_sum")]
)
@pytest.mark.parametrize("where", ["switches", "intent"])
def test_a_setting_that_plants_a_fault_is_not_observed(run, setting, where):
    assert run(**{where: dict([setting])}).verdict == "NOT_OBSERVED"
    assert run(**{where: {"compile": "default"}}).verdict == "EQUAL"


@pytest.mark.parametrize("shard", ["1of9", "0of1", "1of0", "most"])
def test_a_part_of_a_run_is_not_observed(run, shard):
    assert run(shard=shard).verdict == "NOT_OBSERVED"
    assert run(shard="1of1").verdict == "EQUAL"


def test_a_recipe_with_an_rl_run_is_not_observed_without_one(run, recipe):
    recipe.data["rl"] = {"steps": 2}
    statement = run()
    assert "RL: 0 of 2 steps" in evidence.judge(statement.predicate).reasons


def test_a_repeat_with_other_streams_is_different(run, good):
    same = run(repeats={"second": streams_digest(good.predicate)})
    assert same.verdict == "EQUAL"
    assert run(repeats={"second": "0" * 64}).verdict == "DIFFERENT"


@pytest.mark.parametrize(
    ("aligned", "control", "verdict"),
    [
        (0.9, ("no_such_fault", 50, 1.5), "NOT_OBSERVED"),
        (0.9, ("rope_base_doubled", 31, 1.5), "NOT_OBSERVED"),
        (0.9, 1.5, "EQUAL"),
        (1.0, 1.5, "EQUAL"),
        (1.1, 1.5, "DIFFERENT"),
        (math.nan, 1.5, "DIFFERENT"),
        (0.9, 1.0, "NOT_OBSERVED"),
        (0.9, math.nan, "NOT_OBSERVED"),
        (0.9, None, "NOT_OBSERVED"),
    ],
)
def test_the_oracle_may_not_be_further_away_than_from_stock(run, aligned, control, verdict):
    record = evidence.oracle(
        "fp32",
        "the aligned arm is no further from fp32 than stock",
        tokens=50,
        aligned=(aligned, 2.0),
        stock=(1.0, 2.0),
        control=("rope_base_doubled", 50, control) if isinstance(control, float) else control,
        command="samebits prove qwen3-tiny --leg O",
    )
    assert run(oracles=[record]).verdict == verdict


def step(number: int, mismatches: int = 0, max_abs: float = 1e-3, tokens: int = 64) -> dict:
    off = {"max_abs": max_abs, "mean_abs": 1e-4, "k3_kl": 1e-8, "is_ratio_max": 1.01}
    exact = {"max_abs": 0.0, "mean_abs": 0.0, "k3_kl": 0.0, "is_ratio_max": 1.0}
    measured = {"tokens": tokens, "mismatches": mismatches, "is_ratio_median": 1.0}
    return evidence.rl_step(number, measured | (off if mismatches else exact), 0.25)


@pytest.mark.parametrize(
    ("aligned", "stock", "verdict"),
    [
        ([step(1)], [step(1, 60)], "EQUAL"),
        ([step(1, 1)], [step(1, 60)], "DIFFERENT"),
        ([step(1)], [step(1)], "NOT_OBSERVED"),
        ([step(1)], [step(1, 60, max_abs=0.0)], "NOT_OBSERVED"),
        ([step(1)], [step(1, 1, tokens=1)], "NOT_OBSERVED"),
        ([step(1)], [], "NOT_OBSERVED"),
        ([], [step(1, 60)], "NOT_OBSERVED"),
    ],
)
def test_every_rl_step_counts(run, aligned, stock, verdict):
    rl = evidence.rl(aligned, stock, "samebits rl qwen3-tiny")
    assert run(rl=rl).verdict == verdict


def test_a_statement_without_limits_is_refused(run):
    with pytest.raises(Refused, match="SB0801"):
        run(limits=[])


def test_every_statement_says_that_it_is_not_signed(run):
    *given, last = run(limits=["one CPU model"]).predicate["limits"]
    assert given == ["one CPU model"] and "no signature" in last


def test_numbers_carry_their_bits():
    assert evidence.number(0.1) == {
        "decimal": "0.1",
        "bits": "3fb999999999999a",
        "dtype": "float64",
    }
