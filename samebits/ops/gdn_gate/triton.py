"""Log decay and write strength on Hopper: the operations of `reference.py`, so the CPU's bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.ops import gpu
from samebits.ops.device import exp32, sigmoid32, softplus32

BLOCK = 512  # elements in one block; moves no bit


@triton.jit
def _kernel(
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, count, HV, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    head = at % HV
    a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
    rate = exp32(tl.load(A_log_ptr + head))
    # A product by -1 changes the sign alone; Triton's unary minus is 0 - x.
    g = (rate * -1.0) * softplus32(a + tl.load(dt_bias_ptr + head).to(tl.float32))
    tl.store(g_ptr + at, g, mask=inside)
    tl.store(beta_ptr + at, sigmoid32(b), mask=inside)


def gate(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b [T, HV] bf16, A_log [HV] fp32, dt_bias [HV] bf16, on CUDA -> g, beta [T, HV] fp32.

    Forward only. Contiguous tensors, else SB0420, SB0421.
    """
    gpu.prepare(a.device.index or 0)
    gpu.require("a", a, torch.bfloat16, a.dim() == 2 and a.shape[1] > 0, "[T, HV]")
    gpu.require("b", b, torch.bfloat16, b.shape == a.shape, str(list(a.shape)))
    heads = f"[{a.shape[1]}]"
    gpu.require("A_log", A_log, torch.float32, A_log.shape == a.shape[1:], heads)
    gpu.require("dt_bias", dt_bias, torch.bfloat16, dt_bias.shape == a.shape[1:], heads)
    return launch(a, b, A_log, dt_bias)


def launch(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gate` without checks."""
    g, beta = (torch.empty_like(a, dtype=torch.float32) for _ in range(2))
    count = a.numel()
    if count:
        _kernel[(triton.cdiv(count, BLOCK),)](
            a, b, A_log, dt_bias, g, beta, count, a.shape[1],
            BLOCK=BLOCK, num_warps=4, **gpu.POLICY,
        )  # fmt: skip
    return g, beta
