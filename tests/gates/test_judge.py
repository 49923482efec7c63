"""From the streams of finished stages to a verdict."""

import dataclasses

import numpy as np
import pytest

from samebits.errors import Refused
from samebits.evidence import pairs, required
from samebits.evidence.verdict import judge
from samebits.gates import fired, page, prove, rl, sizes
from samebits.gates.run import Stage
from samebits.gates.streams import Stream

CASES = ("qwen3-tiny", "smollm2-135m", "qwen3.5-tiny")


@pytest.fixture(params=CASES)
def finished(request, run_of, stages_of):
    run = run_of(request.param)
    return run, stages_of(run.recipe)


def _state(run, done, quick=True):
    return prove.state(run, done, quick=quick, started="2025-01-01T00:00:00+00:00")


def _replace(done, stage, **streams):
    old = done[stage]
    return done | {stage: dataclasses.replace(old, streams={**old.streams, **streams})}


def _first(stream, steps):
    columns = stream.columns()
    keep = columns["sequence"] < (steps + 1) * rl.STRIDE
    return Stream({name: column[keep] for name, column in columns.items()})


def _with_nan(stream):
    """The same stream, all of it NaN."""
    columns = stream.columns()
    return Stream({**columns, "bits": np.full_like(columns["bits"], 0x7FC00000)})


def test_equal_streams_with_diverging_controls_are_equal(finished):
    run, done = finished
    if run.recipe.rl:  # as many steps as a quick run has
        size = sizes.Size.quick()
        for arm, steps in (("aligned", size.rl_steps), ("stock", size.stock_rl_steps)):
            stage = done[f"rl_{arm}"]
            stage.facts["steps"][steps:] = []
            cut = {name: _first(stream, steps) for name, stream in stage.streams.items()}
            done = _replace(done, f"rl_{arm}", **cut)
    statement = _state(run, done)
    assert judge(statement.predicate).reasons == ()
    assert statement.verdict == "EQUAL"
    assert {r["leg"] for r in statement.predicate["comparisons"]} == {*run.recipe.legs} - {"O"}
    switches = statement.predicate["parameters"]["switches"]
    assert switches["distinct_prompt_seed_pairs"] == "16"
    assert switches["logprobs_mode"] == "raw_logprobs"


def test_a_full_run_must_compare_as_many_tokens_as_the_recipe_asks_for(finished):
    run, done = finished
    statement = _state(run, done, quick=False)
    assert statement.verdict == "NOT_OBSERVED"
    assert any("tokens of the" in reason for reason in judge(statement.predicate).reasons)


def test_one_flipped_bit_is_different_and_located(finished, make):
    run, done = finished
    done = _replace(done, "trainer", packed=make.stream(flip=(3, 11)))
    statement = _state(run, done)
    assert statement.verdict == "DIFFERENT"
    (record,) = [
        r for r in statement.predicate["comparisons"] if r["name"] == "trainer-packed/prefill"
    ]
    assert record["mismatches"] == 1
    first = record["first_difference"]
    assert (first["sequence"], first["position"]) == (3, 11)
    assert first["token"] == make.sequences[3][11]
    assert int(first["left"], 16) ^ int(first["right"], 16) == 1
    assert "DIFFERENT; mismatches per leg: " in page.sentence(statement, "")


@pytest.mark.parametrize("leg", ["A", "B", "C"])
def test_a_silent_control_is_not_observed(finished, make, leg):
    run, done = finished
    base = 10_000
    streams = {
        "A": ("stock_rollout", {"alone": make.stream(base=base, seed=3)}),
        "B": ("stock_rollout", {"decode": make.stream(10, base=base, seed=3)}),
        "C": ("stock_trainer", {"padded": make.stream(base=base, seed=3)}),
    }[leg]
    statement = _state(run, _replace(done, streams[0], **streams[1]))
    assert statement.verdict == "NOT_OBSERVED"
    assert any(f"leg {leg}" in r and "diverge" in r for r in judge(statement.predicate).reasons)


@pytest.mark.parametrize("leg", ["A", "B", "C", "E", "F"])
def test_a_control_of_nan_is_not_observed(run_of, stages_of, leg):
    run = run_of("smollm2-135m")
    done = stages_of(run.recipe)
    stage, name = {
        "A": ("stock_rollout", "alone"),
        "B": ("stock_rollout", "decode"),
        "C": ("stock_trainer", "padded"),
        "E": ("rl_stock", "rollout"),
        "F": ("stock_trainer", "padded"),
    }[leg]
    done = _replace(done, stage, **{name: _with_nan(done[stage].streams[name])})
    if leg == "E":
        for step in done["rl_stock"].facts["steps"]:
            nan = ("max_abs", "mean_abs", "k3_kl", "is_ratio_max", "is_ratio_median")
            step.update(dict.fromkeys(nan, float("nan")), mismatches=step["tokens"])
    statement = _state(run, done, quick=False)
    reasons = judge(statement.predicate).reasons
    wanted = "did not diverge" if leg == "F" else "not finite"
    assert any(f"leg {leg}" in r and wanted in r for r in reasons)
    assert leg != "E" or any(r.startswith("RL: stock step 1 holds") for r in reasons)


@pytest.mark.parametrize("leg", ["C", "F"])
def test_the_same_nan_on_both_sides_is_different(run_of, stages_of, leg):
    run = run_of("smollm2-135m")
    done = stages_of(run.recipe)
    for stage, name in (("trainer", "padded"), ("rollout_plain", "batch")):
        done = _replace(done, stage, **{name: _with_nan(done[stage].streams[name])})
    statement = _state(run, done)
    assert statement.verdict == "DIFFERENT"
    assert any(r["mismatches"] for r in statement.predicate["comparisons"] if r["leg"] == leg)


def test_a_planted_fault_stands_in_for_a_silent_stock_arm(finished, make):
    run, done = finished
    base = 10_000
    done = _replace(done, "stock_rollout", alone=make.stream(base=base, seed=3))
    planted = {"batch": make.stream(base=base, seed=7), "alone": make.stream(base=base, seed=8)}
    done |= {"planted_rollout": Stage(planted, {})}
    record = _state(run, done).predicate["comparisons"][0]
    assert record["leg"] == "A" and record["control"]["name"] == "k_cut_by_rows"
    assert record["control"]["kind"] == "planted" and record["control"]["mismatches"] > 0


@pytest.mark.parametrize(
    ("counter", "hazard"),
    [("split_mid_prompt", "split_mid_prompt"), ("resumed", "preempted")],
)
def test_a_hazard_that_never_fired_is_not_observed(finished, counter, hazard):
    run, done = finished
    done["rollout_stress"].facts["hazards"][counter] = 0
    statement = _state(run, done)
    assert statement.verdict == "NOT_OBSERVED"
    assert f"leg B: hazard {hazard} never fired" in judge(statement.predicate).reasons


@pytest.mark.parametrize(
    ("hazards", "call", "size", "pair", "hazard"),
    [
        ("alone_hazards", "score", "1", "prefill-alone/prefill-batch", "batch_1"),
        ("batch_hazards", "score", "16", "prefill-alone/prefill-batch", "batch_16"),
        ("alone_hazards", "generate", "1", "decode-alone/decode-mixed", "batch_1"),
        ("batch_hazards", "generate", "16", "decode-batch/decode-mixed", "batch_16"),
    ],
)
def test_batches_count_for_the_comparison_that_they_made(
    finished, hazards, call, size, pair, hazard
):
    run, done = finished
    before = {r["name"]: r["hazards"] for r in _state(run, done).predicate["comparisons"]}
    done["rollout_plain"].facts[hazards]["batch_sizes_of"][call][size] = 0
    after = {r["name"]: r["hazards"] for r in _state(run, done).predicate["comparisons"]}
    assert before[pair][hazard] > 0
    changed = {(name, h) for name in after for h in after[name] if after[name] != before[name]}
    assert after[pair][hazard] == 0 and {name for name, _ in changed} == {pair}


def test_ranks_are_those_that_computed(run_of, stages_of):
    run = run_of("qwen3-tiny")
    done = stages_of(run.recipe)
    done["trainer_tp2"].facts["info"]["ranks"] = 3
    statement = _state(run, done)
    reasons = judge(statement.predicate).reasons
    assert "leg D: hazard trainer_tp2 never fired" in reasons
    assert "leg D: trainer tp2 was not compared with rollout tp2" in reasons
    assert "leg D: trainer tp3 with rollout tp1 is no layout of the recipe" in reasons


@pytest.mark.parametrize("columns", [0, 49151])
def test_a_digest_of_fewer_columns_covers_no_whole_row(run_of, stages_of, columns):
    run = run_of("smollm2-135m")
    done = stages_of(run.recipe)
    done["trainer"].facts["info"]["digest_columns"] = columns
    reasons = judge(_state(run, done).predicate).reasons
    assert "leg F: hazard whole_row never fired" in reasons


@pytest.mark.parametrize("case", CASES)
def test_a_run_compares_and_says_what_verify_demands(case, run_of, stages_of):
    run = run_of(case)
    statement = _state(run, stages_of(run.recipe), quick=False)
    predicate = statement.predicate
    names: dict[str, set[str]] = {}
    for record in [*predicate["comparisons"], *predicate["oracle"]]:
        names.setdefault(record["leg"], set()).add(record["name"])
        assert record["command"] == f"samebits prove {case} --record"
    assert names == {leg: set(pairs.of(leg, predicate)) for leg in run.recipe.legs}
    assert list(required._problems(predicate, run.recipe)) == []


@pytest.fixture
def hybrid(run_of, stages_of):
    run = run_of("qwen3.5-tiny")
    return run, stages_of(run.recipe)


@pytest.mark.parametrize(
    ("stage", "hazard"),
    [
        *(("rollout_stress", name) for name in fired.ALIKE),
        ("rollout_paged", "prefix_hit"),
        ("rollout_paged", "resumed_from_state"),
        ("rollout_slices", "one_token_slice"),
    ],
)
def test_each_hazard_of_states_is_counted_where_it_happens(hybrid, stage, hazard):
    run, done = hybrid
    assert hazard in run.recipe.legs["B"].hazards
    facts = done[stage].facts
    facts["hazards"] |= {hazard: 0, "prefix_hit_requests": 0}
    facts["one_token_slices"] = 0
    reasons = judge(_state(run, done).predicate).reasons
    assert f"leg B: hazard {hazard} never fired" in reasons


@pytest.mark.parametrize(
    ("stage", "pairs"),
    [
        ("rollout_paged", {"decode-paged/prefill", "decode-sliced/decode-paged"}),
        ("rollout_slices", {"decode-one-token-slices/prefill"}),
    ],
)
def test_every_way_to_cut_a_prompt_is_compared(hybrid, make, stage, pairs):
    run, done = hybrid
    only = range(3) if stage == "rollout_slices" else None
    statement = _state(run, _replace(done, stage, decode=make.stream(10, only=only, flip=(2, 12))))
    assert statement.verdict == "DIFFERENT"
    found = {r["name"] for r in statement.predicate["comparisons"] if r["mismatches"]}
    assert found == pairs


def test_the_other_schedule_is_a_control_that_must_diverge(hybrid, make):
    run, done = hybrid
    records = {r["name"]: r for r in _state(run, done).predicate["comparisons"]}
    control = records["trainer-packed/prefill"]["control"]
    assert control["name"] == "other_gdn_schedule" and control["mismatches"] > 0
    same = done["rollout_plain"].streams["extra"]
    reasons = judge(_state(run, _replace(done, "planted_schedule", padded=same)).predicate).reasons
    assert any("other_gdn_schedule did not diverge" in reason for reason in reasons)


def test_leg_o_plants_the_fault_that_its_recipe_names(hybrid, run_of, stages_of):
    dense = run_of("smollm2-135m")
    for run, done, name in (
        (*hybrid, "gdn_decay_doubled"),
        (dense, stages_of(dense.recipe), "rope_base_doubled"),
    ):
        (record,) = _state(run, done).predicate["oracle"]
        assert record["control"]["name"] == name


def test_two_seeds_of_one_prompt_must_give_two_texts(finished, make):
    run, done = finished
    make.sequences[7] = make.sequences[6]
    assert any("two_seeds" in r for r in judge(_state(run, done).predicate).reasons)


def test_other_tokens_at_one_position_are_refused(finished, make):
    run, done = finished
    make.sequences[5] = [t + 1 for t in make.sequences[5]]
    with pytest.raises(Refused, match="SB0901"):
        _state(run, _replace(done, "trainer", padded=make.stream()))


def test_a_stale_prefix_cache_is_not_observed(run_of, stages_of):
    run = run_of("smollm2-135m")
    done = stages_of(run.recipe)
    for step in done["rl_aligned"].facts["steps"]:
        step["cache_invalidated"] = False
    reasons = judge(_state(run, done, quick=False).predicate).reasons
    assert "leg E: hazard prefix_cache_invalidated never fired" in reasons


def test_an_aligned_arm_further_from_the_oracle_than_stock_is_different(run_of, stages_of, make):
    run = run_of("smollm2-135m")
    done = stages_of(run.recipe)
    done = _replace(done, "rollout_plain", extra=make.stream(base=10_000, seed=40))
    statement = _state(run, done)
    assert statement.verdict == "DIFFERENT"
    assert any("leg O" in reason for reason in judge(statement.predicate).reasons)
