import hashlib

import numpy as np
import pytest
import torch

from samebits import bits
from samebits.errors import Refused
from samebits.weights import counter, wide
from samebits.weights.counter import Scale, draw, scale_of

SCALE = Scale.deviation(0.05)


def slow_element(seed, name, index, scale):
    """The definition, one element at a time, in Python integers; exact value before rounding."""
    mask = (1 << 64) - 1
    key = int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "little")
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    fields = sum((z >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
    return (scale.offset + (fields - 131070) * scale.multiplier) / 2**scale.exponent


@pytest.mark.parametrize("scale", [SCALE, counter._NORM])
def test_follows_its_definition(scale):
    got = draw(7, "a.weight", (5, 3), scale).flatten()
    want = [slow_element(7, "a.weight", i, scale) for i in range(15)]
    assert all(np.float32(v) == v for v in want)  # exact in fp32, so rounded only once
    assert bits.equal(got, torch.tensor(want, dtype=torch.float32).bfloat16())


def test_a_shard_is_a_part_of_the_whole():
    whole = draw(1, "w", (40, 24), SCALE)
    assert bits.equal(draw(1, "w", (40, 24), SCALE, [slice(8, 20)]), whole[8:20])
    assert bits.equal(draw(1, "w", (40, 24), SCALE, [slice(None), slice(6, 12)]), whole[:, 6:12])
    assert bits.equal(draw(1, "w", (40, 24), SCALE, [[3, 30, 2]]), whole[[3, 30, 2]])


def test_block_length_does_not_move_bits(monkeypatch):
    whole = draw(1, "w", (40, 24), SCALE)
    monkeypatch.setattr(counter, "_BLOCK", 7)
    assert bits.equal(draw(1, "w", (40, 24), SCALE), whole)


NAMES = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.linear_attn.A_log",
    "model.layers.0.linear_attn.dt_bias",
    "model.layers.0.linear_attn.conv1d.weight",
    "model.layers.0.linear_attn.in_proj_qkv.weight",
)


def by_torch(monkeypatch, name, shape, scale, index=None):
    """The tensor as a GPU draws it, by torch's integers, here on the CPU."""
    found = []

    def spied(key, offsets, scale, device):
        found.append(right(key, offsets, scale, torch.device("cpu")))
        return found[-1]

    right = counter._on_device
    monkeypatch.setattr(counter, "_on_device", spied)
    y = draw(5, name, shape, scale, index, device="meta")
    assert len(found) == 1
    return y


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_torch_draws_the_bits_of_numpy(name, zero_centred, monkeypatch):
    monkeypatch.setattr(wide, "ELEMENTS", 1000)  # spans that end inside of the tensor
    one = name.endswith(("norm.weight", "bias", "A_log"))
    shape = (1237,) if one else (37, 3, 4) if "conv1d" in name else (37, 129)
    scale = scale_of(name, shape, tied=False, entropy_nats=2.5, zero_centred=zero_centred)
    assert bits.equal(by_torch(monkeypatch, name, shape, scale), draw(5, name, shape, scale))


@pytest.mark.parametrize(
    ("shape", "index"),
    [
        ((), None),
        ((7,), [[6, 0, 3]]),
        ((40, 24), [slice(3, 40, 7), [23, 0, 5]]),
        ((5, 6, 7), [[4, 1], slice(2, 5), [6]]),
    ],
)
def test_torch_draws_any_part(shape, index, monkeypatch):
    drawn = by_torch(monkeypatch, "w", shape, SCALE, index)
    assert bits.equal(drawn, draw(5, "w", shape, SCALE, index))


@pytest.mark.parametrize("key", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_torch_draws_from_any_key_at_any_index(key):
    """Flat indices of more than 32 bits, keys with and without the top bit."""
    rows, columns = np.array([0, 1 << 31, 1 << 52], np.uint64), np.arange(0, 99991, 7, np.uint64)
    drawn = counter._on_device(np.uint64(key), [rows, columns], SCALE, torch.device("cpu"))
    values = counter._values(np.uint64(key), (rows[:, None] + columns).ravel(), SCALE)
    assert bits.equal(drawn, torch.from_numpy(values).bfloat16().view(3, -1))


def test_seed_and_name_both_count():
    drawn = [draw(s, n, (64,), SCALE) for s, n in ((1, "a"), (2, "a"), (1, "b"))]
    for i in range(3):
        for j in range(i):
            assert bits.compare(drawn[i], drawn[j]).mismatches > 50


@pytest.mark.parametrize("target", [3e-4, 0.05, 0.19, 1.0, 6.0])
def test_deviation_is_met(target):
    scale = Scale.deviation(target)
    assert 16 <= scale.multiplier <= 32
    assert draw(3, "w", (200, 200), scale).double().std().item() == pytest.approx(target, rel=0.04)


def test_norm_weights_spread_around_one():
    weight = draw(3, "model.norm.weight", (4096,), counter._NORM).float()
    assert weight.min() > 0
    assert weight.mean().item() == pytest.approx(1, abs=0.03)
    assert weight.std().item() == pytest.approx(0.29, abs=0.02)


def test_zero_centred_norms_spread_around_zero_but_the_gated_one_around_one():
    def mean(name: str) -> float:
        scale = scale_of(name, (4096,), tied=False, entropy_nats=2.5, zero_centred=True)
        return draw(3, name, (4096,), scale).float().mean().item()

    assert mean("model.layers.0.input_layernorm.weight") == pytest.approx(0, abs=0.03)
    assert mean("model.layers.0.linear_attn.norm.weight") == pytest.approx(1, abs=0.03)


def test_linear_attention_remembers_many_tokens():
    name = "model.layers.0.linear_attn."
    scales = [scale_of(name + n, (4096,), tied=False, entropy_nats=1) for n in ("A_log", "dt_bias")]
    a_log, bias = (draw(3, n, (4096,), s).double() for n, s in zip("ab", scales, strict=True))
    kept = (-a_log.exp() * torch.nn.functional.softplus(bias)).exp()
    assert 0.9 < kept.mean() < 0.97 and kept.std() > 0.01 and kept.max() < 1


def test_a_tensor_without_a_rule_is_refused():
    for name, shape in (("model.layers.0.mamba.A_log", (4,)), ("x.q_proj.weight", (2, 2, 2))):
        with pytest.raises(Refused, match="SB0703"):
            scale_of(name, shape, tied=False, entropy_nats=2.5)
