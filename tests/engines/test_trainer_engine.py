"""The real Megatron GPTModel on the CPU: layouts, ranks, training, weights, controls."""

from __future__ import annotations

import sys

import pytest
import torch
from trainer_support import (
    LLAMA,
    QWEN3,
    make_case,
    mean_nll,
    mismatches,
    reference_gradients,
    reference_logprobs,
    sequences,
    start,
    train_batch,
)

from samebits import bits, runtime
from samebits.contract import Contract
from samebits.engines.trainer import OptimizerSettings, Trainer
from samebits.errors import Refused
from samebits.weights import sources
from samebits.weights.transport import receive

pytestmark = pytest.mark.engine
ADAM = OptimizerSettings(lr=1e-3, clip=0.0)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("qwen3"), "qwen3", QWEN3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("llama"), "llama", LLAMA)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def trainer(request):
    """A fresh one-rank trainer of each architecture, shared by the tests that do not step it."""
    case = request.getfixturevalue(request.param)
    with start(case) as running:
        running.case = case
        yield running


def test_layouts_give_the_same_bits(trainer):
    tokens = sequences()
    padded = trainer.score(tokens, "padded", digests=True)
    packed = trainer.score(tokens, "packed", digests=True)
    backwards = trainer.score(tokens[::-1], "packed", digests=True)
    assert len({len(s) for s in tokens}) > 1  # the padded batch holds padding
    assert sum(v.numel() for v in padded.logprobs) == sum(len(s) - 1 for s in tokens)
    assert mismatches(padded.logprobs, packed.logprobs) == 0
    assert mismatches(padded.logprobs, backwards.logprobs[::-1]) == 0
    assert padded.digests == packed.digests == backwards.digests[::-1]
    for sequence, together in zip(tokens, padded.logprobs, strict=True):
        assert mismatches(trainer.score([sequence]).logprobs, [together]) == 0


def test_scores_are_near_a_float64_reference(trainer):
    tokens = sequences()
    scores = trainer.score(tokens)
    with torch.no_grad():
        reference, _ = reference_logprobs(trainer.case[0], tokens)
    error = torch.cat([(a - b).abs() for a, b in zip(scores.logprobs, reference, strict=True)])
    spread = torch.cat(reference).std()
    assert spread > 0.3
    assert error.mean() < 0.02 * spread.clamp(min=1) and error.max() < 0.2


def test_every_bound_region_is_served(trainer):
    trainer.reset_served()
    trainer.score(sequences(), "packed")
    counts = trainer.info()["served"]
    Contract.load(trainer.case[1]).check_served(counts, ["trainer_score"])


def test_a_refusal_keeps_its_id_and_the_trainer(trainer):
    with pytest.raises(Refused) as caught:
        trainer.score([[1, 10**6]])
    assert caught.value.error_id == "SB0608"
    assert trainer.score([[1, 2]]).logprobs[0].numel() == 1


def test_export_returns_the_loaded_bits(trainer):
    folder, contract = trainer.case
    loaded = dict(sources.open_model(folder))
    digest = Contract.load(contract).digest
    with trainer.export() as manifest:
        got = dict(receive(manifest, contract_digest=digest, names=loaded, step=0))
    assert all(bits.equal(got[name], loaded[name]) for name in loaded)


@pytest.fixture(scope="module")
def one_rank(qwen3):
    """Scores and digests of the one-rank trainer, its first gradients and steps."""
    return run_steps(qwen3, tp=1)


def run_steps(case, **options):
    tokens = sequences()
    batch = train_batch(tokens)
    with start(case, optimizer=ADAM, **options) as running:
        before = running.score(tokens, "packed", digests=True)
        first = running.train_step(batch, mean_nll, "padded")
        gradients = running.gradients()
        after = running.score(tokens)
        second = running.train_step(batch, mean_nll, "packed")
        with running.export() as manifest:
            names = [entry.name for entry in manifest.entries]
            digest = Contract.load(case[1]).digest
            weights = dict(receive(manifest, contract_digest=digest, names=names, step=2))
    return {
        "before": before,
        "first": first,
        "gradients": gradients,
        "after": after,
        "second": second,
        "weights": weights,
    }


def test_training_forward_equals_score(one_rank):
    assert mismatches(one_rank["before"].logprobs, one_rank["first"].logprobs) == 0
    assert mismatches(one_rank["after"].logprobs, one_rank["second"].logprobs) == 0
    moved = mismatches(one_rank["before"].logprobs, one_rank["after"].logprobs)
    assert moved > 100  # the step changed the weights, so the second equality is a new one


def test_optimizer_step_lowers_the_loss(one_rank, qwen3):
    assert one_rank["second"].loss < one_rank["first"].loss - 0.1
    loaded = dict(sources.open_model(qwen3[0]))
    unchanged = [n for n, w in one_rank["weights"].items() if bits.equal(w, loaded[n])]
    assert unchanged == []


@pytest.fixture(scope="module")
def two_ranks(qwen3):
    return run_steps(qwen3, tp=2)


def test_tensor_parallel_equals_one_rank(one_rank, two_ranks):
    assert mismatches(one_rank["before"].logprobs, two_ranks["before"].logprobs) == 0
    assert one_rank["before"].digests == two_ranks["before"].digests
    assert mismatches(two_ranks["after"].logprobs, two_ranks["second"].logprobs) == 0


@pytest.mark.parametrize("tp", [1, 2])
def test_an_export_of_older_weights_is_refused(qwen3, tp):
    with start(qwen3, optimizer=ADAM, tp=tp, fault="stale_export") as running:
        with running.export() as manifest:  # the copies are fresh
            assert len(manifest.entries) > 20
        running.train_step(train_batch(sequences()), mean_nll, "padded")
        with (
            pytest.raises(Refused, match=r"SB0710(?s:.*) of 25 tensors, first `") as caught,
            running.export(),
        ):
            pass
        assert caught.value.error_id == "SB0710" and "at step 1" in caught.value.required
        assert running.info()["step"] == 1  # all ranks answer on


def test_native_all_reduce_differs(one_rank, qwen3):
    with start(qwen3, tp=2, fault="rank_order_sum") as running:
        assert running.started["platform_status"] == "planted fault"
        planted = running.score(sequences(), "packed")
    assert mismatches(one_rank["before"].logprobs, planted.logprobs) > 100


@pytest.mark.parametrize("run", ["one_rank", "two_ranks"])
def test_gradients_are_near_a_float64_reference(run, request, qwen3):
    gradients = request.getfixturevalue(run)["gradients"]
    reference = reference_gradients(qwen3[0], sequences())
    assert set(gradients) == set(reference)
    worst = max((float((gradients[n] - g).norm() / g.norm()), n) for n, g in reference.items())
    assert worst[0] < 0.05, worst
    # Megatron's own norm over all ranks: a copied weight counted twice would show here.
    norm = sum(float(g.norm()) ** 2 for g in reference.values()) ** 0.5
    assert request.getfixturevalue(run)["first"].grad_norm == pytest.approx(norm, rel=0.01)


def test_stock_modules_differ_and_take_no_packed_batch(qwen3, one_rank):
    with start(qwen3, arithmetic="stock") as running:
        stock = running.score(sequences(), "padded", digests=True)
        assert running.info()["served"] == {}
        with pytest.raises(Refused) as caught:
            running.score(sequences(), "packed")
    assert caught.value.error_id == "SB0611"
    assert mismatches(one_rank["before"].logprobs, stock.logprobs) > 100
    assert stock.digests != one_rank["before"].digests


def test_bad_weights_and_a_lost_rank_are_reported(qwen3, llama):
    running = start(qwen3, tp=2)
    with pytest.raises(Refused) as caught:
        running.load(llama[0])
    assert caught.value.error_id == "SB0607"
    with pytest.raises(Refused) as caught:
        running.score(sequences())  # not with half of another model
    assert caught.value.error_id == "SB0607"
    running.load(qwen3[0])
    running.score([[1, 2]])
    running._ranks[1][0].kill()
    processes = [process for process, _ in running._ranks]
    with pytest.raises(Refused) as caught:
        running.score(sequences())
    assert caught.value.error_id == "SB0609"
    assert all(process.poll() is not None for process in processes)
    with pytest.raises(Refused) as caught:
        running.score(sequences())
    assert caught.value.error_id == "SB0609"
    running.close()


@pytest.fixture
def in_process(monkeypatch):
    """Build a trainer in this process, where there is no Megatron; gives the refusal's id."""
    monkeypatch.setitem(sys.modules, "megatron", None)

    def refused(model, contract, **options):
        monkeypatch.setenv("SAMEBITS_CONTRACT", str(contract))
        runtime.contract.cache_clear()
        with pytest.raises(Refused) as caught:
            Trainer(model, contract, **options)
        return caught.value.error_id

    yield refused
    runtime.contract.cache_clear()


def test_start_refuses_what_was_not_proved(qwen3, llama, in_process):
    assert in_process(qwen3[0], llama[1]) == "SB0311"
    assert in_process(*llama, tp_size=2) == "SB0316"
    assert in_process(*qwen3, parallel={"pp": 2}) == "SB0604"
    assert in_process(*qwen3) == "SB0610"


@pytest.mark.parametrize("options", [{"optimizer": ADAM}, {"gradients": True}])
def test_timed_passes_have_the_bits_of_a_score_and_move_no_weight(qwen3, options):
    tokens = sequences()[2:]
    with start(qwen3, **options) as running:
        before = running.score(tokens)
        seconds, logprobs = running.time_passes(train_batch(tokens), mean_nll, 2)
        after = running.score(tokens)
        info = running.info()
        if "optimizer" not in options:
            with pytest.raises(Refused, match="SB0613"):
                running.train_step(train_batch(tokens), mean_nll)
    assert len(seconds) == 2 and min(seconds) > 0
    assert mismatches(before.logprobs, logprobs) == 0
    assert mismatches(before.logprobs, after.logprobs) == 0
    assert info["step"] == 0


def test_sgd_moves_a_weight_by_its_gradient_and_keeps_nothing(qwen3):
    settings = OptimizerSettings(lr=1e-1, name="sgd", clip=0.0)
    digest = Contract.load(qwen3[1]).digest
    gradients, found = [], []
    with start(qwen3, optimizer=settings) as running:
        for step in (0, 1, 2):
            if step:
                running.train_step(train_batch(sequences()), mean_nll, "padded")
                gradients.append(running.gradients())
            with running.export() as manifest:
                names = [entry.name for entry in manifest.entries]
                taken = receive(manifest, contract_digest=digest, names=names, step=step)
                found.append({name: tensor.clone() for name, tensor in taken})
    main = {name: tensor.float() for name, tensor in found[0].items()}
    for after, gradient in zip(found[1:], gradients, strict=True):
        for name in main:
            main[name] = torch.add(main[name], gradient[name], alpha=-1e-1)
            assert torch.equal(after[name], main[name].to(after[name].dtype)), name
    assert mismatches(list(found[0].values()), list(found[2].values())) > 100
