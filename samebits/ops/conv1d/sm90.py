"""Causal convolution on Hopper: checks, counts and gradients around the kernels of `triton.py`."""

from __future__ import annotations

import torch

from samebits.bits import mixsum
from samebits.ops import gpu, registry, samples
from samebits.ops.checks import require_shape
from samebits.ops.conv1d import Pair, check_window, triton, triton_backward
from samebits.ops.packed import host_checked, on_device

__all__ = ["advance", "varlen"]


def advance(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    exact: int | None = None,
) -> torch.Tensor | Pair:
    """`samebits.ops.conv1d.advance` on CUDA, bit for bit, without its checks of tables' values.

    The tables are integers on the GPU, which the host does not read, so that a call can be
    captured. Counts the rows of x. Refuses with SB0420, SB0421, SB0426.
    """
    x, weight = _operands(x, weight, exact)
    gpu.require_dtype("window", window, torch.bfloat16)
    check_window(window, weight)
    at, starts, context = on_device(
        x, slots=slots, starts=query_start_loc, context_lens=context_lens
    )
    pair = triton.launch(x.detach(), weight.detach(), window, at, starts, context, exact or 0)
    registry.count_served("gdn.conv", len(x))
    return pair[1] if exact is None else pair


def varlen(
    x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor, *, exact: int | None = None
) -> torch.Tensor | Pair:
    """`samebits.ops.conv1d.varlen` on CUDA, bit for bit.

    cu_seqlens on the CPU is checked (SB0483); on the GPU the caller answers for it. Refuses with
    SB0420, SB0421.
    """
    x, weight = _operands(x, weight, exact)
    place, _ = triton.places(host_checked(cu_seqlens, x), len(x), weight.shape[1])
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        pair = _Varlen.apply(x, weight, place, exact or 0)
    else:
        pair = triton.packed(x, weight, place, exact or 0)
    registry.count_served("gdn.conv", len(x))
    return pair[1] if exact is None else pair


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, place, exact):
        ctx.save_for_backward(x, weight, place)
        return triton.packed(x, weight, place, exact)

    @staticmethod
    def backward(ctx, *grads):
        x, weight, place = ctx.saved_tensors
        wide, y = (grad.contiguous() for grad in grads)
        return *triton_backward.gradients(x, weight, place, wide, y), None, None


def _operands(
    x: torch.Tensor, weight: torch.Tensor, exact: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, with neighbouring channels and taps; SB0420, SB0421."""
    gpu.prepare(x.device.index or 0)
    weight = weight.contiguous()
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    fits = weight.dim() == 2 and weight.numel() > 0
    gpu.require("weight", weight, torch.bfloat16, fits, "[C, W]")
    channels = weight.shape[0]
    fits = x.dim() == 2 and x.shape[1] == channels
    gpu.require("x", x, torch.bfloat16, fits, f"[T, {channels}]", dense=False)
    wide = exact is None or 0 <= exact <= channels
    require_shape("x", x, wide, f"[T, {exact} or more], of which {exact} are left in fp32")
    return x, weight


def _probe() -> int:
    x, weight = samples.bf16((9, 20), 5).cuda(), samples.bf16((20, 4), 6, -3, 2).cuda()
    window = torch.full((3, 3, 20), torch.nan).bfloat16()
    window[2] = samples.bf16((3, 20), 7)
    window = window.cuda()
    slots, starts, context = (
        torch.tensor(values, dtype=torch.int32, device=x.device)
        for values in ([0, 2], [0, 7, 9], [0, 5])
    )
    wide, y = triton.launch(x, weight, window, slots, starts, context, 8)
    return mixsum(torch.cat([part.float().flatten() for part in (wide, y, window[0], window[2])]))


registry.register(
    registry.Implementation(
        region="gdn.conv",
        id="gdn.conv.sm90.1",
        platform="sm90",
        constants={"activation": "silu", "exp": "exp32", "window": "bf16"},
        modules=(
            "samebits.ops.gpu",
            "samebits.ops.device",
            "samebits.ops.packed",
            "samebits.ops.silu_mul.triton",
            "samebits.ops.conv1d",
            "samebits.ops.conv1d.triton",
            "samebits.ops.conv1d.sm90",
        ),
        probe=_probe,
    )
)
