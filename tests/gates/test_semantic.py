"""Semantic gates, and agreement of the two sides, refuse before a number is compared."""

import pytest

from samebits import faults, runtime
from samebits import recipe as recipes
from samebits.contract import Contract
from samebits.errors import NotObserved, Refused
from samebits.gates import agreement, semantic

GOOD = {
    "logprobs_mode": "raw_logprobs",
    "tokenizer": False,
    "vocabulary": 1024,
    "refused": dict.fromkeys(semantic.OUTSIDE, "SB0509"),
}


@pytest.fixture(scope="module")
def recipe():
    return recipes.load("qwen3-tiny")


def test_an_engine_that_keeps_the_rules_passes(recipe):
    semantic.check(GOOD, recipe)
    shown = semantic.switches(GOOD, 18)
    assert shown["distinct_prompt_seed_pairs"] == "18" and "top_p" in shown["sampling_refused"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"logprobs_mode": "processed_logprobs"}, "SB0505"),
        ({"tokenizer": True}, "SB0901"),
        ({"vocabulary": 1088}, "SB0914"),
        ({"refused": GOOD["refused"] | {"top_p": None}}, "SB0912"),
        ({"refused": GOOD["refused"] | {"top_k": "SB0512"}}, "SB0912"),
        ({"refused": {}}, "SB0912"),
    ],
)
def test_an_engine_that_breaks_one_is_refused(recipe, change, error):
    with pytest.raises(Refused, match=error):
        semantic.check(GOOD | change, recipe)


@pytest.fixture(scope="module")
def contract(recipe):
    return Contract.load(recipe.contract_path)


def test_another_contract_on_either_side_is_refused(contract):
    agreement.contracts(contract, {"the rollout": contract.digest, "the trainer": contract.digest})
    with pytest.raises(Refused, match="SB0312") as error:
        agreement.contracts(contract, {"the rollout": contract.digest, "the trainer": "0" * 64})
    assert "the trainer" in error.value.seen


def test_other_probe_answers_are_refused():
    binding = {"status": "known", "platform": "p", "description": {}, "answers": {"rope": "1"}}
    agreement.answers(binding, {"rope": "1"})
    for answers in ({"rope": "2"}, {}):
        with pytest.raises(Refused, match="SB0320"):
            agreement.answers(binding, answers)


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_a_bound_region_that_never_ran_is_not_observed(contract, side):
    counts = dict.fromkeys(contract.regions, 5)
    agreement.served(contract, counts, counts, ("trainer_score",))
    idle = {"rollout": counts, "trainer": counts} | {side: counts | {"rope": 0}}
    with pytest.raises(NotObserved, match="SB0313") as error:
        agreement.served(contract, idle["rollout"], idle["trainer"], ("trainer_score",))
    assert error.value.seen == "never served: rope"


def test_an_unknown_fault_is_refused(monkeypatch):
    monkeypatch.setenv("SAMEBITS_FAULT", "k_cut_by_row")
    with pytest.raises(Refused, match="SB0902") as error:
        faults.install()
    assert "k_cut_by_rows" in error.value.required


def test_no_fault_changes_nothing(monkeypatch):
    from samebits.ops import gemm

    monkeypatch.delenv("SAMEBITS_FAULT", raising=False)
    before = gemm.linear
    faults.install()
    assert gemm.linear is before and runtime.fault() is None


def test_planted_faults_change_bits(monkeypatch):
    import torch

    from samebits import bits
    from samebits.ops import gemm, rotary

    monkeypatch.setattr(gemm, "linear", gemm.linear)
    monkeypatch.setattr(rotary, "table", rotary.table)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 512, generator=draw).bfloat16()
    w = torch.randn(64, 512, generator=draw).bfloat16()
    right, angles = gemm.linear(x, w), rotary.table(8, 16, 10000.0)
    monkeypatch.setenv("SAMEBITS_FAULT", "k_cut_by_rows")
    faults.install()
    assert not bits.equal(gemm.linear(x, w), right)
    assert bits.equal(gemm.linear(x[:1], w), right[:1])  # a row alone is computed as before
    monkeypatch.setenv("SAMEBITS_FAULT", "rope_base_doubled")
    faults.install()
    assert not bits.equal(rotary.table(8, 16, 10000.0), angles)


def test_faults_of_gated_delta_nets_change_bits(monkeypatch):
    import torch

    from samebits import bits
    from samebits.ops import gdn, gdn_gate

    monkeypatch.setattr(gdn, "varlen", gdn.varlen)
    monkeypatch.setattr(gdn_gate, "gate", gdn_gate.gate)
    draw = torch.Generator().manual_seed(0)

    def of(*shape):
        return torch.randn(*shape, generator=draw).bfloat16()

    tokens, heads, size = 70, 2, 16
    gates = of(tokens, heads), of(tokens, heads), torch.zeros(heads), of(heads)
    g, beta = gdn_gate.gate(*gates)
    q, k, v = (0.2 * of(tokens, heads, size) for _ in range(3))
    operands = q, k, v, g, beta, torch.tensor([0, tokens]), size**-0.5
    right = {schedule: gdn.varlen(*operands, schedule) for schedule in gdn.SCHEDULES}
    monkeypatch.setenv("SAMEBITS_FAULT", "other_gdn_schedule")
    faults.install()
    for schedule, other in (gdn.SCHEDULES, gdn.SCHEDULES[::-1]):
        assert bits.equal(gdn.varlen(*operands, schedule), right[other])
        assert not bits.equal(right[schedule], right[other])
    monkeypatch.setenv("SAMEBITS_FAULT", "gdn_decay_doubled")
    faults.install()
    faster, same = gdn_gate.gate(*gates)
    assert bits.equal(faster, 2 * g) and bits.equal(same, beta)


def test_a_fault_of_ranks_is_planted_elsewhere(monkeypatch):
    from samebits.ops import gemm

    before = gemm.linear
    monkeypatch.setenv("SAMEBITS_FAULT", "rank_order_sum")
    faults.install()
    assert gemm.linear is before
