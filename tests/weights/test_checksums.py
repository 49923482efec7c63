import numpy as np
import pytest
import torch

from samebits import bits
from samebits.weights import checksums, wide
from samebits.weights.checksums import axis_offsets, model_digest, tensor_checksum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (130,), (131, 7), (3, 5, 7)])
def test_torch_adds_up_to_the_slow_law(shape, dtype, monkeypatch):
    monkeypatch.setattr(wide, "ELEMENTS", 50)
    x = (torch.randn(shape, dtype=torch.float64) * 50).to(dtype)
    assert checksums._on_device(x, axis_offsets(shape)) == bits.mixsum(x)


def test_torch_sums_a_shard():
    x = torch.randn(4, 6, 5).bfloat16()
    index = [[1, 3], slice(2, 5), [4, 0]]
    shard = x[np.ix_([1, 3], [2, 3, 4], [4, 0])]
    found = checksums._on_device(shard, axis_offsets(x.shape, index))
    assert found == tensor_checksum(shard, shape=x.shape, index=index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (130,), (131, 7), (3, 5, 7), (1, 200)])
def test_equals_the_slow_law(shape, dtype):
    x = (torch.randn(shape, dtype=torch.float64) * 50).to(dtype)
    assert tensor_checksum(x) == bits.mixsum(x)


def test_shards_add_up_in_any_layout():
    x = torch.randn(12, 20).bfloat16()
    whole = tensor_checksum(x)
    rows = [
        tensor_checksum(x[a:b], shape=x.shape, index=[slice(a, b)]) for a, b in ((0, 5), (5, 12))
    ]
    columns = [
        tensor_checksum(x[:, a:b].contiguous(), shape=x.shape, index=[slice(None), slice(a, b)])
        for a, b in ((0, 8), (8, 20))
    ]
    interleaved = [
        tensor_checksum(x[start::3], shape=x.shape, index=[list(range(start, 12, 3))])
        for start in range(3)
    ]
    for parts in (rows, columns, interleaved):
        assert bits.add_digests(*parts) == whole


def test_three_axes_and_scattered_positions():
    x = torch.randn(4, 6, 5).bfloat16()
    index = [[1, 3], slice(2, 5), [4, 0]]
    shard = x[np.ix_([1, 3], [2, 3, 4], [4, 0])]
    flat = torch.arange(x.numel()).reshape(x.shape)[np.ix_([1, 3], [2, 3, 4], [4, 0])]
    assert tensor_checksum(shard, shape=x.shape, index=index) == bits.mixsum(shard, flat.numpy())


def test_sees_one_flipped_bit_a_swap_and_a_sign_of_zero():
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    x[3, 4], x[3, 5] = 1.0, 2.0
    seen = {tensor_checksum(x)}
    for change in ("bit", "swap", "zero"):
        y = x.clone()
        if change == "bit":
            y.view(torch.int16)[10, 10] ^= 1
        elif change == "swap":
            y[3, 4], y[3, 5] = 2.0, 1.0
        else:
            y[0, 0] = -0.0
        seen.add(tensor_checksum(y))
    assert len(seen) == 4


def test_empty_and_wrong_shard():
    assert tensor_checksum(torch.empty(0, 3)) == 0
    with pytest.raises(ValueError, match="does not match"):
        tensor_checksum(torch.zeros(3, 3), shape=(6, 3), index=[slice(0, 2)])
    with pytest.raises(ValueError, match="indices for a tensor"):
        axis_offsets((2, 2), [slice(None)] * 3)


def test_model_digest_ignores_order_only():
    pairs = [("a", 1), ("b", 2)]
    assert model_digest(pairs) == model_digest(pairs[::-1])
    assert model_digest(pairs) != model_digest([("a", 2), ("b", 1)])
