import math

import numpy as np
import pytest

from samebits import evidence
from samebits.errors import Refused
from samebits.evidence import pairs
from samebits.evidence.verdict import streams_digest

INTENT = {name: "1" for name in ("kind", "machine", "isa", "torch", "numpy", "numba", "llvmlite")}
ONE = evidence.number(1.0)
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
        ({"control": evidence.control("stock", 100, 90, math.nan)}, "stock holds numbers that are"),
        ({"control": evidence.control("stock", 100, 90, math.inf)}, "stock holds numbers that are"),
        ({"control": evidence.control("stock", 100, 31, 0.5)}, "diverge in 32 tokens, but in 31"),
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


def test_a_leg_that_did_not_run_is_not_observed(run, recipe, make_rows):
    rows = [r for r in make_rows(recipe) if r["leg"] in "AB"]
    statement = run(comparisons=rows)
    assert statement.verdict == "NOT_OBSERVED"
    assert "leg C did not run" in evidence.judge(statement.predicate).reasons


def test_layouts_of_one_leg_add_up_and_one_control_may_serve(run, recipe, make_rows):
    rows = make_rows(recipe, "D", tokens=200)
    assert sum(record["control"] is not None for record in rows if record["leg"] == "D") == 1
    assert run(comparisons=rows).verdict == "EQUAL"


def test_every_comparison_of_a_leg_must_be_there(run, recipe, make_row, make_rows):
    rows = make_rows(recipe, "C", tokens=recipe.legs["C"].tokens)
    for record in rows:
        if record["leg"] == "D":
            continue
        label = f"leg {record['leg']}: {record['name']} was not compared"
        statement = run(comparisons=[r for r in rows if r is not record])
        assert statement.verdict == "NOT_OBSERVED"
        reasons = evidence.judge(statement.predicate).reasons
        assert label in reasons or f"leg {record['leg']} did not run" in reasons
    other = make_row("C", "trainer-packed/prefill", recipe) | {"name": "trainer-other/prefill"}
    statement = run(comparisons=[*rows, other])
    assert statement.verdict == "NOT_OBSERVED"
    assert evidence.judge(statement.predicate).reasons == (
        "leg C: trainer-other/prefill is no comparison of this case",
    )


def test_leg_b_of_a_model_with_states_has_pairs_of_its_own():
    predicate = {"sources": [{"name": "implementation/gdn.core.cpu.1"}]}
    assert len(pairs.of("B", predicate)) == 4
    assert pairs.of("B", {"sources": []}) == ("decode/prefill",)


def test_a_stock_arm_that_is_not_finite_is_no_yardstick(run):
    record = evidence.oracle(
        "prefill/fp32-hugging-face",
        "no further",
        tokens=50,
        aligned=(0.9, 2.0),
        stock=(math.inf, math.inf),
        control=("rope_base_doubled", 50, 1.5),
        command="samebits prove qwen3-tiny",
    )
    assert run(oracles=[record]).verdict == "NOT_OBSERVED"


@pytest.mark.parametrize("gone", [-1, -2, -3, -4])
def test_every_claimed_layout_must_be_compared(run, recipe, make_rows, gone):
    rows = make_rows(recipe)
    row = rows.pop(gone)
    layouts, without = row["layouts"], {"leg D: no negative control"} if row["control"] else set()
    statement = run(comparisons=rows)
    assert statement.verdict == "NOT_OBSERVED"
    assert {*evidence.judge(statement.predicate).reasons} == without | {
        f"leg D: trainer {layouts['left']} was not compared with rollout {layouts['right']}",
    }


def test_a_layout_that_the_recipe_does_not_claim_is_not_observed(run, recipe, make_row, make_rows):
    rows = [
        *make_rows(recipe),
        make_row("D", "trainer-tp4/rollout-tp1", recipe, layouts=("tp4", "tp1")),
    ]
    assert run(comparisons=rows).verdict == "NOT_OBSERVED"


@pytest.mark.parametrize(
    "setting", [("SAMEBITS_FAULT", "k_cut_by_rows"), ("fault", "rank_order_sum")]
)
@pytest.mark.parametrize("where", ["switches", "intent"])
def test_a_setting_that_plants_a_fault_is_not_observed(run, setting, where):
    given = INTENT if where == "intent" else {}
    assert run(**{where: given | dict([setting])}).verdict == "NOT_OBSERVED"
    assert run(**{where: given | {"compile": "default"}}).verdict == "EQUAL"


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
        (0.9, math.inf, "NOT_OBSERVED"),
        (0.9, None, "NOT_OBSERVED"),
    ],
)
def test_the_oracle_may_not_be_further_away_than_from_stock(run, aligned, control, verdict):
    record = evidence.oracle(
        "prefill/fp32-hugging-face",
        "the aligned arm is no further from fp32 than stock",
        tokens=50,
        aligned=(aligned, 2.0 if math.isfinite(aligned) else aligned),
        stock=(1.0, 2.0),
        control=("rope_base_doubled", 50, control) if isinstance(control, float) else control,
        command="samebits prove qwen3-tiny --leg O",
    )
    assert run(oracles=[record]).verdict == verdict


def step(number: int, mismatches: int = 0, max_abs: float = 1e-3, tokens: int = 64) -> dict:
    """An RL step whose differing tokens are all `max_abs` higher in the trainer."""
    d = np.zeros(tokens)
    d[:mismatches] = max_abs
    if not np.isfinite(max_abs):
        names = ("max_abs", "mean_abs", "k3_kl", "is_ratio_max", "is_ratio_median")
        measured = {"tokens": tokens, "mismatches": mismatches} | dict.fromkeys(names, max_abs)
        return evidence.rl_step(number, measured, 0.25)
    measured = {
        "tokens": tokens,
        "mismatches": mismatches,
        "max_abs": d.max(),
        "mean_abs": d.mean(),
        "k3_kl": (np.exp(d) - 1.0 - d).mean(),
        "is_ratio_max": np.exp(d).max(),
        "is_ratio_median": np.median(np.exp(d)),
    }
    return evidence.rl_step(number, measured, 0.25)


@pytest.mark.parametrize(
    ("aligned", "stock", "verdict"),
    [
        ([step(1)], [step(1, 60)], "EQUAL"),
        ([step(1, 1)], [step(1, 60)], "DIFFERENT"),
        ([step(1)], [step(1)], "NOT_OBSERVED"),
        ([step(1)], [step(1, 60, max_abs=0.0)], "NOT_OBSERVED"),
        ([step(1)], [step(1, 60, max_abs=math.nan)], "NOT_OBSERVED"),
        ([step(1)], [step(1, 60), step(2, 60, max_abs=math.nan)], "NOT_OBSERVED"),
        ([step(1)], [step(1, 60, max_abs=math.inf)], "NOT_OBSERVED"),
        ([step(1, 60, max_abs=math.nan)], [step(1, 60)], "DIFFERENT"),
        ([step(1)], [step(1, 31)], "NOT_OBSERVED"),
        ([step(1)], [step(1, 16), step(2, 16)], "EQUAL"),
        (
            [step(1)],
            [step(1, 33) | dict.fromkeys(("is_ratio_max", "is_ratio_median"), ONE)],
            "NOT_OBSERVED",
        ),
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
