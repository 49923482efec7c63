"""What each planted fault changes, without an engine, and that no recorded run can carry one."""

from __future__ import annotations

import pytest
import torch

from samebits import bits, faults
from samebits import recipe as recipes
from samebits.engines.rollout import RolloutSettings
from samebits.engines.trainer_process import _environment
from samebits.evidence import verdict
from samebits.gates import sizes, stages, workload
from samebits.ops import attention, gdn, gemm, logprob, rms_norm
from samebits.plan import ReductionPlan

WRAPPED = {
    "norm_rounded_early": ((rms_norm, "rms_norm"),),
    "norm_rounded_by_rows": ((rms_norm, "rms_norm"),),
    "k_cut_by_rows": ((gemm, "linear"),),
    "scale_rounded": ((attention, "paged"), (attention, "varlen")),
    "logits_rounded": ((gemm, "lm_head"),),
    "temperature_of_one_side": ((logprob, "log_softmax"), (logprob, "selected")),
    "chunks_from_slices": ((gdn, "advance"),),
}


@pytest.fixture
def plant(monkeypatch):
    """name -> plant that fault; what it wraps is taken back after the test."""

    def of(name: str) -> None:
        for module, function in WRAPPED[name]:
            monkeypatch.setattr(module, function, getattr(module, function))
        monkeypatch.setenv("SAMEBITS_FAULT", name)
        faults.install()

    return of


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    return of


def test_a_norm_that_rounds_early(plant, draw):
    x, weight = draw(8, 64), draw(64)
    right, plain = (rms_norm.rms_norm(x, w, 1e-6) for w in (weight, torch.ones(64).bfloat16()))
    centred = rms_norm.rms_norm(x, weight, 1e-6, zero_centred=True)
    plant("norm_rounded_early")
    wrong = rms_norm.rms_norm(x, weight, 1e-6)
    assert 0 < bits.compare(wrong, right).mismatches < right.numel()
    assert bits.equal(wrong, (plain.float() * weight.float()).bfloat16())
    assert not bits.equal(rms_norm.rms_norm(x, weight, 1e-6, zero_centred=True), centred)


def test_a_norm_that_rounds_early_where_it_has_rows(plant, draw):
    x, weight = draw(8, 64), draw(64)
    right = rms_norm.rms_norm(x, weight, 1e-6)
    plant("norm_rounded_by_rows")
    alone = torch.cat([rms_norm.rms_norm(row[None], weight, 1e-6) for row in x])
    assert bits.equal(alone, right)
    assert bits.compare(rms_norm.rms_norm(x, weight, 1e-6), right).mismatches > 0


def test_a_product_is_cut_in_full_steps_of_a_control_only(plant, draw):
    x, w = draw(stages._CONTROL_BUDGET, 512), draw(256, 512)
    right = gemm.linear(x, w)
    plant("k_cut_by_rows")
    moved = (gemm.linear(x, w) != right).any(1)
    assert moved.all()
    assert bits.equal(gemm.linear(x[:-1].contiguous(), w), right[:-1])


@pytest.mark.parametrize("case", ["qwen3-tiny", "qwen2-tiny", "qwen3.5-tiny"])
def test_the_cut_tells_a_sequence_alone_from_one_in_the_batch_of_a_control(case):
    """Rows alone: whole steps of the budget, then the end. In the batch every step but one is
    full, and the first may hold one request where the others come late."""
    recipe, budget = recipes.load(case), stages._CONTROL_BUDGET
    size = sizes.Size.of(recipe, quick=True, record=False)
    asked = (size.control_requests, size.control_response, size.control_prompt)
    controls = workload.control(recipe, None, *asked)  # no prompts of its own, so no tokenizer
    lengths = [len(r.prompt) + r.max_tokens for r in controls]
    alone = [n % budget for n in lengths[: stages._DECODED]]
    assert faults._WHOLE_ROWS["cpu"] < budget
    assert sum(alone[1:]) - (budget - 1) >= verdict.CONTROL_TOKENS


def test_a_scale_that_was_rounded(plant, draw):
    q, k, v, starts = draw(9, 2, 32), draw(9, 1, 32), draw(9, 1, 32), torch.tensor([0, 9])
    scale = 32**-0.5
    rounded = float(torch.tensor(scale).bfloat16())
    assert rounded != scale
    right = attention.varlen(q, k, v, starts, rounded)
    plant("scale_rounded")
    assert bits.equal(attention.varlen(q, k, v, starts, scale), right)


def test_logits_that_were_rounded(plant, draw):
    x, w = draw(3, 64), draw(128, 64)
    right = gemm.lm_head(x, w)
    plant("logits_rounded")
    wrong = gemm.lm_head(x, w)
    assert wrong.dtype == torch.float32
    assert not bits.equal(wrong, right) and bits.equal(wrong, right.bfloat16().float())


def test_a_temperature_on_one_side(plant, draw):
    logits, targets, plan = draw(4, 64).float(), torch.tensor([0, 5, 9, 63]), ReductionPlan(2)
    rows = logprob.row_digest(logits)
    right = logprob.log_softmax(logits / 1.25, plan)
    plant("temperature_of_one_side")
    assert bits.equal(logprob.log_softmax(logits, plan), right)
    chosen = right.gather(1, targets[:, None])[:, 0]
    assert bits.equal(logprob.selected(logits, targets, plan), chosen)
    assert logprob.row_digest(logits) == rows  # the logits themselves are right


def _states(tokens: int):
    return [
        torch.zeros(2, *shape, dtype=dtype)
        for _, shape, dtype in gdn.state_spec("cpr", 1, 1, 16, 16)
    ]


def _core(operands, cuts) -> torch.Tensor:
    """The rows of one sequence in slot 1, computed in slices that end at `cuts`."""
    state, out, start = _states(cuts[-1]), [], 0
    for stop in cuts:
        q, k, v, g, beta = (x[start:stop] for x in operands)
        tables = torch.tensor([1]), torch.tensor([0, stop - start]), torch.tensor([start])
        out.append(gdn.advance(q, k, v, g, beta, state, *tables, 0.25, "cpr"))
        start = stop
    return torch.cat(out)


def test_a_chunk_that_starts_with_a_slice(plant, draw):
    tokens = 150
    q, k, v = (0.3 * draw(tokens, 1, 16) for _ in range(3))
    g = -draw(tokens, 1).float().abs()
    operands = (q, k, v, g, draw(tokens, 1).float().sigmoid())
    right = _core(operands, [tokens])
    assert bits.equal(_core(operands, [40, tokens]), right)
    plant("chunks_from_slices")
    assert bits.equal(_core(operands, [tokens]), right)  # chunks are where they belong
    assert bits.equal(_core(operands, [64, tokens]), right)
    one_by_one = [*range(70, tokens + 1)]
    assert bits.equal(_core(operands, one_by_one), right)  # decoding moves nothing
    wrong = _core(operands, [40, tokens])
    assert not bits.equal(wrong, right)
    assert bits.equal(wrong[:40], right[:40])


@pytest.mark.parametrize("name", [*faults.PLANTED, *faults.ELSEWHERE])
def test_no_recorded_run_can_carry_a_fault(name, monkeypatch, tmp_path):
    monkeypatch.setattr("samebits.patching.tree_path", lambda *_: tmp_path)
    monkeypatch.setenv("SAMEBITS_FAULT", name)
    plain = RolloutSettings(model=tmp_path, contract=tmp_path / "c.json", series="x")
    assert "SAMEBITS_FAULT" not in plain.environment()
    assert "SAMEBITS_FAULT" not in _environment((), None, "aligned", None, None)
    predicate = {"parameters": {"switches": {"x": name}}, "environment": {"intent": {}}}
    assert name in verdict.FAULTS
    assert list(verdict._judge_settings(predicate)) == [
        f"setting x={name} speaks of a planted fault"
    ]
