"""Pages and passes of a benchmark's engines, and the rows about memory. No engine starts."""

from types import SimpleNamespace

import pytest

from samebits import recipe
from samebits.bench import engine_arm, engine_choice, engine_memory, engine_rows
from samebits.bench.engine_arm import Arm
from samebits.bench.engine_choice import Choice
from samebits.bench.engine_worker import Measured
from samebits.casework import memory

HYBRID = "qwen3.5-9b-h200"
GIB = 1 << 30


@pytest.fixture
def case(monkeypatch):
    monkeypatch.setattr("samebits.patching.tree_path", lambda *_: "tree")
    return recipe.load(HYBRID)


def deep(case, layers):
    return {**case.config, "num_hidden_layers": layers}


def held(config, block, length, pages, page):
    """What a worker tells of vLLM's cache of a hybrid model: groups of as many layers as have
    keys and values, all with pages of one size."""
    layers = config["num_hidden_layers"]
    full = layers // 4
    keys = {
        "layers": full,
        "tokens": block,
        "page": page,
        "state": 0,
        "sequence": -(-length // block) * page,
    }
    state = keys | {"tokens": length, "state": page - 100, "sequence": page}
    return {"allocated": 3 * GIB, "pages": pages, "groups": [keys, state, state, state]}


@pytest.mark.parametrize("layers", [4, 32])
@pytest.mark.parametrize(("block", "each"), [(960, 3), (528, 4)])
def test_the_pages_hold_all_requests_and_few_more(case, layers, block, each):
    config = deep(case, layers)
    length = engine_arm.length_of(1024)
    cache = engine_memory.cache(config, block, length, 256)
    page = block * memory.kv_bytes(config, layers=1)
    assert cache.pages == 256 * (each + 3) + 64
    assert cache.bytes == cache.pages * page * layers // 4
    full = held(config, block, length, cache.pages, page)
    assert engine_memory.short_of_pages(full, 256) is None
    assert engine_memory.short_of_pages(full, 256 + 64) is not None
    short = full | {"pages": 256 * (each + 3)}  # without vLLM's empty page
    assert f"{256 * (each + 3) + 1}" in engine_memory.short_of_pages(short, 256)


def test_layers_in_groups_of_nearly_equal_size_share_their_pages():
    dims = {"num_key_value_heads": 1, "head_dim": 2, "full_attention_interval": 2}
    cache = engine_memory.cache({**dims, "num_hidden_layers": 9}, 16, 32, 10)
    # Four layers with keys and values, five with states: one group of five each.
    assert cache.pages == 10 * (2 + 1) + 64
    assert cache.bytes == cache.pages * 5 * 16 * 8


def test_the_block_that_vllm_makes_of_its_own_states(case):
    block = engine_memory.stock_block(case.config)
    token = memory.kv_bytes(case.config, layers=1)
    state = memory.state_bytes(case.config, None, layers=1)
    assert block % 16 == 0 and (block - 16) * token < state <= block * token


def test_a_pass_takes_fewer_sequences_where_more_do_not_fit(case):
    dense = recipe.load("qwen3-8b-h200").config

    def sequences(config, total):
        weights = 2 * memory.parameters(config, True)
        return engine_memory.pass_sequences(config, weights, total, 8, 1024)

    assert sequences(dense, 139 * GIB) == 8  # what was recorded
    assert sequences({**dense, "num_hidden_layers": 36}, 139 * GIB) == 4
    assert sequences({**dense, "num_hidden_layers": 36}, 60 * GIB) == 0
    assert sequences(deep(case, 4), 139 * GIB) == 8
    assert 0 < sequences(deep(case, 32), 139 * GIB) < 8


def test_configurations_of_a_hybrid_model(case, tmp_path):
    aligned, others = engine_choice.arms(case, tmp_path / "model", tmp_path / "stock")
    assert aligned.settings["block_size"] == case.engine["block_size"] == 960
    assert aligned.settings["kv_blocks"] == 1600
    assert aligned.settings["max_model_len"] == aligned.length == 1024 + 1024 + 16
    *own, ahead = others
    assert ahead.settings["ahead"] and ahead.response == 1024
    assert all((arm.block, arm.response, arm.compiled) == (0, 1024, True) for arm in own)
    rated = [arm for arm in own if arm.rated]
    assert {arm.states for arm in rated} == {"float32"}
    (auto,) = (arm for arm in own if not arm.rated)
    assert auto.states == "auto" and auto.prefill == "triton"
    assert {(a.runner, a.backend) for a in own if engine_choice.again(a)} == {
        (r, b) for r in (1, 2) for b in ("FLASH_ATTN", "TRITON_ATTN")
    }
    assert [arm.prefill for arm in own if arm.prefill != "triton"] == ["flashinfer"]
    assert len({arm.name for arm in others}) == len(others)


def test_a_choice_among_configurations(case, tmp_path):
    _, others = engine_choice.arms(case, tmp_path, tmp_path)
    assert all(map(Choice().takes, others))
    fast = [arm.name for arm in others if Choice(fast=True).takes(arm)]
    assert fast == [
        "vLLM V2, FA3, compiled",
        "vLLM V1, FA3, compiled",
        "aligned, steps prepared ahead",
    ]
    one = Choice(("vLLM V1, Triton, compiled",))
    assert [arm.name for arm in others if one.takes(arm)] == [*one.names]
    both = Choice(one.names, fast=True)
    assert {arm.name for arm in others if both.takes(arm)} == {*fast, *one.names}


def found(case, name, block, page, seconds, **changes):
    arm = {"name": name, "model": "m", "response": 1024, **changes}
    cache = held(deep(case, 32), block, engine_arm.length_of(1024), 9, page)
    both = {"seeded": seconds, "unseeded": seconds}
    return {
        "name": name,
        "arm": arm,
        "seconds": {"seeded": seconds} if "settings" in changes else both,
        "mismatches": 0,
        "gated": 8,
        "memory": cache,
    }


def test_rows_of_states_against_the_same_states(case):
    ours = found(case, "aligned", 960, 960 * 4096, [20.0], settings={})
    stock = found(case, "fp32", 528, 528 * 4096, [19.0], states="float32")
    faster = found(case, "auto", 272, 272 * 4096, [10.0], states="auto")
    made = [*engine_rows.memory_rows("toy", [ours, faster, stock])]
    states, whole, prefix = made
    assert all(row["against"]["name"] == "fp32" for row in made)
    assert [row["others"][0]["name"] for row in made] == ["auto"] * 3
    assert (states["ours"], states["against"]["time"]) == (24 * 3.75, 24 * 2.0625)
    assert states["ratio"] == 1.818 and states["target"] == 2.0
    assert whole["ours"] == 24 * 3.75 + 8 * 3 * 3.75 and whole["target"] is None
    assert prefix["ours"] == prefix["against"]["time"] == 128.0  # KiB: 32 layers of 4
    left = engine_rows.left_out(Arm("V9", "m", states="auto"))
    for row in engine_rows.rollout_rows("toy", [ours, faster, stock, left]):
        assert row["against"]["name"] == "fp32" and row["target"] == 1.031
        assert "1024 + 1024 tokens" in row["work"] and row["peak_gib"] == 3.0
        assert row["ours"] == round(20e6 / (256 * 1024), 2)
        auto, missing = row["others"]
        assert auto["name"] == "auto" and auto["time"] == round(10e6 / (256 * 1024), 2)
        assert missing == {"name": "V9", "not_measured": "not run"}
    assert [*engine_rows.memory_rows("toy", [ours, faster])] == []


def test_a_model_without_states_has_no_rows_of_them(case):
    ours = found(case, "aligned", 16, 4096, [2.0], settings={})
    stock = found(case, "stock", 16, 4096, [2.0])
    for arm in (ours, stock):
        arm["memory"]["groups"] = arm["memory"]["groups"][:1]
    assert [*engine_rows.memory_rows("toy", [ours, stock])] == []
    assert {row["target"] for row in engine_rows.rollout_rows("toy", [ours, stock])} == {1.053}


def test_a_worker_tells_what_its_cache_holds(monkeypatch):
    import torch

    class FullAttentionSpec:
        block_size, page_size_bytes = 960, 4000

        def max_memory_usage_bytes(self, config):
            return config * self.page_size_bytes

    class MambaSpec(FullAttentionSpec):
        shapes, dtypes = ((4, 8), (3, 5)), (torch.float32, torch.bfloat16)

        def max_memory_usage_bytes(self, config):
            return self.page_size_bytes

    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])
        for spec in (FullAttentionSpec(), MambaSpec())
    ]
    worker = Measured()
    config = SimpleNamespace(num_blocks=7, kv_cache_groups=groups)
    worker.model_runner, worker.vllm_config = SimpleNamespace(kv_cache_config=config), 3
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 11)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 12)
    told = worker.samebits_measured()
    assert (told["allocated"], told["reserved"], told["pages"]) == (11, 12, 7)
    keys, states = told["groups"]
    assert keys == {
        "kind": "FullAttentionSpec",
        "layers": 2,
        "tokens": 960,
        "page": 4000,
        "state": 0,
        "sequence": 12000,
    }
    assert states["state"] == 4 * 8 * 4 + 3 * 5 * 2 and states["sequence"] == 4000


def test_an_arm_is_the_same_after_its_file(case, tmp_path):
    import json
    from dataclasses import asdict

    aligned, others = engine_choice.arms(case, tmp_path, tmp_path)
    for arm in (aligned, *others):
        assert Arm(**json.loads(json.dumps(asdict(arm)))) == arm
