"""Random weights without a file: each element is a function of (seed, tensor name, flat index).

Any shard of any tensor can be drawn alone, on any machine, with the same bits:

    hash   splitmix64 finaliser of key + (index + 1) * golden; key = first 8 bytes of
           sha256("seed\\0name")
    draw   sum of the hash's four 16-bit fields minus 131070: an integer, near Gaussian,
           mean 0, standard deviation 37837.2, |draw| <= 131070
    value  (offset + draw * multiplier) * 2**-exponent: at most 24 significant bits, so exact in
           fp32; then one rounding (nearest even) to bf16

Scales follow the tensor's role, so that activations keep a norm near 1 per element and the
entropy of the next-token distribution lies between 1 and 4 nats: flat logits, which vLLM's
`dummy` format gives, would make every comparison easy.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from samebits.bits import GOLDEN, splitmix64
from samebits.errors import Refused
from samebits.weights import wide
from samebits.weights.checksums import Index, axis_offsets

_DRAW_DEVIATION = math.sqrt(4 * (65536**2 - 1) / 12)
_MEAN = 131070  # of the sum of four 16-bit fields
_LN2 = 0.6931471805599453
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Scale:
    """value = (offset + draw * multiplier) * 2**-exponent."""

    multiplier: int
    exponent: int
    offset: int = 0

    @staticmethod
    def deviation(target: float) -> Scale:
        """Standard deviation `target` (up to 1/32 of it), with a 5-bit multiplier."""
        per_draw = target / _DRAW_DEVIATION
        exponent = 4 - math.frexp(per_draw)[1] + 1
        return Scale(round(math.ldexp(per_draw, exponent)), exponent)

    def around(self, mean: int) -> Scale:
        """The same spread around an integer."""
        return Scale(self.multiplier, self.exponent, mean << self.exponent)


_NORM = Scale(1, 17, 1 << 17)  # 1 with standard deviation 0.29, always positive
_BIAS = Scale.deviation(0.125)
_ZERO_CENTRED = Scale(1, 17)  # what is added to 1, with standard deviation 0.29
_A_LOG = Scale.deviation(0.5)
# softplus(-3 + N(0, 1)) is near 0.05: a state that remembers some 20 tokens, from 3 to 200.
_DT_BIAS = Scale.deviation(0.5).around(-3)


def scale_of(
    name: str,
    shape: Sequence[int],
    *,
    tied: bool,
    entropy_nats: float,
    zero_centred: bool = False,
) -> Scale:
    """The scale of a tensor by the role that its Hugging Face checkpoint name gives it.

    `tied` says that the embedding also serves as output head; `entropy_nats` is the aimed entropy
    of the next-token distribution; `zero_centred` that norms add 1 to their weight, all but the
    gated norm of linear attention. Raises Refused SB0703 for a name that fits no role.
    """
    if name.endswith("norm.weight") and len(shape) == 1:
        plain = not zero_centred or name.endswith("linear_attn.norm.weight")
        return _NORM if plain else _ZERO_CENTRED
    if name.endswith("linear_attn.A_log"):
        return _A_LOG
    if name.endswith("linear_attn.dt_bias"):
        return _DT_BIAS
    if name.endswith("linear_attn.conv1d.weight") and len(shape) == 3:
        return Scale.deviation(1 / math.sqrt(shape[2]))
    if re.search(r"\.linear_attn\.(in_proj_(qkv|z|b|a)|out_proj)\.weight$", name):
        return Scale.deviation(1 / math.sqrt(shape[1]))
    if re.search(r"_proj\.bias$", name) and len(shape) == 1:
        return _BIAS
    if name == "lm_head.weight" or (name == "model.embed_tokens.weight" and tied):
        return _head(shape[0], shape[1], entropy_nats)
    if name == "model.embed_tokens.weight":
        return Scale.deviation(1.0)
    if re.search(r"\.(q|k|v|o|gate|up|down)_proj\.weight$", name) and len(shape) == 2:
        return Scale.deviation(1 / math.sqrt(shape[1]))
    raise Refused(
        "SB0703",
        seen=f"`{name}` of shape {tuple(shape)}",
        required="a norm, projection, embedding, output head or part of linear attention",
        hint="samebits explain SB0703",
    )


def _head(vocabulary: int, hidden: int, entropy_nats: float) -> Scale:
    """Logits of deviation s over V tokens have an entropy near ln V - s*s/2."""
    most = vocabulary.bit_length() * _LN2  # not log(): its last bit may depend on the machine
    return Scale.deviation(math.sqrt(max(1.0, 2 * (most - entropy_nats))) / math.sqrt(hidden))


def draw(
    seed: int,
    name: str,
    shape: Sequence[int],
    scale: Scale,
    index: Index | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """bf16 tensor logical[index] of the logical tensor `name` of `shape` (whole without `index`).

    `index` is read as by `checksums.axis_offsets`. Drawn on `device`, with the same bits on all: by
    numpy on a CPU, by torch elsewhere.
    """
    key = np.frombuffer(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "<u8")[0]
    offsets = axis_offsets(tuple(shape), index)
    sizes = [o.size for o in offsets]
    if torch.device(device).type != "cpu":
        return _on_device(key, offsets, scale, torch.device(device)).view(sizes)
    flat = np.zeros((1,) * len(offsets), np.uint64)
    for axis, values in enumerate(offsets):
        flat = flat + values.reshape([-1 if a == axis else 1 for a in range(len(offsets))])
    out = np.empty(flat.size, np.float32)
    flat = flat.ravel()
    for start in range(0, flat.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        out[block] = _values(key, flat[block], scale)
    return torch.from_numpy(out.reshape(sizes)).to(torch.bfloat16)


def _on_device(
    key: np.uint64, offsets: Sequence[np.ndarray], scale: Scale, device: torch.device
) -> torch.Tensor:
    """bf16 [rows, columns] of `wide.flat_index`, the values of `_values`.

    Integers of at most 24 bits are exact in fp32, and so is their product with a power of two.
    """
    rows, columns = wide.flat_index(offsets, device)
    out = torch.empty((len(rows), len(columns)), dtype=torch.bfloat16, device=device)
    for span in wide.spans(*out.shape):
        draws = wide.fields(wide.hashed(key, rows[span, None] + columns)).sub_(_MEAN)
        integers = draws.mul_(scale.multiplier).add_(scale.offset)
        out[span] = integers.float().mul_(2.0**-scale.exponent)
    return out


def _values(key: np.uint64, flat: np.ndarray, scale: Scale) -> np.ndarray:
    with np.errstate(over="ignore"):
        hashed = splitmix64(key + (flat + np.uint64(1)) * GOLDEN)
    draws = hashed.view(np.uint16).reshape(-1, 4).sum(axis=1, dtype=np.int64) - _MEAN
    integers = scale.offset + draws * scale.multiplier
    return np.ldexp(integers.astype(np.float32), -scale.exponent)
