"""Every planted fault turns a gate red, in the legs it breaks, and is followed to its region.

A fault of a weight sync has no region: it is followed to the cached tokens, or to the tensor.
"""

from __future__ import annotations

import re

import pytest

from samebits.engines.rollout import RolloutSettings
from samebits.gates import stages
from samebits.gates.run import Stage

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# fault in the trainer -> legs with a mismatch, region of the first difference
IN_TRAINER = {
    "norm_rounded_early": ("CF", "norm.rms"),
    "rope_base_doubled": ("CF", "rope"),
    "scale_rounded": ("CF", "attention"),
    "logits_rounded": ("CF", "gemm.lm_head"),
    "temperature_of_one_side": ("C", "logprob"),
}
NO_SLICES = {
    "hazards": {"prefix_hit_requests": 0, "resumed_from_state": 0},
    "one_token_slices": 0,
}


@pytest.mark.parametrize("fault", IN_TRAINER)
def test_a_fault_in_the_trainer(dense, faulty, fault):
    legs, region = IN_TRAINER[fault]
    case = faulty(*dense)
    case.plant(trainer=fault)
    whole = case.done["rollout_stress"].facts["sequences"]
    case.done["trainer"] = stages.trainer_score(case.run, whole, layouts=("padded", "packed"))
    code, shown = case.command("prove", "CASE", "--quick")
    assert code == 1, shown
    assert case.legs() == set(legs)
    first = [r for r in case.reports() if r["leg"] == "C"]
    assert first[0]["region"] == region and first[1]["region"] is None
    assert "leg C, trainer-padded/prefill" in first[1]["note"]  # comes first, or is the same
    assert f"region    {region}" in shown and "DIFFERENT" in shown
    if region != "logprob":
        assert first[0]["element_left"]["bits"] != first[0]["element_right"]["bits"]
        assert " left, " not in first[0]["operands"]["input"]  # what it was given agrees


def test_the_command_that_a_report_names_repeats_it(dense, faulty):
    case = faulty(*dense)
    case.plant(trainer="norm_rounded_early")
    code, shown = case.command("prove", "CASE", "--quick", "--locate", "3")
    assert code == 1, shown
    assert "leg locate, padded/prefill" in shown and "region    norm.rms" in shown
    assert "decode/prefill\n" not in shown  # the other engine agrees with itself


def test_a_fault_that_depends_on_the_batch(dense, faulty, monkeypatch):
    environment = RolloutSettings.environment
    # An engine in its server's process has all requests before its first step: the search for the
    # region meets the batches of the run again, whatever else the machine does.
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    monkeypatch.setattr(
        RolloutSettings, "environment", lambda self: environment(self) | one_process
    )
    case = faulty(*dense)
    case.plant(rollout="k_cut_by_rows")
    run, whole = case.run, case.done["rollout_stress"].facts["sequences"]
    own = case.done["stock_rollout"].facts["sequences"]
    case.done["rollout_plain"] = stages.rollout_plain(run, case.requests, whole, own, 2)
    code, shown = case.command("prove", "CASE", "--quick")
    assert code == 1, shown
    assert case.legs() >= {"A", "B", "C", "F"}
    found = {r["leg"]: r for r in reversed(case.reports())}
    first = found["C"]
    if first["region"] is None:  # what leg A saw before it
        assert first["note"].startswith("same first difference as leg A"), first["note"]
        first = found["A"]
    assert first["region"] == "gemm.column" and first["layer"] == 0, shown


def test_a_sum_in_rank_order(ranks, faulty):
    case = faulty(*ranks)
    case.plant(trainer="rank_order_sum")
    whole = case.done["rollout_stress"].facts["sequences"]
    case.done["trainer_tp2"] = stages.trainer_score(case.run, whole, tp=2)
    code, shown = case.command("prove", "CASE", "--quick")
    assert code == 1, shown
    assert case.legs() == {"D"}
    named = [r["comparison"] for r in case.reports()]
    assert named == ["trainer-tp2/rollout-tp1", "trainer-tp2/rollout-tp2"]
    one, two = case.reports()
    assert one["region"] == "gemm.row" and "same first difference as leg D" in two["note"]


def test_a_chunk_that_starts_where_a_slice_starts(hybrid, faulty):
    case = faulty(*hybrid)
    case.plant(rollout="chunks_from_slices")
    run, done = case.run, case.done
    done["rollout_stress"] = stages.rollout_stress(run, case.requests)
    whole = done["rollout_stress"].facts["sequences"]
    done["rollout_plain"] = stages.rollout_plain(run, case.requests, whole, whole[:1], 2)
    # The other arms stand for engines without the fault: they have the bits of one prefill.
    plain = done["rollout_plain"].streams
    decoded = Stage({"decode": plain["decode_batch"]}, {**NO_SLICES})
    done["rollout_paged"] = done["rollout_slices"] = decoded
    done["trainer"] = Stage({"padded": plain["batch"], "packed": plain["batch"]}, {})
    control = {"batch": plain["extra"], "alone": plain["extra"], "decode": plain["extra"]}
    done["stock_rollout"] = Stage(control, {})
    done["stock_trainer"] = Stage({"padded": plain["extra"]}, {})
    case.keep()
    # Here the fault is large enough for another token to be sampled, a mismatch of two decodes too.
    code, shown = case.command("prove", "CASE", "--quick")
    assert code == 1, shown
    assert "B    decode-sliced/decode-paged" in shown
    found = re.search(r"sequence (\d+), position (\d+)", shown)
    assert found is not None, shown
    assert int(found[2]) > 65 - 15  # behind the first slice, at most fifteen decodes beside it
    pair = ("--pair", "decode-sliced/prefill")
    code, shown = case.command("prove", "CASE", "--quick", "--locate", found[1], *pair)
    assert code == 1, shown
    assert "region    gdn.core" in shown


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("stale_prefix_cache", "cached blocks after a reset that dropped"),
        ("prefix_cache_not_reset", "cached tokens after a refit that dropped 0 blocks"),
    ],
)
def test_a_prefix_cache_that_outlives_its_weights(dense, faulty, fault, seen):
    case = faulty(*dense)
    case.plant(rollout=fault)
    code, shown = case.command("rl", "CASE", "--steps", "2")
    assert code == 1, shown
    assert "SB0906" in shown and seen in shown


def test_a_tensor_that_a_sync_left_out(dense, faulty):
    case = faulty(*dense)
    case.plant(rollout="unsynced_tensor")
    code, shown = case.command("rl", "CASE", "--steps", "2")
    assert code == 2, shown
    assert "SB0705" in shown and "`model.norm.weight`" in shown


def test_a_tensor_that_is_sent_as_it_was_before_the_step(dense, faulty):
    case = faulty(*dense)
    case.plant(trainer="stale_export")
    code, shown = case.command("rl", "CASE", "--steps", "3")
    assert code == 2, shown
    assert "SB0710" in shown and "norm.weight`" in shown
