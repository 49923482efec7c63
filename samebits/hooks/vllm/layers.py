"""What the patched linear and embedding layers call: vLLM's shapes, sums of `samebits.ops`.

Every function is reached only where its region is aligned: elsewhere upstream's code runs.
"""

from __future__ import annotations

import functools

import torch

from samebits import runtime
from samebits.errors import Refused
from samebits.hooks.vllm.plugin import wanted

__all__ = ["aligned", "embed", "linear", "lm_head", "multiplies", "row_parallel"]


@functools.cache
def aligned(region: str) -> bool:
    """True when this process computes `region` with its aligned operator; asked once."""
    return wanted() and runtime.aligned(region)


def multiplies(layer) -> bool:
    """True when the product of a linear layer is ours: `gemm.row` where ranks split K, else
    `gemm.bias` or `gemm.column`. All reach one method of vLLM's, which knows the layer only."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    if isinstance(layer, RowParallelLinear):
        return aligned("gemm.row")
    return aligned("gemm.column" if getattr(layer, "bias", None) is None else "gemm.bias")


def _group(size: int) -> torch.distributed.ProcessGroup | None:
    if size == 1:
        return None
    from vllm.distributed import get_tp_group

    return get_tp_group().device_group


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] bf16, weight [N, K] -> [T, N] bf16; column-parallel: ranks split N only."""
    from samebits.ops import gemm

    return gemm.linear(x, weight, bias)


def row_parallel(layer, x: torch.Tensor):
    """x [T, K / tp] bf16 -> [T, N] bf16 by the contract's leaves of K, the same for every tp.

    Returns what `RowParallelLinear.forward` returns. A bias or an unreduced result has no schedule.
    """
    from samebits.ops import gemm

    if layer.bias is not None or not layer.reduce_results:
        raise Refused(
            "SB0511",
            seen=f"{layer.prefix}: bias={layer.bias is not None}, "
            f"reduce_results={layer.reduce_results}",
            required="a row-parallel layer that reduces and has no bias",
            hint="samebits explain SB0511",
        )
    plan = runtime.contract().plan("gemm.row")
    out = gemm.row_parallel(x, layer.weight, plan, _group(layer.tp_size))
    return (out, None) if layer.return_bias else out


def lm_head(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] bf16, weight [V / tp, K] -> fp32 logits [T, V / tp], the accumulator unrounded."""
    from samebits.ops import gemm

    if bias is not None:
        raise Refused(
            "SB0511",
            seen="an output layer with a bias",
            required="an output layer without one",
            hint="samebits explain SB0511",
        )
    return gemm.lm_head(x, weight)


def embed(layer, ids: torch.Tensor) -> torch.Tensor:
    """ids [T] -> rows [T, H]; over ranks by selection, so that -0 stays -0."""
    from samebits.ops import embedding

    start = layer.shard_indices.padded_org_vocab_start_index
    return embedding.lookup(ids.long(), layer.weight, start=start, group=_group(layer.tp_size))
