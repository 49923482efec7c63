"""What the trainer decides before Megatron runs: architectures, batches, messages."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebits import bits, runtime
from samebits.engines import trainer_batch as batches
from samebits.engines import trainer_wire as wire
from samebits.engines.trainer import refuse_parallel
from samebits.engines.trainer_batch import TrainBatch
from samebits.engines.trainer_model import Architecture
from samebits.engines.trainer_slots import Slot
from samebits.errors import Refused
from samebits.hooks.megatron.gdn.schedule import contracted_schedule

GOOD = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "hidden_act": "silu",
    "attention_dropout": 0.0,
}

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}

HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "rope_parameters": GOOD["rope_parameters"] | {"partial_rotary_factor": 0.25},
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

UNPROVED_HYBRID = (
    {"output_gate_type": "sigmoid"},
    {"layer_scale": True},
    {"attn_output_gate": False},
    {"rope_parameters": HYBRID["rope_parameters"] | {"mrope_section": [11, 11, 10]}},
    {"rope_parameters": GOOD["rope_parameters"]},  # no share of the head that turns
    {"partial_rotary_factor": 0.5},  # another one than in rope_parameters
    {"layer_types": None},
    {"layer_types": None, "full_attention_interval": 0},
    {"linear_num_value_heads": 3},
    {"linear_key_head_dim": 64},
    {"linear_value_head_dim": 256},
)


def load(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps(GOOD | changes))
    return Architecture.load(tmp_path)


def test_supported_config_is_read(tmp_path):
    arch = load(tmp_path)
    assert (arch.heads, arch.kv_heads, arch.head_dim, arch.qk_norm) == (4, 2, 32, True)
    assert arch.rope_theta == 10000.0 and not arch.tied and arch.linear is None


def test_hybrid_config_is_read(tmp_path):
    arch = load(tmp_path, **HYBRID)
    assert arch.linear is not None and arch.linear.channels == (256, 256, 512)
    assert [arch.is_linear(i) for i in range(arch.layers)] == [True, False]
    assert arch.linear.rotary_share == 0.25


def test_hybrid_config_is_read_as_published(tmp_path):
    share = {"rope_parameters": GOOD["rope_parameters"], "partial_rotary_factor": 0.5}
    assert load(tmp_path, **HYBRID | share).linear.rotary_share == 0.5
    arch = load(
        tmp_path,
        **HYBRID | {"layer_types": None, "full_attention_interval": 4, "num_hidden_layers": 8},
    )
    assert arch.linear.pattern == (1, 1, 1, 0, 1, 1, 1, 0)
    load(tmp_path, **HYBRID, attn_output_gate=True, output_gate_type="swish", layer_scale=False)


@pytest.mark.parametrize(
    ("changes", "error_id"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "SB0601"),
        ({"dtype": "float16"}, "SB0602"),
        ({"dtype": None}, "SB0602"),
        ({"attention_dropout": 0.1}, "SB0605"),
        ({"attention_bias": True}, "SB0605"),
        ({"mlp_bias": True}, "SB0605"),
        (QWEN2 | {"attention_bias": True}, "SB0605"),
        (QWEN2 | {"mlp_bias": True}, "SB0605"),
        (QWEN2 | {"head_dim": 64}, "SB0605"),
        (QWEN2 | {"qk_norm": True}, "SB0605"),
        (QWEN2 | {"is_causal": False}, "SB0605"),
        (QWEN2 | {"dual_chunk_attention_config": {"chunk_size": 4}}, "SB0605"),
        ({"architectures": ["MiMoForCausalLM"]}, "SB0601"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}, "SB0605"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "SB0605"),
        ({"use_sliding_window": True}, "SB0605"),
        ({"hidden_act": "gelu"}, "SB0605"),
        ({"rope_parameters": HYBRID["rope_parameters"]}, "SB0605"),
        (HYBRID | {"layer_types": ["linear_attention", "sliding_attention"]}, "SB0605"),
        (HYBRID | {"layer_types": ["full_attention"]}, "SB0605"),
        ({"attn_output_gate": True}, "SB0605"),
        (
            {"rope_parameters": HYBRID["rope_parameters"], "partial_rotary_factor": 1.0},
            "SB0605",
        ),
        *((HYBRID | changes, "SB0605") for changes in UNPROVED_HYBRID),
        *((HYBRID | {name: None}, "SB0605") for name in HYBRID if name.startswith("linear_")),
    ],
)
def test_unproved_config_is_refused(tmp_path, changes, error_id):
    with pytest.raises(Refused) as caught:
        load(tmp_path, **changes)
    assert caught.value.error_id == error_id


@pytest.mark.parametrize("name", ["cp", "pp", "ep", "dp", "sp"])
def test_other_parallelism_is_refused(name):
    refuse_parallel({name: 1})
    with pytest.raises(Refused, match=f"{name}=2") as caught:
        refuse_parallel({name: 2})
    assert caught.value.error_id == "SB0604"


@pytest.mark.parametrize("size", [0, 3, 4])
def test_stock_refuses_a_size_that_splits_head_groups(tmp_path, monkeypatch, size):
    monkeypatch.setenv("SAMEBITS_ARITHMETIC", "stock")
    arch = load(tmp_path)
    arch.refuse_tp(2)
    with pytest.raises(Refused) as caught:
        arch.refuse_tp(size)
    assert caught.value.error_id == "SB0603"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 20))
def test_micro_batches_cover_all_sequences_in_order(lengths, tokens):
    parts = list(batches.micro_batches([[0] * n for n in lengths], tokens))
    assert [i for part in parts for i in part] == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or sum(lengths[i] for i in part) <= tokens


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_both_layouts_pick_the_row_before_each_target(lengths):
    tokens = [[10 * i + j for j in range(n)] for i, n in enumerate(lengths)]
    expected = [pair for s in tokens for pair in itertools.pairwise(s)]
    for layout in batches.LAYOUTS:
        made = batches.inputs(tokens, layout, with_mask=False)
        hidden = made.input_ids.t().reshape(-1)  # Megatron's [s, b] order
        positions = made.position_ids.t().reshape(-1)
        found = list(zip(hidden[made.rows].tolist(), made.targets.tolist(), strict=True))
        assert found == expected
        assert positions[made.rows].tolist() == [j for n in lengths for j in range(n - 1)]


@pytest.mark.parametrize("bad", [[], [[]], [[1], []], [[-1]], [[256]]])
def test_bad_sequences_are_refused(bad):
    with pytest.raises(Refused) as caught:
        batches.check_sequences(bad, 256)
    assert caught.value.error_id == "SB0608"


def test_fields_must_match_the_targets():
    good = [torch.ones(2)]
    TrainBatch([[1, 2, 3]], good, good, good).check(256)
    for fields in ([torch.ones(3)], []):
        with pytest.raises(Refused) as caught:
            TrainBatch([[1, 2, 3]], good, fields, good).check(256)
        assert caught.value.error_id == "SB0608"
    with pytest.raises(Refused):
        TrainBatch([[1, 2, 3]], [torch.zeros(2)], good, good).check(256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_tensors_cross_the_pipe_with_their_bits(dtype):
    value = torch.arange(-3, 9).to(dtype).view(3, 4).t()
    got = wire.loads(wire.dumps({"x": value, "empty": torch.empty(0, dtype=dtype)}))
    assert got["x"].dtype == dtype and got["empty"].shape == (0,)
    assert bits.equal(got["x"], value.contiguous())


def test_errors_cross_the_pipe_with_their_id():
    error = Refused("SB0608", seen="a", required="b", hint="samebits explain SB0608")
    assert wire.loads(wire.dumps(("error", error)))[1].error_id == "SB0608"


@pytest.mark.parametrize(
    ("shape", "dim", "sections", "second"),
    [
        ((4, 3), 0, None, [6, 7, 8, 9, 10, 11]),
        ((3, 4), 1, None, [2, 3, 6, 7, 10, 11]),
        ((8, 1), 0, (2, 2, 4), [1, 3, 6, 7]),
        ((5,), None, None, [0, 1, 2, 3, 4]),
    ],
)
def test_shares_of_ranks_make_the_published_tensor(shape, dim, sections, second):
    published = torch.arange(torch.Size(shape).numel()).view(shape)
    local = list(shape)
    if dim is not None:
        local[dim] //= 2
    slot = Slot("w", shape, dim, torch.empty(local), sections)
    shares = [slot.share(published, rank, 2) for rank in range(2)]
    assert shares[1].flatten().tolist() == second
    if dim is not None:
        assert torch.equal(slot.whole(shares), published)


@pytest.mark.parametrize(
    ("changes", "key_dim", "seen"),
    [
        ({"schedule": "recurrent"}, 128, "schedule recurrent"),
        ({"chunk": 32}, 128, "chunks of 32"),
        ({}, 72, "heads of 72"),
    ],
)
def test_another_core_than_the_installed_one_is_refused(monkeypatch, changes, key_dim, seen):
    constants = {"schedule": "cpr", "chunk": 64}
    contract = SimpleNamespace(constants=lambda region: constants)
    monkeypatch.setattr(runtime, "contract", lambda: contract)
    assert contracted_schedule(128, 128) == "cpr"
    constants |= changes
    with pytest.raises(Refused, match=seen) as caught:
        contracted_schedule(key_dim, 128)
    assert caught.value.error_id == "SB0614"
