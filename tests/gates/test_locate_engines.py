"""A planted fault is followed to its element on real engines, and both patterns are recomputed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from locate_support import DENSE, HYBRID, RL, arms_of, call, open_run, pattern, plant, row, weight

from samebits.engines.rollout import RolloutEngine
from samebits.errors import Different
from samebits.gates import locate, rl
from samebits.gates.locate import pairs, refit
from samebits.gates.locate.pairs import Located
from samebits.ops import gdn, gemm, rms_norm, rotary
from samebits.plan import ReductionPlan
from samebits.trace.columns import widened

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return open_run(tmp_path_factory.mktemp("dense"), "qwen3-tiny", DENSE)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return open_run(tmp_path_factory.mktemp("hybrid"), "qwen3.5-tiny", HYBRID)


def _equal(arms, *names: str) -> None:
    for name in names:
        left, right = name.split("/")
        assert pairs.pair(arms, left, right) == Located(left, right, None, None), name


def _at_fault(located: Located) -> tuple[int, int]:
    """The element; what the region was given agrees, so the fault is in the region."""
    assert located.region is not None and located.first is not None, located.note
    operands = located.region.operands
    assert operands and all(" left, " not in operands[n] for n in operands if n != "angles")
    assert located.region.element[0] < located.first.position
    return located.region.element


@pytest.mark.slow  # a minute: four engines
def test_a_fault_of_the_batch_is_found_in_the_rows_of_a_sequence(dense, monkeypatch):
    plant(monkeypatch, rollout="norm_rounded_by_rows")
    arms = arms_of(dense)
    weights = weight(dense, "model.layers.0.input_layernorm.weight")
    for other in ("decode-mixed", "decode-batch"):
        located = pairs.pair(arms, "decode", other)
        position, column = _at_fault(located)
        assert (located.region.layer, located.region.region) == (0, "norm.rms")
        assert position >= 80  # alone, the prompt has many rows too
        x = row(call(arms["decode"], None, "embedding"), position)
        right = rms_norm.rms_norm(x, weights, 1e-6)
        assert located.region.left == pattern(right, column)
        early = rms_norm.rms_norm(x, torch.ones_like(weights), 1e-6)
        assert located.region.right == pattern(early * weights, column)
    _equal(arms, "prefill/prefill-batch")


def test_a_fault_on_one_side_is_found_in_its_region(dense, monkeypatch):
    plant(monkeypatch, trainer="rope_base_doubled")
    arms = arms_of(dense)
    _equal(arms, "decode/prefill")
    for layout in ("padded", "packed"):
        located = pairs.pair(arms, layout, "prefill")
        position, column = _at_fault(located)
        assert (located.region.layer, located.region.region) == (0, "rope")
        assert " left, " in located.region.operands["angles"]
        normed = row(call(arms["prefill"], 0, "norm.rms", 1), position)  # after norm and q norm
        base = float(dense.recipe.config["rope_theta"])
        expected = [
            rotary.apply(
                normed.view(1, 4, 32), torch.tensor([position]), rotary.table(512, 32, base * times)
            ).view(1, -1)
            for times in (2, 1)
        ]
        shown = [pattern(values, column) for values in expected]
        assert [located.region.left, located.region.right] == shown


@pytest.mark.slow  # minutes: engines of two ranks on two cores
def test_a_sum_in_rank_order_is_found_in_the_product_over_ranks(dense, monkeypatch):
    arms = arms_of(dense)
    _equal(arms, "prefill-tp2/prefill", "padded-tp2/prefill", "padded-tp2/prefill-tp2")
    plant(monkeypatch, trainer="rank_order_sum")
    arms = arms_of(dense)
    located = pairs.pair(arms, "padded-tp2", "prefill")
    position, column = _at_fault(located)
    assert (located.region.layer, located.region.region) == (0, "gemm.row")
    x = row(call(arms["prefill"], 0, "attention"), position)
    w = weight(dense, "model.layers.0.self_attn.o_proj.weight")
    ranks = zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)
    first, second = (gemm.linear(a.contiguous(), b.contiguous()) for a, b in ranks)
    assert located.region.left == pattern(first + second, column)
    right = gemm.row_parallel(x, w, ReductionPlan(2))
    assert located.region.right == pattern(right, column)


def test_recurrent_layers_meet_call_by_call(hybrid):
    arms = arms_of(hybrid)
    assert max(arms["decode"].calls[0].positions) == 84  # every token that was fed in
    _equal(arms, "decode/prefill", "padded/prefill", "packed/prefill", "decode/padded")
    regions = {c.region for c in arms["decode"].calls}
    assert regions >= {"gdn.conv", "gdn.l2_norm", "gdn.gate", "gdn.core", "norm.gated"}
    assert regions >= {"norm.rms_zero_centred", "attention", "attention.gate", "rope"}


@pytest.mark.slow  # minutes: six engines
def test_recurrent_layers_meet_over_ranks_and_batches(hybrid):
    arms = arms_of(hybrid)
    _equal(arms, "padded-tp2/prefill", "prefill-tp2/prefill", "prefill/prefill-batch")
    _equal(arms, "decode/decode-mixed", "decode-paged/decode", "decode-one-token/decode")


def test_another_schedule_is_found_in_the_recurrent_core(hybrid, monkeypatch):
    plant(monkeypatch, trainer="other_gdn_schedule")
    arms = arms_of(hybrid)
    located = pairs.pair(arms, "padded", "prefill")
    position, column = _at_fault(located)
    assert (located.region.layer, located.region.region) == (0, "gdn.core")
    prefill = arms["prefill"]
    q, k = _rows(call(prefill, 0, "gdn.l2_norm")).unflatten(-1, (4, 128)).bfloat16().chunk(2, 1)
    v = _rows(call(prefill, 0, "gdn.conv"))[:, 512:].unflatten(-1, (4, 128)).bfloat16()
    g, beta = _rows(call(prefill, 0, "gdn.gate")).chunk(2, 1)
    starts = torch.tensor([0, len(q)])
    shown = [
        pattern(
            gdn.varlen(q, k, v, g, beta, starts, 128**-0.5, schedule)[position].view(1, -1), column
        )
        for schedule in ("cpr", "chunk_row")
    ]
    assert [located.region.left, located.region.right] == shown


def _rows(found) -> torch.Tensor:
    """Output of a call for all positions in order, in fp32, which holds every bf16."""
    assert found.positions.tolist() == [*range(len(found.positions))]
    (wide, _) = widened([found.output, np.zeros(0, np.uint32)])
    return torch.from_numpy(wide.copy()).view(torch.float32)


@pytest.mark.slow  # a minute: two RL runs
def test_a_difference_after_refits_is_found_at_the_weights_of_its_step(dense, monkeypatch):
    plant(monkeypatch, trainer="norm_rounded_early")
    stage = rl.run_rl(dense, steps=2, arithmetic="aligned")
    first = rl.as_counts(stage).first
    assert first is not None and first.sequence // rl.STRIDE == 2
    (report,) = locate.one_sequence(dense, first.sequence, pairs.REFITS)
    assert (report.step, report.sequence, report.position) == (2, first.sequence, first.position)
    assert (report.left.bits, report.right.bits) == (first.left, first.right)
    assert (report.layer, report.region) == (0, "norm.rms")
    assert report.element_left.bits != report.element_right.bits
    assert all(" left, " not in digest for digest in report.operands.values())
    monkeypatch.undo()
    before = arms_of(dense)["padded"]
    digest = f"{int(call(before, 0, 'norm.rms').operands['weight'][0]):016x}"
    assert report.operands["weight"] != digest  # not those that the run began with


@pytest.mark.slow  # two minutes: two RL runs
def test_a_cache_that_no_reset_empties_is_told_by_the_run_and_by_the_trace(dense, monkeypatch):
    plant(monkeypatch, rollout="prefix_cache_not_reset")
    with pytest.raises(Different, match="SB0906") as seen:
        rl.run_rl(dense, steps=2, arithmetic="aligned")
    assert "after a refit that dropped 0 blocks" in seen.value.seen
    with pytest.raises(Different, match="SB0906") as seen:
        locate.one_sequence(dense, 2 * rl.STRIDE, pairs.REFITS)
    assert "right after a reset" in seen.value.seen


@pytest.mark.slow  # a minute: one RL run
def test_a_cache_that_a_sync_keeps_is_not_hidden_by_the_trace(dense, monkeypatch):
    """The trace needs an empty cache, with which the sequence agrees; that of the run was not."""
    right = RolloutEngine.sync_weights

    def sync_weights(self, manifest):
        with monkeypatch.context() as patch:
            patch.setattr(self, "reset_prefix_cache", lambda: 0, raising=False)
            return right(self, manifest)

    monkeypatch.setattr(RolloutEngine, "sync_weights", sync_weights)
    # With larger steps every token gets probability 1, from old weights as from new ones.
    slower = dense.recipe.data | {"rl": RL | {"learning_rate": "3e-4"}}
    monkeypatch.setattr(dense, "recipe", replace(dense.recipe, data=slower))
    (report,) = locate.one_sequence(dense, 2 * rl.STRIDE, pairs.REFITS)
    assert report.note == refit.STALE and report.left.bits != report.right.bits
