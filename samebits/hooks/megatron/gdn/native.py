"""What Megatron's own gated delta net takes from flash-linear-attention, in torch.

Megatron's deterministic mode computes the rule and the convolution in torch already; this is the
one function it still lacks on a host without that package. For the negative control only.
"""

from __future__ import annotations

import torch


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., n] -> x / sqrt(sum(x * x) + eps) over the last dimension, in fp32, in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
