"""Drawn weights, checksums and a weight sync on a GPU: the bits and sums of a CPU.

An area of `python -m samebits.bench.gpu --only public`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from samebits import bits
from samebits.weights import counter, transport, wide
from samebits.weights.checksums import tensor_checksum

if TYPE_CHECKING:
    from samebits.bench.gpu_public import Area

# Name and shape of one tensor for every scale; sizes are odd, so that parts end anywhere.
TENSORS: Sequence[tuple[str, tuple[int, ...]]] = (
    ("model.embed_tokens.weight", (1009, 4099)),
    ("lm_head.weight", (1009, 4099)),
    ("model.norm.weight", (4099,)),
    ("model.layers.0.self_attn.q_proj.bias", (4099,)),
    ("model.layers.0.mlp.down_proj.weight", (257, 12289)),
    ("model.layers.0.linear_attn.A_log", (33,)),
    ("model.layers.0.linear_attn.dt_bias", (33,)),
    ("model.layers.0.linear_attn.conv1d.weight", (515, 1, 4)),
)
# Parts of a tensor with more elements than 32 bits count: rows of its end, scattered columns.
LARGE = (151936, 40961)
PARTS: Sequence[Sequence[Any]] = (
    [[151935, 7, 104857], slice(None)],
    [slice(151000, 151936, 97), slice(3, 40961, 41)],
)


def check_weights(area: Area) -> None:
    """Every scale and odd index drawn on both; checksums of every width; a transfer received."""
    for name, shape in TENSORS:
        for centred in (False, True):
            scale = counter.scale_of(
                name, shape, tied=False, entropy_nats=2.5, zero_centred=centred
            )
            law = counter.draw(7, name, shape, scale)
            drawn = counter.draw(7, name, shape, scale, device="cuda")
            area.same(f"{name} drawn, centred {centred}", drawn, law)
            area.true(f"sum of {name}", tensor_checksum(drawn) == bits.mixsum(law))
    scale = counter.Scale.deviation(0.05)
    for index in PARTS:
        law = counter.draw(7, "large", LARGE, scale, index)
        drawn = counter.draw(7, "large", LARGE, scale, index, "cuda")
        area.same("a part of a large tensor drawn", drawn, law)
        found = tensor_checksum(drawn, shape=LARGE, index=index)
        wanted = tensor_checksum(law, shape=LARGE, index=index)
        area.true("sum of a part of a large tensor", found == wanted)
    random = torch.Generator().manual_seed(1)
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        x = (torch.randn(131, 7, 5, generator=random) * 50).to(dtype)
        area.true(f"sum of {dtype}", tensor_checksum(x.cuda()) == bits.mixsum(x))
    # More elements than are summed at a time, so that parts add up.
    x = torch.randn(3, wide.ELEMENTS // 2 + 5, generator=random).bfloat16()
    area.true("sum in parts", tensor_checksum(x.cuda()) == tensor_checksum(x))
    _transfer(area)


def _transfer(area: Area) -> None:
    """Tensors sent from the GPU arrive on it; an old copy and one changed byte are refused."""
    sent = {"a": torch.randn(33, 17).bfloat16().cuda(), "b": torch.randn(5).cuda()}
    live = {name: tensor_checksum(tensor) for name, tensor in sent.items()}

    def stale() -> None:
        old = sent | {"b": sent["b"] + 1}
        with transport.send(old.items(), step=1, contract_digest="", live=live):
            pass

    area.refuses("SB0710", stale)
    with transport.send(
        sent.items(), step=1, contract_digest="", size=1 << 16, live=live
    ) as manifest:

        def received() -> dict[str, torch.Tensor]:
            got = transport.receive(manifest, contract_digest="", names=sent, device="cuda")
            return dict(got)

        for name, tensor in received().items():
            area.same(f"{name} received", tensor, sent[name])
            area.true(f"{name} is on the GPU", tensor.is_cuda)
        with open(manifest.segment, "r+b") as segment:
            segment.write(b"\x55\x55")
        area.refuses("SB0705", received)
