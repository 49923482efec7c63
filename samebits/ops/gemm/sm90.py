"""Matrix products on Hopper: checks, tiles, counts, gradients; schedule: `sm90` in the README.

Operands are bf16 tensors on the current CUDA device. The weight is read in place, so it must be
contiguous from a 16-byte aligned address (SB0413). A shape outside of the pinned table is admitted
by a live bit test when it is first met (`admission_sm90`); engines call `admit` for every layer
when they load, since a capture of a graph cannot wait for it (SB0454).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from samebits.bits import mixsum
from samebits.errors import Refused
from samebits.ops import gpu, registry, samples
from samebits.ops.checks import place, require_shape
from samebits.ops.gemm import admission_sm90 as admission
from samebits.ops.gemm import (
    bias_gradient,
    near_products,
    region,
    require_dense_bias,
    triton,
    wants_gradient,
)
from samebits.ops.gemm.admission_sm90 import admit, admitted
from samebits.plan import ReductionPlan

__all__ = ["admit", "admitted", "linear", "lm_head", "row_parallel"]

_CONSTANTS: dict[str, int | str] = {"mma": "bf16, 16 terms", "kept_bits": 25}


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`samebits.ops.gemm.linear` on CUDA: one chain of MMA over K, then the bias in fp32; rounded
    once.

    Refuses with SB0413, SB0420, SB0421, SB0453 to SB0455.
    """
    _check(x, w, bias)
    y = _matmul(x, w, 1, torch.bfloat16, None, bias)
    registry.count_served(region(bias), _rows(x))
    return y


def lm_head(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As `linear`, but returns the fp32 accumulator [..., N] without rounding."""
    _check(x, w, None)
    y = _matmul(x, w, 1, torch.float32, None)
    registry.count_served("gemm.lm_head", _rows(x))
    return y


def row_parallel(
    x: torch.Tensor,
    w: torch.Tensor,
    plan: ReductionPlan,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`samebits.ops.gemm.row_parallel` on CUDA: one chain of MMA for each leaf, folded in fp32.

    Subtree roots of a group are gathered and folded in rank order, so the result does not depend
    on its size. Refuses with SB0402, SB0403, SB0413, SB0420, SB0421, SB0453 to SB0455.
    """
    _check(x, w, None)
    size, _ = place(group)
    local = plan.local(size)
    local.cuts(x.shape[-1])
    y = _matmul(x, w, local.leaves, torch.bfloat16, group if size > 1 else None)
    registry.count_served("gemm.row", _rows(x))
    return y


def _matmul(x, w, leaves, dtype, group, bias=None):
    if wants_gradient(x, w, bias):
        return _Matmul.apply(x, w, leaves, dtype, group, bias)
    return _forward(x, w, leaves, dtype, group, bias)


def _forward(x, w, leaves, dtype, group, bias=None):
    if group is None:
        return _product(x, w, leaves, dtype, bias)
    mine = _product(x, w, leaves, torch.float32)
    roots = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(roots, mine, group=group)
    return ReductionPlan.fold(roots).to(dtype)


def _product(
    x: torch.Tensor,
    w: torch.Tensor,
    leaves: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[..., N] of dtype: the root of the leaf tree, plus the bias."""
    n, k = w.shape
    rows = x.detach().reshape(-1, k).contiguous()
    if rows.data_ptr() % 16:
        rows = rows.clone()
    m, shape = rows.shape[0], (n, k, leaves, dtype)
    y = admission.output(m, n, dtype, rows)
    if m and bias is not None:
        tile = admission.tile_for(m, shape, biased=True)
        triton.launch(tile, rows, w.detach(), y, leaves, bias.detach())
    elif m:
        tile = triton.tile_for(m, shape) or admission.tile_for(m, shape)
        triton.launch(tile, rows, w.detach(), y, leaves)
    return y[:, :n].contiguous().view(*x.shape[:-1], n)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, leaves, dtype, group, bias):
        ctx.save_for_backward(x, w)
        return _forward(x, w, leaves, dtype, group, bias)

    @staticmethod
    def backward(ctx, grad):
        """torch's bf16 products with fp32 accumulators; fp32 gradients of `lm_head` are rounded."""
        x, w = ctx.saved_tensors
        g = grad.reshape(-1, grad.shape[-1]).to(torch.bfloat16)
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = (g @ w).view_as(x)
        if ctx.needs_input_grad[1]:
            grad_w = g.t() @ x.reshape(-1, x.shape[-1])
        return grad_x, grad_w, None, None, None, bias_gradient(g, ctx.needs_input_grad[5])


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


def _check(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    gpu.require_dtype("x", x, torch.bfloat16)
    gpu.require_dtype("w", w, torch.bfloat16)
    require_shape("w", w, w.dim() == 2 and w.numel() > 0, "[N, K], N > 0, K > 0")
    require_shape("x", x, x.shape[-1:] == w.shape[1:], f"[..., {w.shape[1]}]")
    if bias is not None:
        gpu.require_dtype("bias", bias, torch.bfloat16)
        require_shape("bias", bias, bias.shape == w.shape[:1], f"[{w.shape[0]}]")
        require_dense_bias(bias)
    if not w.is_contiguous() or w.data_ptr() % 16:
        raise Refused(
            "SB0413",
            seen=f"w with strides {list(w.stride())} at {w.data_ptr() % 16} bytes modulo 16",
            required="a contiguous [N, K] weight at a multiple of 16 bytes",
            hint="samebits explain SB0413",
        )


def _probe(leaves: int, dtype: torch.dtype, biased: bool = False) -> int:
    """Accumulators of many rows; and one row of subnormal products, with x on the right."""
    outputs = []
    for rows, n, k, low, high, kind in (
        (9, 40, 8 * 48, -3, 3, torch.float32),
        (1, 24, 640, -70, -66, dtype),
    ):
        x = samples.bf16((rows, k), rows, low, high).cuda()
        w = samples.bf16((n, k), rows + 1, low, high).cuda()
        tile = next(t for t in admission.tiles_of((n, k, leaves, kind)) if rows <= t.rows)
        bias = samples.bf16((n,), 3, *near_products(low, high)).cuda() if biased else None
        y = x.new_empty((rows, n), dtype=kind)
        triton.launch(tile, x, w, y, leaves, bias)
        outputs.append(y.float().flatten())
    return mixsum(torch.cat(outputs))


def _register(
    region: str,
    constants: dict[str, int | str],
    leaves: int,
    dtype: torch.dtype,
    biased: bool = False,
) -> None:
    registry.register(
        registry.Implementation(
            region=region,
            id=f"{region}.sm90.1",
            platform="sm90",
            constants=_CONSTANTS | constants,
            modules=(
                "samebits.plan",
                "samebits.ops.gpu",
                "samebits.ops.gemm",
                "samebits.ops.gemm.kernels_sm90",
                "samebits.ops.gemm.gluon_leaves",
                "samebits.ops.gemm.smallest_sm90",
                "samebits.ops.gemm.operands_sm90",
                "samebits.ops.gemm.triton",
                "samebits.ops.gemm.admission_sm90",
                "samebits.ops.gemm.sm90",
            ),
            probe=lambda: _probe(leaves, dtype, biased),
        )
    )


_register("gemm.column", {"rounding": "bf16"}, 1, torch.bfloat16)
_register(
    "gemm.bias",
    {"bias": "fp32, before rounding", "rounding": "bf16"},
    1,
    torch.bfloat16,
    biased=True,
)
_register("gemm.row", {"rounding": "bf16", "leaves": "plan"}, 8, torch.bfloat16)
_register("gemm.lm_head", {"rounding": "none"}, 1, torch.float32)
