"""Out-of-tree layers: vLLM instantiates these instead of its own classes of the same name."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from samebits import runtime
from samebits.errors import Refused
from samebits.ops import rms_norm, rotary, silu_mul


class AlignedRMSNorm(RMSNorm):
    """x [..., H] bf16; with a residual, x + residual is rounded to bf16 before it is normed."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.variance_size_override is not None or not self.has_weight:
            raise Refused(
                "SB0511",
                seen=f"RMSNorm over {self.variance_size_override}, weight {self.has_weight}",
                required="RMSNorm over the whole last dimension, with a weight",
                hint="samebits explain SB0511",
            )

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        """Normed x, and with a residual also the sum of both, [..., H] bf16."""
        if residual is None:
            return rms_norm.rms_norm(x, self.weight.data, self.variance_epsilon)
        residual = x + residual
        return rms_norm.rms_norm(residual, self.weight.data, self.variance_epsilon), residual


class AlignedSiluAndMul(SiluAndMul):
    """gate_up [T, 2F] bf16 -> [T, F] bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, 2F] bf16, gate first -> [T, F] bf16."""
        return silu_mul.silu_mul(x)


class AlignedRotaryEmbedding(RotaryEmbedding):
    """query [T, Hq * D], key [T, Hkv * D] bf16, turned by the shared fp32 table."""

    def __init__(self, *args, **kwargs) -> None:
        kwargs["init_cache"] = False  # vLLM's own table is bf16 and not used
        super().__init__(*args, **kwargs)
        if not self.is_neox_style:
            raise Refused(
                "SB0511",
                seen="interleaved rotary embedding",
                required="the halves layout",
                hint="samebits explain SB0511",
            )
        with torch.device("cpu"):  # vLLM builds layers with the model's device as the default
            table = rotary.table(self.max_position_embeddings, self.rotary_dim, self.base)
        self.register_buffer("table", table.to(torch.get_default_device()), persistent=False)

    def forward(self, positions, query, key=None):
        """positions [T] int64; query and key turned out of place, None where there is no key."""

        def turn(x: torch.Tensor) -> torch.Tensor:
            heads = x.reshape(x.shape[0], -1, self.head_size)
            return rotary.apply(heads, positions, self.table).view(x.shape)

        return turn(query), None if key is None else turn(key)


def register() -> None:
    """Register the classes of aligned regions with vLLM's out-of-tree registry; once a process."""
    if runtime.aligned("norm.rms"):
        RMSNorm.register_oot(AlignedRMSNorm, name="RMSNorm")
    if runtime.aligned("act.silu_mul"):
        SiluAndMul.register_oot(AlignedSiluAndMul, name="SiluAndMul")
    if runtime.aligned("rope"):
        RotaryEmbedding.register_oot(AlignedRotaryEmbedding, name="RotaryEmbedding")
