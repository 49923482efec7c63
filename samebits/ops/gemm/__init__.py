"""Matrix products of bf16 operands with an fp32 accumulator, invariant to everything but their row.

Every output element is one dot product whose schedule (`reference.py`) depends on K and on the
number of leaves only. Inputs are bf16; weights are [N, K], contiguous. Anything else is refused
(SB0420 dtype or device, SB0421 shape, SB0413 layout). A NaN result carries no bit promise:
comparisons fail on every NaN. CUDA tensors go to `sm90`, whose schedule and bits are its own.

All functions are differentiable. Gradients are fp32 matrix products rounded once to bf16; they
carry no bit contract.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from samebits.bits import mixsum
from samebits.errors import Refused
from samebits.ops import registry, samples
from samebits.ops.checks import place, require_dtype, require_shape
from samebits.ops.gemm import cpu
from samebits.ops.scalar import LANES
from samebits.plan import ReductionPlan


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] bf16 times w [N, K] bf16, transposed, plus `bias` [N] bf16 -> [..., N] bf16.

    Lanes of fp32 fma over K, folded by halves; then the bias, widened, by one fp32 addition;
    rounded once. Served as `gemm.bias` with a bias, else as `gemm.column`. Refuses with SB0413,
    SB0420, SB0421.
    """
    if x.is_cuda:
        from samebits.ops.gemm import sm90

        return sm90.linear(x, w, bias)
    _check(x, w, bias)
    registry.count_served(region(bias), _rows(x))
    return _matmul(x, w, 1, torch.bfloat16, bias)


def region(bias: torch.Tensor | None) -> str:
    """The region that `linear` computes."""
    return "gemm.column" if bias is None else "gemm.bias"


def lm_head(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As `linear`, but returns the fp32 accumulator [..., N] without rounding."""
    if x.is_cuda:
        from samebits.ops.gemm import sm90

        return sm90.lm_head(x, w)
    _check(x, w, None)
    registry.count_served("gemm.lm_head", _rows(x))
    return _matmul(x, w, 1, torch.float32)


def row_parallel(
    x: torch.Tensor,
    w: torch.Tensor,
    plan: ReductionPlan,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """x [..., K_local] bf16 times w [N, K_local] bf16 -> [..., N] bf16, summed over `group`.

    K = K_local * group size is cut into `plan.leaves` leaves. Each rank computes its leaves as
    `linear` does, without rounding, and folds its subtree in fp32; the subtree roots are gathered
    (bytes only move) and folded in rank order; the root is rounded once. So the result does not
    depend on the group size. The backward has no collective: grad_x = grad_y @ w for the local
    slice. Refuses with SB0402 (K does not divide), SB0403 (group does not divide the leaves),
    SB0413, SB0420, SB0421.
    """
    if x.is_cuda:
        from samebits.ops.gemm import sm90

        return sm90.row_parallel(x, w, plan, group)
    _check(x, w, None)
    size, _ = place(group)
    local = plan.local(size)
    local.cuts(x.shape[-1])
    registry.count_served("gemm.row", _rows(x))
    if size == 1:
        return _matmul(x, w, local.leaves, torch.bfloat16)
    return _Matmul.apply(x, w, local.leaves, torch.bfloat16, group, None)


def _matmul(x, w, leaves, dtype, bias=None):
    if wants_gradient(x, w, bias):
        return _Matmul.apply(x, w, leaves, dtype, None, bias)
    return cpu.matmul(x, w, leaves, dtype, bias)


def wants_gradient(*operands: torch.Tensor | None) -> bool:
    """Whether a call has to be recorded for a backward pass."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)


def _over_ranks(x, w, leaves, group):
    mine = cpu.matmul(x, w, leaves, torch.float32)
    roots = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(roots, mine, group=group)
    return cpu.to_bf16(ReductionPlan.fold(roots))


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, leaves, dtype, group, bias):
        ctx.save_for_backward(x, w)
        if group is not None:
            return _over_ranks(x, w, leaves, group)
        return cpu.matmul(x, w, leaves, dtype, bias)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        g = grad.reshape(-1, grad.shape[-1]).float()
        grad_x, grad_w = _gradients(g, x, w, ctx.needs_input_grad)
        return grad_x, grad_w, None, None, None, bias_gradient(g, ctx.needs_input_grad[5])


def bias_gradient(g: torch.Tensor, needed: bool) -> torch.Tensor | None:
    """g [M, N] -> [N] bf16, its sum over rows in fp32, rounded once; None unless `needed`.

    The order is torch's for M rows: threads, and on a GPU blocks, share out the columns or fold
    partial sums in a fixed order.
    """
    return g.sum(0, dtype=torch.float32).to(torch.bfloat16) if needed else None


def _gradients(g, x, w, needed):
    grad_x = grad_w = None
    if needed[0]:
        grad_x = (g @ w.float()).to(torch.bfloat16).view_as(x)
    if needed[1]:
        grad_w = (g.t() @ x.reshape(-1, x.shape[-1]).float()).to(torch.bfloat16)
    return grad_x, grad_w


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


def _check(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    for name, tensor in (("x", x), ("w", w), ("bias", bias)):
        if tensor is not None:
            require_dtype(name, tensor, torch.bfloat16)
    require_shape("w", w, w.dim() == 2 and w.shape[1] > 0, "[N, K], K > 0")
    require_shape("x", x, x.shape[-1:] == w.shape[1:], f"[..., {w.shape[1]}]")
    if bias is not None:
        require_shape("bias", bias, bias.shape == w.shape[:1], f"[{w.shape[0]}]")
        require_dense_bias(bias)
    if not w.is_contiguous():
        raise _layout(f"w with strides {list(w.stride())}", "a contiguous [N, K] weight")


def require_dense_bias(bias: torch.Tensor) -> None:
    """A bias lies in contiguous memory, else SB0413."""
    if not bias.is_contiguous():
        raise _layout(f"bias with stride {bias.stride(0)}", "a contiguous bias")


def _layout(seen: str, required: str) -> Refused:
    return Refused("SB0413", seen=seen, required=required, hint="samebits explain SB0413")


def near_products(low: int, high: int) -> tuple[int, int]:
    """Exponents of a bias beside products of operands with exponents in [low, high)."""
    least = max(2 * low, -126)
    return least, max(2 * high, least + 4)


def _register(
    region: str,
    constants: dict[str, int | str],
    leaves: int,
    dtype: torch.dtype,
    biased: bool = False,
) -> None:
    def probe() -> int:
        # Many rows with a tail in K, where every term counts; and one row whose products are
        # subnormal, so that a process that flushes them answers differently.
        outputs = []
        for seed, (rows, width, length, low, high) in enumerate(
            ((9, 37, 8 * 21, -3, 3), (1, 24, 640, -70, -66))
        ):
            x = samples.bf16((rows, length), 2 * seed, low, high)
            w = samples.bf16((width, length), 2 * seed + 1, low, high)
            bias = samples.bf16((width,), 9, *near_products(low, high)) if biased else None
            # The accumulators too: rounding to bf16 hides most changes of order.
            for kind in (torch.float32, dtype):
                outputs.append(cpu.matmul(x, w, leaves, kind, bias).float().flatten())
        return mixsum(torch.cat(outputs))

    registry.register(
        registry.Implementation(
            region=region,
            id=f"{region}.cpu.1",
            platform="cpu",
            constants=constants,
            modules=(
                "samebits.plan",
                "samebits.ops.jit",
                "samebits.ops.scalar",
                "samebits.ops.vector",
                "samebits.ops.gemm",
                "samebits.ops.gemm.cpu",
            ),
            probe=probe,
        )
    )


_register("gemm.column", {"lanes": LANES, "rounding": "bf16"}, 1, torch.bfloat16)
_register(
    "gemm.bias",
    {"lanes": LANES, "bias": "fp32, before rounding", "rounding": "bf16"},
    1,
    torch.bfloat16,
    biased=True,
)
_register("gemm.row", {"lanes": LANES, "rounding": "bf16", "leaves": "plan"}, 8, torch.bfloat16)
_register("gemm.lm_head", {"lanes": LANES, "rounding": "none"}, 1, torch.float32)
