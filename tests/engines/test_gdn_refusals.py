"""Refusals that hybrid models add to vLLM's start, and the hazards of chunks."""

from __future__ import annotations

from types import SimpleNamespace as Namespace

import pytest

from samebits import runtime
from samebits.errors import Refused
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


def engine(text=(), cache=(), ranks: int = 1) -> Namespace:
    return Namespace(
        model_config=Namespace(hf_text_config=Namespace(**TEXT | dict(text))),
        cache_config=Namespace(**CACHE | dict(cache)),
        parallel_config=Namespace(tensor_parallel_size=ranks),
    )


@pytest.fixture(autouse=True)
def chunk(monkeypatch):
    constants = {"chunk": 64}
    monkeypatch.setattr(runtime, "contract", lambda: Namespace(constants=lambda _: constants))
    return constants


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


def test_a_contract_with_other_chunks_is_refused(chunk):
    chunk["chunk"] = 32
    with pytest.raises(Refused) as refusal:
        config.check(engine())
    assert refusal.value.error_id == "SB0516"


class Steps(ChunkHazards):
    """Counters fed by hand; state pages are those of group 0."""

    def __init__(self) -> None:
        super().__init__(Namespace(cache_config=Namespace(block_size=64)))

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
        names |= {"state_slot_reused", "preempted_inside_chunk"}
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
