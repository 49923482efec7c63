"""vLLM's real V1 engine with Gated DeltaNet layers: slices, pages, ranks, refits, control.

Two engines compute the same requests along paths that share as little as possible. `sliced` has no
prefix cache and a budget that cuts prompts inside chunks; `paged` caches states at block ends.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from rollout_support import mismatches, whole
from trainer_support import HYBRID, VOCAB, make_recurrent

from samebits import bits
from samebits.contract import Contract
from samebits.engines.rollout import Request, RolloutEngine, RolloutSettings
from samebits.ops.registry import regions_of
from samebits.weights import sources
from samebits.weights.checksums import tensor_checksum
from samebits.weights.transport import send

pytestmark = pytest.mark.engine

CHUNK, NEW = 64, 40
BASE = 3  # the request whose prompt others begin with
COMMON = {"max_num_seqs": 8, "max_model_len": 1024, "block_size": CHUNK}
# Without decodes beside it a slice has 65 tokens, with one 64, with two 63; too few pages for all.
SLICED = {"prefix_caching": False, "max_num_batched_tokens": 65, "kv_blocks": 14}
PAGED = {"max_num_batched_tokens": 640, "kv_blocks": 30}
IN_PAGES = (
    "prefix_hit_tokens",
    "mixed_steps",
    "chunk_crossed_in_decode",
    "two_cross_in_one_step",
    "state_slot_reused",
)
IN_SLICES = (
    "split_mid_prompt",
    "mixed_steps",
    "preempted",
    "resumed",
    "chunk_crossed_in_decode",
    "prefill_ends_on_chunk",
    "prefill_ends_before_chunk",
    "prefill_ends_after_chunk",
    "slice_inside_chunk",
    "state_slot_reused",
    "preempted_inside_chunk",
)


def make(folder: Path, schedule: str) -> tuple[Path, Path]:
    """Three recurrent layers to one attention layer: (model folder, contract)."""
    config = HYBRID | {"num_hidden_layers": 4, "full_attention_interval": 4}
    return make_recurrent(folder, config, schedule)


def start(case: tuple[Path, Path], **changes) -> RolloutEngine:
    model, contract = case
    settings = RolloutSettings(model=model, contract=contract, series="qwen3.5-tiny")
    return RolloutEngine(dataclasses.replace(settings, **COMMON | changes))


def requests(page: int = 256) -> list[Request]:
    """Prompts that end on, before and after a chunk, cross a page in decode, share a prefix.

    `page` is what vLLM makes of the block size, so that a page of keys holds a state.
    """
    source = random.Random(7)

    def fresh(count: int) -> list[int]:
        return [source.randrange(VOCAB) for _ in range(count)]

    base = fresh(560)
    prompts = [
        fresh(page - 16),  # takes the last free page
        fresh(page - 14),  # then needs one too, and the next request loses its own
        fresh(page - 30),
        base,
        fresh(63),
        fresh(64),
        fresh(65),
        [5],
        base[:512] + fresh(30),
        base[:300] + fresh(66),
    ]
    return [Request(p, NEW, seed, ignore_eos=True) for seed, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make(tmp_path_factory.mktemp("chunk_row"), "chunk_row")


@pytest.fixture(scope="module")
def sliced(case):
    with start(case, **SLICED) as engine:
        engine.asked = requests()
        engine.done = engine.generate(engine.asked)
        engine.fired = engine.stats(reset=True)
        yield engine


@pytest.fixture(scope="module")
def paged(case):
    with start(case, **PAGED) as engine:
        engine.asked = requests()
        engine.generate(engine.asked[BASE : BASE + 1])  # its pages are there for all the others
        engine.done = engine.generate(engine.asked)
        engine.fired = engine.stats(reset=True)
        engine.count = engine.served()
        yield engine


def test_decode_equals_prefill_under_every_hazard(sliced, paged):
    for decoded in (sliced, paged):
        sequences = whole(decoded.asked, decoded.done)
        for scores in (sliced.score(sequences), paged.score(sequences)):
            assert mismatches(decoded.asked, decoded.done, scores) == 0
    alone = paged.score(sequences[-1:])
    assert mismatches(paged.asked[-1:], paged.done[-1:], alone) == 0


def test_every_hazard_fired(sliced, paged):
    never = [name for name in IN_SLICES if not sliced.fired.get(name)]
    never += [name for name in IN_PAGES if not paged.fired.get(name)]
    assert not never, (never, sliced.fired, paged.fired)
    assert paged.fired["prefix_hit_tokens"] == sum(c.cached_tokens for c in paged.done) >= 512


def test_one_seed_one_text(sliced, paged):
    for left, right in zip(sliced.done, paged.done, strict=True):
        assert left.tokens == right.tokens
        assert np.array_equal(left.logprob_bits, right.logprob_bits)


def test_every_bound_region_is_served(paged, case):
    assert set(paged.count) == set(regions_of("qwen3_5_text"))
    Contract.load(case[1]).check_served(paged.count, ("engine_decode", "engine_prefill"))
    assert paged.binding()["status"] == "known"


def test_live_checksums_are_those_of_the_source(case, sliced):
    wanted = {
        name: tensor_checksum(tensor.float() if name.endswith("A_log") else tensor)
        for name, tensor in sources.open_model(case[0])
    }
    live = sliced.weight_checksums()
    assert {n: bits.hex_digest(v) for n, v in live.items()} == {
        n: bits.hex_digest(v) for n, v in wanted.items()
    }


def _published(folder: Path, factor: float):
    """The tensors as the trainer sends them, one of a recurrent layer scaled."""
    for name, tensor in sources.open_model(folder):
        if name.endswith("A_log"):
            yield name, tensor.float()
        else:
            yield (
                name,
                tensor * factor if name.endswith("1.linear_attn.in_proj_z.weight") else tensor,
            )


def test_a_refit_drops_cached_states(case, paged):
    folder, digest = case[0], paged.contract_digest()
    again = [dataclasses.replace(paged.asked[BASE], max_tokens=4)]
    first = paged.generate(again)[0]
    assert first.cached_tokens >= 512
    with send(_published(folder, 1.5), step=1, contract_digest=digest) as manifest:
        outcome = paged.sync_weights(manifest)
    assert outcome["dropped_blocks"] > 0
    assert outcome["checksums"] == manifest.checksums()
    after = paged.generate(again)[0]
    assert after.cached_tokens == 0
    assert not np.array_equal(after.logprob_bits, first.logprob_bits)
    with send(_published(folder, 1.0), step=2, contract_digest=digest) as manifest:
        paged.sync_weights(manifest)
    assert np.array_equal(paged.generate(again)[0].logprob_bits, first.logprob_bits)


def test_two_ranks_equal_one(case, sliced):
    with start(case, **SLICED, tensor_parallel_size=2) as engine:
        done = engine.generate(sliced.asked)
        for left, right in zip(done, sliced.done, strict=True):
            assert left.tokens == right.tokens
            assert np.array_equal(left.logprob_bits, right.logprob_bits)
        assert engine.weight_checksums() == sliced.weight_checksums()


@pytest.mark.slow
def test_cpr_is_another_law_that_holds_as_well(tmp_path, paged):
    with start(make(tmp_path, "cpr"), **SLICED) as engine:
        asked = requests(page=320)
        done = engine.generate(asked)
        fired = engine.stats()
        assert mismatches(asked, done, engine.score(whole(asked, done))) == 0
        assert fired["slice_inside_chunk"] > 0 and fired["preempted_inside_chunk"] > 0
        assert mismatches(paged.asked, paged.done, engine.score(whole(paged.asked, paged.done))) > 0


@pytest.mark.slow
def test_stock_differs(case, paged):
    with start(case, **PAGED, arithmetic="stock") as engine:
        asked = paged.asked[BASE + 1 : BASE + 4]  # the pair is slow
        done = engine.generate(asked)
        assert mismatches(asked, done, engine.score(whole(asked, done))) > 0
        assert engine.served() == {}
