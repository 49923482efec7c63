"""Gated delta nets in the real Megatron GPTModel: layouts, ranks, training, weights, control."""

from __future__ import annotations

import pytest
import torch
from trainer_support import (
    HYBRID,
    make_recurrent,
    mean_nll,
    mismatches,
    reference_gradients,
    reference_logprobs,
    sequences,
    start,
    train_batch,
)

from samebits import bits
from samebits.contract import Contract
from samebits.engines.trainer import OptimizerSettings
from samebits.errors import Refused
from samebits.weights import sources
from samebits.weights.transport import receive

pytestmark = pytest.mark.engine
SERIES = "qwen3.5-tiny"
ADAM = OptimizerSettings(lr=1e-3, clip=0.0)
A_LOG = "model.layers.0.linear_attn.A_log"
# One before, on and one after a boundary of 64, and a third chunk.
LENGTHS = (1, 2, 40, 63, 64, 65, 130)


def make_hybrid(folder, schedule):
    return make_recurrent(folder, HYBRID, schedule)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return make_hybrid(tmp_path_factory.mktemp("hybrid"), "chunk_row")


@pytest.fixture(scope="module")
def trainer(hybrid):
    with start(hybrid, SERIES, optimizer=ADAM) as running:
        yield running


def run_steps(running, case):
    """Scores, a padded step, scores, a packed step, and all weights; then the weights as before."""
    tokens = sequences(LENGTHS)
    batch = train_batch(tokens)
    running.reset_served()
    found = {"before": running.score(tokens, "packed", digests=True)}
    found["served"] = running.info()["served"]
    found["first"] = running.train_step(batch, mean_nll, "padded")
    found["gradients"] = running.gradients()
    found["after"] = {layout: running.score(tokens, layout) for layout in ("padded", "packed")}
    found["second"] = running.train_step(batch, mean_nll, "packed")
    found["weights"] = exported(running, case, step=2)
    running.load(case[0])
    return found


def exported(running, case, step):
    with running.export() as manifest:
        names = [entry.name for entry in manifest.entries]
        digest = Contract.load(case[1]).digest
        return dict(receive(manifest, contract_digest=digest, names=names, step=step))


@pytest.fixture(scope="module")
def one_rank(trainer, hybrid):
    return run_steps(trainer, hybrid)


@pytest.fixture(scope="module")
def two_ranks(hybrid):
    with start(hybrid, SERIES, optimizer=ADAM, tp=2) as running:
        yield run_steps(running, hybrid)


def check_layouts(running):
    """Padded, packed, packed in reverse and one by one; gives the padded scores."""
    tokens = sequences(LENGTHS)
    padded = running.score(tokens, "padded", digests=True)
    packed = running.score(tokens, "packed", digests=True)
    backwards = running.score(tokens[::-1], "packed")
    assert mismatches(padded.logprobs, packed.logprobs) == 0
    assert mismatches(padded.logprobs, backwards.logprobs[::-1]) == 0
    assert padded.digests == packed.digests
    for sequence, together in zip(tokens, padded.logprobs, strict=True):
        assert mismatches(running.score([sequence]).logprobs, [together]) == 0
    return padded


def test_layouts_give_the_same_bits(trainer):
    check_layouts(trainer)


def test_scores_are_near_a_float64_reference(one_rank, hybrid):
    with torch.no_grad():
        reference, _ = reference_logprobs(hybrid[0], sequences(LENGTHS))
    pairs = zip(one_rank["before"].logprobs, reference, strict=True)
    error = torch.cat([(a - b).abs() for a, b in pairs])
    spread = torch.cat(reference).std()
    assert spread > 0.3
    assert error.mean() < 0.02 * spread.clamp(min=1) and error.max() < 0.2


def test_every_bound_region_is_served(one_rank, hybrid):
    contract = Contract.load(hybrid[1])
    assert "gdn.core" in contract.regions and "norm.rms" not in contract.regions
    contract.check_served(one_rank["served"], ["trainer_score"])


def test_training_forward_equals_score(one_rank):
    before, after = one_rank["before"], one_rank["after"]
    assert mismatches(before.logprobs, one_rank["first"].logprobs) == 0
    assert mismatches(after["padded"].logprobs, after["packed"].logprobs) == 0
    assert mismatches(after["padded"].logprobs, one_rank["second"].logprobs) == 0
    assert mismatches(before.logprobs, after["padded"].logprobs) > 100
    assert one_rank["second"].loss < one_rank["first"].loss


def test_decay_is_trained_in_fp32(one_rank, hybrid):
    """An A_log that passed through bf16 would lose the step; every other weight is bf16."""
    weights, loaded = one_rank["weights"], dict(sources.open_model(hybrid[0]))
    assert {n for n, w in weights.items() if w.dtype != torch.bfloat16} == {A_LOG}
    assert set(weights) == set(loaded)
    trained = weights[A_LOG]
    assert trained.dtype == torch.float32
    assert not bits.equal(trained, trained.bfloat16().float())
    moved = (trained - loaded[A_LOG].float()).abs()
    assert (moved > 0).all() and (moved < 0.01).all()


def test_export_returns_the_loaded_bits(trainer, one_rank, hybrid):
    """At two ranks the views of q, k, v in one weight are cut by heads, which `share` undoes."""
    weights = exported(trainer, hybrid, step=2)
    for name, loaded in sources.open_model(hybrid[0]):
        assert bits.equal(weights[name], loaded.to(weights[name].dtype)), name


def test_tensor_parallel_equals_one_rank(one_rank, two_ranks):
    assert mismatches(one_rank["before"].logprobs, two_ranks["before"].logprobs) == 0
    assert one_rank["before"].digests == two_ranks["before"].digests
    after = two_ranks["after"]
    assert mismatches(after["padded"].logprobs, after["packed"].logprobs) == 0
    assert mismatches(after["padded"].logprobs, two_ranks["second"].logprobs) == 0


@pytest.mark.parametrize("run", ["one_rank", "two_ranks"])
def test_gradients_are_near_a_float64_reference(run, request, hybrid):
    found = request.getfixturevalue(run)
    reference = reference_gradients(hybrid[0], sequences(LENGTHS))
    assert set(found["gradients"]) == set(reference)
    errors = {n: float((found["gradients"][n] - g).norm() / g.norm()) for n, g in reference.items()}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < 0.05, (worst, errors[worst])
    norm = sum(float(g.norm()) ** 2 for g in reference.values()) ** 0.5
    assert found["first"].grad_norm == pytest.approx(norm, rel=0.01)


def test_the_other_schedule_has_its_own_bits(one_rank, tmp_path):
    case = make_hybrid(tmp_path, "cpr")
    with start(case, SERIES) as running:
        scores = check_layouts(running)
    assert mismatches(scores.logprobs, one_rank["before"].logprobs) > 100


def test_stock_modules_differ_and_take_no_packed_batch(hybrid, one_rank):
    tokens = sequences(LENGTHS)
    with start(hybrid, SERIES, arithmetic="stock") as running:
        stock = running.score(tokens, "padded")
        assert running.info()["served"] == {}
        with pytest.raises(Refused) as caught:
            running.score(tokens, "packed")
    assert caught.value.error_id == "SB0611"
    assert mismatches(one_rank["before"].logprobs, stock.logprobs) > 100
    error = torch.cat(stock.logprobs) - torch.cat(one_rank["before"].logprobs)
    assert error.abs().mean() < 0.1  # other bits of the same model
