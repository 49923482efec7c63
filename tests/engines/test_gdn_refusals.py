"""Refusals that hybrid models add to vLLM's start, and the hazards of chunks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest
from trainer_support import CASES, HYBRID, make_case

from samebits import runtime
from samebits.contract import Contract
from samebits.engines.rollout import RolloutSettings
from samebits.errors import Refused
from samebits.hooks.vllm import config as dense_config
from samebits.hooks.vllm.gdn import config
from samebits.hooks.vllm.gdn.hazards import ChunkHazards

TEXT = {
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25},
    "hidden_act": "silu",
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
CACHE = {
    "mamba_ssm_cache_dtype": "float32",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "align",
    "enable_prefix_caching": True,
    "block_size": 64,
}


REAL = {
    "plain": None,
    "two ranks": None,
    "no prefix cache": None,
    "block inside a chunk": "SB0516",
    "state of the model's dtype": "SB0517",
    "state in bf16": "SB0517",
    "speculation": "SB0504",
    "heads of 64": "SB0501",
    "another model": "SB0311",
}


def engine(text=(), cache=(), ranks: int = 1) -> Namespace:
    return Namespace(
        model_config=Namespace(hf_text_config=Namespace(**TEXT | dict(text))),
        cache_config=Namespace(**CACHE | dict(cache)),
        parallel_config=Namespace(tensor_parallel_size=ranks),
    )


@pytest.fixture(autouse=True)
def contract(monkeypatch):
    constants = {"chunk": 64, "schedule": "chunk_row"}
    contract = Namespace(constants=lambda _: constants, check_model=lambda _: None)
    monkeypatch.setattr(runtime, "contract", lambda: contract)
    return contract


@pytest.fixture(autouse=True)
def mamba_utils(monkeypatch):
    """Stands in for the patched module of vLLM."""
    module = Namespace(__name__="vllm.v1.worker.mamba_utils", HAS_TRITON=False)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker", Namespace(mamba_utils=module))
    return module


def test_what_is_proved_passes():
    config.check(engine())
    config.check(engine(ranks=2, cache={"block_size": 256}))
    config.check(engine(cache={"block_size": 16, "enable_prefix_caching": False}))


@pytest.mark.parametrize(
    ("changes", "error_id"),
    [
        ({"text": {"linear_key_head_dim": 64}}, "SB0501"),
        ({"text": {"linear_value_head_dim": 256}}, "SB0501"),
        ({"text": {"attn_output_gate": False}}, "SB0501"),
        ({"text": {"output_gate_type": "sigmoid"}}, "SB0501"),
        ({"text": {"layer_types": ["linear_attention", "sliding_attention"]}}, "SB0501"),
        ({"text": {"rope_parameters": {"mrope_section": [11, 11, 10]}}}, "SB0501"),
        ({"ranks": 4}, "SB0507"),
        ({"cache": {"block_size": 96}}, "SB0516"),
        ({"cache": {"mamba_cache_mode": "all"}}, "SB0516"),
        ({"cache": {"mamba_ssm_cache_dtype": "auto"}}, "SB0517"),
        ({"cache": {"mamba_ssm_cache_dtype": "bfloat16"}}, "SB0517"),
        ({"cache": {"mamba_cache_dtype": "float32"}}, "SB0517"),
    ],
)
def test_what_nobody_proved_is_refused(changes, error_id):
    with pytest.raises(Refused) as refusal:
        config.check(engine(**changes))
    assert refusal.value.error_id == error_id


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_context_parallelism_is_refused(kind):
    name = f"{kind}_context_parallel_size"
    parallel = Namespace(parallel_config=Namespace(**{name: 2}))
    with pytest.raises(Refused, match=f"{name}=2") as refusal:
        dense_config._check_parallel(parallel, model=None)
    assert refusal.value.error_id == "SB0507"


def _start(case) -> dict[str, str | None]:
    """What the front end of real vLLM makes of every configuration."""
    model, contract = case
    settings = RolloutSettings(model=model, contract=contract, series="qwen3.5-tiny")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("rollout_settings.py"), model, "hybrid"],
        env=settings.environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.engine
def test_real_configurations_are_refused_by_id(tmp_path):
    case = make_case(tmp_path, "qwen3_5_text", HYBRID, "qwen3.5-tiny")
    assert _start(case) == REAL


@pytest.mark.parametrize(("name", "value"), [("chunk", 32), ("schedule", "chunk_fold")])
def test_a_contract_with_another_schedule_is_refused(contract, name, value):
    contract.constants("gdn.core")[name] = value
    with pytest.raises(Refused, match=str(value)) as refusal:
        config.check(engine())
    assert refusal.value.error_id == "SB0516"


def test_sources_without_the_patch_of_recurrent_layers_are_refused(mamba_utils):
    del mamba_utils.HAS_TRITON
    with pytest.raises(Refused) as refusal:
        config.check(engine())
    assert refusal.value.error_id == "SB0513"


def test_the_contract_of_a_dense_model_is_refused_as_such(monkeypatch):
    dense = Contract.load(CASES / "qwen3-tiny" / "contract.json")
    monkeypatch.setattr(runtime, "contract", lambda: dense)
    with pytest.raises(Refused) as refusal:
        config.check(engine(text={"architectures": ["Qwen3_5ForCausalLM"]}))
    assert refusal.value.error_id == "SB0311"


class Steps(ChunkHazards):
    """Counters fed by hand; state pages are those of group 0."""

    def __init__(self) -> None:
        cache = Namespace(block_size=64, mamba_cache_mode="align")
        super().__init__(Namespace(cache_config=cache))

    def _state_groups(self) -> list[int]:
        return [0]

    def step(self, scheduled, new=(), computed=(), preempted=(), resumed=(), finished=()) -> None:
        """One step; `new` (request, prompt length, page), `computed` (request, tokens so far)."""
        self.observe(
            Namespace(
                finished_req_ids=set(finished),
                preempted_req_ids=set(preempted),
                total_num_scheduled_tokens=sum(scheduled.values()),
                num_scheduled_tokens=scheduled,
                scheduled_new_reqs=[
                    Namespace(
                        req_id=name,
                        prompt_token_ids=[0] * prompt,
                        num_computed_tokens=0,
                        block_ids=([page],),
                    )
                    for name, prompt, page in new
                ],
                scheduled_cached_reqs=Namespace(
                    req_ids=[name for name, _ in computed],
                    num_computed_tokens=[count for _, count in computed],
                    new_block_ids=[None] * len(computed),
                    resumed_req_ids=set(resumed),
                ),
            )
        )

    def fired(self) -> set[str]:
        names = {"chunk_crossed_in_decode", "slice_inside_chunk", "two_cross_in_one_step"}
        names |= {f"prefill_ends_{place}_chunk" for place in ("on", "before", "after")}
        names |= {"state_slot_reused", "preempted_inside_chunk", "resumed_from_state"}
        report = self.report()
        self.reset()
        return {name for name in names if report.get(name)}


def test_chunk_hazards_are_counted_where_they_happen():
    steps = Steps()
    steps.step({"a": 60}, new=[("a", 64, 1)])
    assert steps.fired() == set()
    steps.step({"a": 4}, computed=[("a", 60)])
    assert steps.fired() == {"slice_inside_chunk", "prefill_ends_on_chunk"}
    steps.step({"a": 1, "b": 63}, computed=[("a", 64)], new=[("b", 63, 2)])
    assert steps.fired() == {"prefill_ends_before_chunk"}
    steps.step({"b": 1, "c": 65}, computed=[("b", 63)], new=[("c", 65, 3)], finished=["a"])
    assert steps.fired() == {
        "chunk_crossed_in_decode",
        "prefill_ends_after_chunk",
        "two_cross_in_one_step",
    }
    steps.step({"d": 10}, new=[("d", 20, 1)], preempted=["b"])
    assert steps.fired() == {"state_slot_reused"}  # b had lost nothing: it stood on a boundary
    steps.step({"e": 10}, new=[("e", 20, 9)], preempted=["c"])
    assert steps.fired() == {"preempted_inside_chunk"}


def test_what_is_computed_again_is_no_decode():
    steps = Steps()
    steps.step({"a": 60}, new=[("a", 60, 1)])
    for computed in (60, 61, 62):
        steps.step({"a": 1}, computed=[("a", computed)])
    assert steps.fired() == set()
    steps.step({"b": 1}, new=[("b", 2, 9)], preempted=["a"])
    steps.step({"a": 61}, computed=[("a", 0)], resumed=["a"])
    assert steps.fired() == {"preempted_inside_chunk"}
    steps.step({"a": 3}, computed=[("a", 61)])
    assert steps.fired() == set()
    steps.step({"a": 1}, computed=[("a", 63)])  # counted: computed before
    assert steps.fired() == set()


def test_a_slice_over_the_prompts_end_is_not_the_end_of_a_prompt():
    steps = Steps()
    steps.step({"a": 20}, new=[("a", 20, 1)])
    steps.step({"b": 1}, new=[("b", 2, 9)], preempted=["a"])
    steps.fired()
    steps.step({"a": 63}, computed=[("a", 0)], resumed=["a"])
    assert steps.fired() == set()
    steps.step({"a": 1}, computed=[("a", 63)])
    assert steps.fired() == {"chunk_crossed_in_decode"}


def test_a_prompt_ends_once():
    steps = Steps()
    steps.step({"a": 64}, new=[("a", 64, 1)])
    assert steps.fired() == {"prefill_ends_on_chunk"}
    steps.step({"a": 1}, computed=[("a", 64)])
    steps.step({"b": 1}, new=[("b", 2, 9)], preempted=["a"])
    assert steps.fired() == {"preempted_inside_chunk"}
    steps.step({"a": 64}, computed=[("a", 0)], resumed=["a"])
    assert steps.fired() == set()


def test_going_on_from_a_cached_state_is_counted():
    steps = Steps()
    steps.step({"a": 70}, new=[("a", 70, 1)])
    steps.step({"b": 1}, new=[("b", 2, 9)], preempted=["a"])
    steps.fired()
    steps.step({"a": 7}, computed=[("a", 64)], resumed=["a"])
    assert steps.fired() == {"resumed_from_state"}
    steps.step({"b": 1}, computed=[("b", 1)], preempted=["a"])
    steps.fired()
    steps.step({"a": 71}, computed=[("a", 0)], resumed=["a"])
    assert "resumed_from_state" not in steps.fired()
