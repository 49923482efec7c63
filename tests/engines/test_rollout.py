"""vLLM's real V1 engine on the CPU: decode against prefill, seeds, ranks, weight sync, controls."""

from __future__ import annotations

import dataclasses
import os
import random
import signal

import numpy as np
import pytest
from rollout_support import mismatches, whole
from trainer_support import QWEN3, VOCAB, make_case

from samebits import bits, segments
from samebits.contract import Contract
from samebits.engines.rollout import Request, RolloutEngine, RolloutSettings
from samebits.errors import Refused
from samebits.ops.registry import DENSE
from samebits.weights import sources
from samebits.weights.transport import send

pytestmark = pytest.mark.engine

BLOCK = 16
# A step budget that splits prompts anywhere, and too few pages for all requests at once.
STRESS = {"max_num_batched_tokens": 23, "max_num_seqs": 8, "kv_blocks": 14, "max_model_len": 160}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("rollout"), "qwen3", QWEN3)


def start(case, **changes) -> RolloutEngine:
    model, contract = case
    settings = RolloutSettings(model=model, contract=contract, series="qwen3-tiny")
    return RolloutEngine(dataclasses.replace(settings, **STRESS | changes))


def requests() -> list[Request]:
    """Prompts that share prefixes, one of one token, one of a block exactly, twins of two seeds."""
    source = random.Random(7)
    base = [source.randrange(VOCAB) for _ in range(64)]

    def fresh(count: int) -> list[int]:
        return [source.randrange(VOCAB) for _ in range(count)]

    prompts = [
        [5],
        fresh(BLOCK),
        base + fresh(5),
        base + fresh(30),
        fresh(33),
        base[:32] + fresh(20),
        base + fresh(41),
        fresh(7),
    ]
    chosen = [Request(p, 24, seed, ignore_eos=True) for seed, p in enumerate(prompts)]
    return [*chosen, dataclasses.replace(chosen[4], seed=99)]


@pytest.fixture(scope="module")
def stress(case):
    """The stressed aligned engine, with what one run of all requests gave."""
    with start(case) as engine:
        engine.asked = requests()
        engine.row_digests(True)
        engine.done = engine.generate(engine.asked)
        engine.rows = engine.row_digests(False)
        engine.fired = engine.stats(reset=True)
        engine.count = engine.served()
        yield engine


@pytest.fixture(scope="module")
def calm(case):
    """Everything in one step, nothing cached: what the stressed engine must equal."""
    roomy = {"max_num_batched_tokens": 1024, "max_num_seqs": 16, "kv_blocks": 128}
    with start(case, **roomy, prefix_caching=False) as engine:
        yield engine


def test_decode_equals_prefill(stress, calm):
    sequences = whole(stress.asked, stress.done)
    for scores in (calm.score(sequences), stress.score(sequences)):
        assert mismatches(stress.asked, stress.done, scores) == 0
    alone = [calm.score([tokens])[0] for tokens in sequences[:3]]
    assert mismatches(stress.asked[:3], stress.done[:3], alone) == 0


def test_a_prompt_of_many_slices_beside_others_in_one_has_the_same_bits(stress, case):
    roomy = {"max_num_batched_tokens": 1024, "max_num_seqs": 16, "kv_blocks": 128}
    with start(case, **roomy, prefix_caching=False, slice_tokens=40) as engine:
        scores = engine.score(whole(stress.asked, stress.done))
        fired = engine.stats()
    assert mismatches(stress.asked, stress.done, scores) == 0
    longer = sum(len(r.prompt) + 24 > 40 for r in stress.asked)
    assert 0 < longer < len(stress.asked) and fired["split_mid_prompt"] >= longer


def test_every_hazard_fired(stress):
    names = (
        "split_mid_prompt split_mid_block mixed_steps prefix_hit_tokens preempted resumed "
        "one_token_prompts exact_block_prompts"
    )
    assert all(stress.fired[name] > 0 for name in names.split()), stress.fired
    assert stress.fired["prefix_hit_tokens"] == sum(c.cached_tokens for c in stress.done)
    assert stress.fired["requests"] == len(stress.asked)


def test_every_bound_region_is_served(stress, case):
    assert set(stress.count) == set(DENSE)
    Contract.load(case[1]).check_served(stress.count, ("engine_decode", "engine_prefill"))
    assert stress.contract_digest() == Contract.load(case[1]).digest
    assert stress.binding()["status"] == "known"


def test_one_seed_one_text(stress, calm):
    again = calm.generate(stress.asked)
    assert [c.tokens for c in again] == [c.tokens for c in stress.done]
    assert again[4].tokens != again[-1].tokens  # one prompt, two seeds
    alone = calm.generate([stress.asked[3]])[0]
    assert alone.tokens == again[3].tokens


def test_whole_rows_agree_between_decode_and_prefill(stress, calm):
    calm.row_digests(True)
    scores = calm.score(whole(stress.asked, stress.done))
    prefill = calm.row_digests(False)
    compared = 0
    for asked, done, score in zip(stress.asked, stress.done, scores, strict=True):
        decode = stress.rows[done.request_id]
        assert sorted(decode) == list(range(len(asked.prompt), len(asked.prompt) + 24))
        for index, digest in decode.items():
            assert prefill[score.request_id][index] == digest
            compared += 1
    assert compared == 24 * len(stress.asked)


def test_two_ranks_equal_one(case, stress):
    with start(case, tensor_parallel_size=2) as engine:
        done = engine.generate(stress.asked)
        assert [c.tokens for c in done] == [c.tokens for c in stress.done]
        for left, right in zip(done, stress.done, strict=True):
            assert np.array_equal(left.logprob_bits, right.logprob_bits)
        assert engine.weight_checksums() == stress.weight_checksums()


def test_a_killed_engine_leaves_no_shared_memory(case):
    with start(case, tensor_parallel_size=2) as engine:
        owner = f"{segments.ROLLOUT}-{os.getuid()}-{engine._process.pid}-*"
        assert list(segments.SHARED_MEMORY.glob(owner))  # the ranks talk through it
        os.killpg(engine._process.pid, signal.SIGKILL)
        engine.close()
    assert not list(segments.SHARED_MEMORY.glob(owner))


def test_stock_differs(case, stress):
    with start(case, arithmetic="stock") as engine:
        done = engine.generate(stress.asked)
        assert mismatches(stress.asked, done, engine.score(whole(stress.asked, done))) > 0
        assert engine.served() == {}


def _changed(folder, factor: float):
    for name, tensor in sources.open_model(folder):
        yield name, tensor * factor if name.endswith("0.mlp.up_proj.weight") else tensor


def test_sync_changes_the_weights_and_drops_the_cache(case, stress):
    folder, digest = case[0], stress.contract_digest()
    repeated = [dataclasses.replace(stress.asked[3], max_tokens=4)]
    first = stress.generate(repeated)[0]
    cached = stress.generate(repeated)[0]
    assert cached.cached_tokens >= BLOCK and cached.tokens == first.tokens
    with send(_changed(folder, 1.5), step=1, contract_digest=digest) as manifest:
        outcome = stress.sync_weights(manifest)
    assert outcome["dropped_blocks"] > 0 and outcome["tensors"] == len(manifest.entries)
    assert outcome["checksums"] == manifest.checksums()
    after = stress.generate(repeated)[0]
    assert after.cached_tokens == 0
    assert not np.array_equal(after.logprob_bits, first.logprob_bits)
    with send(sources.open_model(folder), step=2, contract_digest=digest) as manifest:
        stress.sync_weights(manifest)
    back = stress.generate(repeated)[0]
    assert np.array_equal(back.logprob_bits, first.logprob_bits)


def _corrupt(manifest):
    with open(manifest.segment, "r+b") as file:
        file.seek(manifest.entries[3].offset)
        byte = file.read(1)
        file.seek(manifest.entries[3].offset)
        file.write(bytes([byte[0] ^ 1]))
    return manifest


@pytest.mark.parametrize(
    ("spoil", "error_id"),
    [
        (_corrupt, "SB0705"),
        (lambda m: dataclasses.replace(m, contract_digest="0" * 64), "SB0706"),
        (lambda m: dataclasses.replace(m, entries=m.entries[1:]), "SB0707"),
        (lambda m: dataclasses.replace(m, segment=m.segment + "-gone"), "SB0708"),
    ],
)
def test_a_bad_transfer_is_refused_and_leaves_the_weights(case, stress, spoil, error_id):
    before = stress.weight_checksums()
    tensors = _changed(case[0], 2.0)
    with (
        send(tensors, step=3, contract_digest=stress.contract_digest()) as manifest,
        pytest.raises(Refused) as refusal,
    ):
        stress.sync_weights(spoil(manifest))
    assert refusal.value.error_id == error_id
    assert stress.weight_checksums() == before


def test_live_checksums_are_those_of_the_source(case, stress):
    from samebits.weights.checksums import tensor_checksum

    wanted = {name: tensor_checksum(tensor) for name, tensor in sources.open_model(case[0])}
    live = stress.weight_checksums()
    assert {n: bits.hex_digest(v) for n, v in live.items()} == {
        n: bits.hex_digest(v) for n, v in wanted.items()
    }


def test_a_dead_engine_is_reported(case, tmp_path):
    broken = tmp_path / "contract.json"
    broken.write_bytes(case[1].read_bytes().replace(b'"schema_version":1', b'"schema_version":9'))
    with pytest.raises(Refused) as refusal:
        start((case[0], broken))
    assert refusal.value.error_id.startswith("SB03")
