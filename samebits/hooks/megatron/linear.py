"""Megatron's parallel linear layers on the shared GEMM.

Weights, shards and gradients stay Megatron's; only the product and its sum over ranks are ours.
Shapes: input [..., K] bf16, weight [N, K] bf16, bias [N] bf16 of column-parallel layers that have
one, output [..., N] bf16 (fp32 for the output layer).
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

from samebits import runtime
from samebits.errors import Refused
from samebits.ops import gemm


def _refuse_unproved(layer: ColumnParallelLinear | RowParallelLinear) -> None:
    """SB0604, SB0605 for options under which the layer would add or communicate in its own way."""
    if layer.config.sequence_parallel or layer.is_expert:
        raise Refused(
            "SB0604",
            seen=f"sequence_parallel={layer.config.sequence_parallel}, is_expert={layer.is_expert}",
            required="both off",
            hint="samebits explain SB0604",
        )
    # A bias that is returned would be added by someone else, after the rounding.
    scheduled = type(layer) is ColumnParallel and not layer.skip_bias_add
    bias = layer.bias is not None and not scheduled
    if bias or layer.gradient_accumulation_fusion:
        raise Refused(
            "SB0605",
            seen=f"{type(layer).__name__} with bias={bias}, "
            f"gradient_accumulation_fusion={layer.gradient_accumulation_fusion}",
            required="both off, but for a bias that a column-parallel layer itself adds",
            hint="samebits explain SB0605",
        )


class ColumnParallel(ColumnParallelLinear):
    """N is split over ranks, K is not: every output element is one sum, on one rank."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _refuse_unproved(self)

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias) -> torch.Tensor:
        return gemm.linear(x, weight, bias)

    def _forward_impl(self, input, weight, bias=None, *args, allreduce_dgrad=False, **kwargs):
        # Megatron hands the input over untouched when the layer itself is to reduce its gradient.
        if allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        return self._product(input, weight, bias)


class OutputLayer(ColumnParallel):
    """Vocabulary projection that keeps the fp32 accumulator: output [..., V / ranks] fp32."""

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        return gemm.lm_head(x, weight)


class RowParallel(RowParallelLinear):
    """K is split over ranks in whole subtrees of the contract's plan for `gemm.row`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _refuse_unproved(self)
        self.plan = runtime.contract().plan("gemm.row")
        self.plan.cuts(self.input_size)
        self.plan.local(self.tp_group.size())

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """input_ [s, b, K / ranks] -> ([s, b, N], None)."""
        return row_product(input_, self.weight, self.plan, self.tp_group), None


def row_product(x, weight, plan, group) -> torch.Tensor:
    """The row-parallel product, or its planted fault for the negative control."""
    if runtime.fault() == "rank_order_sum":
        return _rank_order_sum(x, weight, group)
    return gemm.row_parallel(x, weight, plan, group=group if group.size() > 1 else None)


def _rank_order_sum(x, weight, group) -> torch.Tensor:
    """Planted fault: every rank rounds its partial product, then a native all-reduce adds."""
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

    return reduce_from_tensor_model_parallel_region(gemm.linear(x, weight), group=group)


def output_layer(default: type) -> type:
    """Class of the model's output layer: ours when aligned, else Megatron's choice."""
    return OutputLayer if runtime.aligned("gemm.lm_head") else default
