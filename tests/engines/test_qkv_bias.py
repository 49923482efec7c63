"""Qwen2: the bias of queries, keys and values, from a checkpoint through both engines and back."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rollout_support import mismatches, whole
from trainer_support import (
    QWEN2,
    make_case,
    mean_nll,
    reference_gradients,
    reference_logprobs,
    sequences,
    start,
    train_batch,
)
from trainer_support import mismatches as differing

from samebits import bits, runtime
from samebits.contract import Contract
from samebits.engines.rollout import Request, RolloutEngine, RolloutSettings
from samebits.engines.trainer import OptimizerSettings
from samebits.engines.trainer_model import Architecture
from samebits.engines.trainer_slots import _attention
from samebits.ops.registry import BIASED
from samebits.weights import sources
from samebits.weights.checksums import tensor_checksum
from samebits.weights.transport import receive, send

BIASES = [f"{part}_proj.bias" for part in "qkv"]


def architecture(heads: int, kv_heads: int) -> Architecture:
    return Architecture(
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        layers=1,
        hidden=heads * 2,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=2,
        ffn=4,
        vocab=4,
        max_positions=8,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied=False,
        qk_norm=False,
        qkv_bias=True,
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (12, 4), (4, 4)])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_bias_lies_as_the_rows_of_its_weight(heads, kv_heads, tp):
    """Every published row carries its number, in the weight and in the bias alike."""
    arch, rows = architecture(heads, kv_heads), (heads + 2 * kv_heads) * 2
    for rank in range(tp):
        fused = SimpleNamespace(
            weight=torch.zeros(rows // tp, arch.hidden), bias=torch.zeros(rows // tp)
        )
        module = SimpleNamespace(
            linear_qkv=fused,
            linear_proj=SimpleNamespace(weight=torch.zeros(arch.hidden, arch.hidden // tp)),
        )
        first, numbers, places = 0, {}, {}
        for slot in _attention(arch, module, "", tp, torch.Tensor.detach):
            places[slot.name] = slot
        for part, count in zip("qkv", (heads, kv_heads, kv_heads), strict=True):
            bias = torch.arange(first, first + 2 * count).float()
            numbers[f"self_attn.{part}_proj.bias"] = bias
            numbers[f"self_attn.{part}_proj.weight"] = bias[:, None].expand(-1, arch.hidden)
            first += 2 * count
        for name, published in numbers.items():
            slot = places[name]
            assert slot.shape == tuple(published.shape)
            slot.view.copy_(slot.share(published, rank, tp))
            assert torch.equal(slot.local(tp), published.chunk(tp)[rank])
        assert torch.equal(fused.weight, fused.bias[:, None].expand_as(fused.weight))
        assert len(fused.bias.unique()) == rows // tp


def test_a_model_without_one_has_no_such_tensor():
    arch = dataclasses.replace(architecture(4, 2), qkv_bias=False)
    module = SimpleNamespace(
        linear_qkv=SimpleNamespace(weight=torch.zeros(16, 8), bias=None),
        linear_proj=SimpleNamespace(weight=torch.zeros(8, 8)),
    )
    names = [slot.name for slot in _attention(arch, module, "", 1, torch.Tensor.detach)]
    assert [name for name in names if name.endswith("bias")] == []


# --- engines --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("qwen2"), "qwen2", QWEN2)


def trained(case, tp: int) -> SimpleNamespace:
    """Scores before and after a step of a trainer of `tp` ranks, its gradients and weights."""
    tokens, found = sequences(), SimpleNamespace()
    with start(case, tp=tp, optimizer=OptimizerSettings(lr=1e-3, clip=0.0)) as running:
        found.before = running.score(tokens, "packed", digests=True)
        found.padded = running.score(tokens, "padded", digests=True)
        found.first = running.train_step(train_batch(tokens), mean_nll, "padded")
        found.gradients = running.gradients()
        found.after = running.score(tokens)
        found.served = running.info()["served"]
        with running.export() as manifest:
            names = [entry.name for entry in manifest.entries]
            digest = Contract.load(case[1]).digest
            found.weights = dict(receive(manifest, contract_digest=digest, names=names, step=1))
    return found


@pytest.fixture(scope="module")
def one_rank(case):
    return trained(case, 1)


@pytest.fixture(scope="module")
def two_ranks(case):
    return trained(case, 2)


@pytest.mark.engine
def test_the_trainer_gives_the_same_bits_in_any_layout(case, one_rank, two_ranks):
    assert differing(one_rank.before.logprobs, one_rank.padded.logprobs) == 0
    assert differing(one_rank.before.logprobs, two_ranks.before.logprobs) == 0
    assert one_rank.before.digests == two_ranks.before.digests == two_ranks.padded.digests
    Contract.load(case[1]).check_served(two_ranks.served, ["trainer_score", "trainer_train"])
    assert set(two_ranks.served) == set(BIASED)


@pytest.mark.engine
def test_the_trainer_is_near_a_float64_reference(case, one_rank):
    with torch.no_grad():
        reference, _ = reference_logprobs(case[0], sequences())
    pairs = zip(one_rank.before.logprobs, reference, strict=True)
    error = torch.cat([(a - b).abs() for a, b in pairs])
    assert torch.cat(reference).std() > 0.3 and error.mean() < 0.02 and error.max() < 0.2


@pytest.mark.engine
@pytest.mark.parametrize("run", ["one_rank", "two_ranks"])
def test_gradients_of_biases_are_near_a_float64_reference(run, request, case):
    found = request.getfixturevalue(run)
    reference = reference_gradients(case[0], sequences())
    assert set(found.gradients) == set(reference)
    for name, exact in reference.items():
        error = float((found.gradients[name] - exact).norm())
        # A bias of keys moves all scores of a query alike: its exact gradient is nothing but what
        # rotary positions leave of it.
        assert error < 0.05 * max(float(exact.norm()), 1e-4), name
    norm = sum(float(g.norm()) ** 2 for g in reference.values()) ** 0.5
    assert found.first.grad_norm == pytest.approx(norm, rel=0.01)
    loaded = dict(sources.open_model(case[0]))
    moved = [name for name in loaded if not bits.equal(found.weights[name], loaded[name])]
    assert {name for name in loaded if name.endswith(".bias")} <= set(moved)


def rollout(case, **changes) -> RolloutEngine:
    settings = RolloutSettings(model=case[0], contract=case[1], series="qwen3-tiny")
    sizes = {"max_num_batched_tokens": 23, "max_num_seqs": 8, "kv_blocks": 16, "max_model_len": 160}
    return RolloutEngine(dataclasses.replace(settings, **sizes | changes))


@pytest.mark.engine
def test_the_rollout_gives_the_trainers_bits_on_two_ranks_and_after_a_refit(case, one_rank):
    asked = [Request(tokens, 12, i, ignore_eos=True) for i, tokens in enumerate(sequences()[1:])]
    with rollout(case, tensor_parallel_size=2) as engine:
        wanted = {name: tensor_checksum(tensor) for name, tensor in sources.open_model(case[0])}
        live = engine.weight_checksums()
        assert {n: bits.hex_digest(v) for n, v in live.items()} == {
            n: bits.hex_digest(v) for n, v in wanted.items()
        }
        assert len([name for name in live if name.endswith(tuple(BIASES))]) == 6
        done = engine.generate(asked)
        sequence = whole(asked, done)
        assert mismatches(asked, done, engine.score(sequence)) == 0
        assert set(engine.served()) == set(BIASED)
        scored = engine.score(sequences()[1:])
        digest = Contract.load(case[1]).digest
        weights = one_rank.weights.items()
        with send(weights, step=1, contract_digest=digest) as manifest:
            outcome = engine.sync_weights(manifest)
            assert outcome["checksums"] == manifest.checksums()
        again = engine.score(sequences()[1:])
    for scores, theirs in ((scored, one_rank.before), (again, one_rank.after)):
        for ours, trainer in zip(scores, theirs.logprobs[1:], strict=True):
            assert np.array_equal(ours.logprob_bits, trainer.numpy().view(np.uint32))


@pytest.mark.engine
@pytest.mark.parametrize("region", ["gemm.bias", "gemm.column"])
def test_both_engines_align_products_with_a_bias_by_themselves(case, region):
    arithmetic = runtime.only([region])
    with start(case, arithmetic=arithmetic) as trainer:
        trainer.score(sequences(), "padded")
        assert set(trainer.info()["served"]) == {region}
    with rollout(case, arithmetic=arithmetic) as engine:
        engine.score(sequences()[1:])
        assert set(engine.served()) == {region}


@pytest.mark.engine
def test_what_nobody_proved_of_the_class_is_refused(case):
    settings = RolloutSettings(model=case[0], contract=case[1], series="qwen3-tiny")
    script = Path(__file__).with_name("rollout_settings.py")
    done = subprocess.run(
        [sys.executable, str(script), str(case[0]), "qwen2"],
        env=settings.environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    wanted = dict.fromkeys(found, "SB0501") | {"plain": None, "two ranks": None}
    assert found == wanted | {"another class": "SB0311"}
