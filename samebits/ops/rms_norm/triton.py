"""RMSNorm on Hopper, plain and after a residual addition; the schedule is `sm90` in the README."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.errors import Refused
from samebits.ops import gpu
from samebits.ops.device import fold, reciprocal
from samebits.ops.rms_norm.reference_sm90 import NEAR

LONGEST = 16384
ELEMENTS = 2048  # at least, in one block; moves no bit


@triton.jit(do_not_specialize=["rows"])  # a captured batch must not need a kernel of its own
def _kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    eps,
    rows,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    NEAR: tl.constexpr,
    ADD: tl.constexpr,
    CENTRED: tl.constexpr,
):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDTH)
    inside = (i < rows)[:, None] & (j < N)[None, :]
    at = i[:, None].to(tl.int64) * N + j[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + at, x, mask=inside)
    wide = x.to(tl.float32)
    total = fold(wide * wide, ROWS, WIDTH, NEAR)
    shifted = tl.div_rn(total, tl.full((ROWS,), N, tl.float32)) + eps
    r = reciprocal(tl.sqrt_rn(shifted))
    weight = tl.load(weight_ptr + j, mask=j < N, other=0.0).to(tl.float32)
    if CENTRED:
        weight = 1.0 + weight
    y = (wide * r[:, None]) * weight[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False
) -> torch.Tensor:
    """x [..., n] bf16, weight [n] bf16, contiguous on CUDA -> [..., n] bf16.

    `zero_centred`: the factor is fp32 1 + weight. Refuses with SB0420, SB0421, and SB0452 where n
    is above LONGEST.
    """
    y = torch.empty_like(x)
    _launch(x, x, weight, y, y, eps, add=False, centred=zero_centred)
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm of the sum, the sum) with the sum x + residual rounded to bf16 before it is read.

    Shapes and refusals as in `rms_norm`.
    """
    y, added = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, y, added, eps, add=True, centred=False)
    return y, added


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    added: torch.Tensor,
    eps: float,
    add: bool,
    centred: bool,
) -> None:
    gpu.prepare(x.device.index or 0)
    n = weight.numel()
    gpu.require("weight", weight, torch.bfloat16, weight.dim() == 1 and n > 0, "[n]")
    gpu.require("x", x, torch.bfloat16, x.shape[-1:] == (n,), f"[..., {n}]")
    gpu.require("residual", residual, torch.bfloat16, residual.shape == x.shape, "the shape of x")
    if n > LONGEST:
        raise Refused(
            "SB0452",
            seen=f"rms_norm over {n} elements",
            required=f"at most {LONGEST}",
            hint="samebits explain SB0452",
        )
    rows = x.numel() // n
    width = max(NEAR, triton.next_power_of_2(n))
    block = max(1, ELEMENTS // width)
    if rows:
        _kernel[(triton.cdiv(rows, block),)](
            x, residual, weight, y, added, eps, rows,
            N=n, WIDTH=width, ROWS=block, NEAR=NEAR, ADD=add, CENTRED=centred,
            num_warps=max(4, min(16, width // 1024)), **gpu.POLICY,
        )  # fmt: skip
