"""The device of this process and its random state, for code that assumes CUDA.

With a CUDA device the answers are upstream's own; without one they name the CPU, so that the same
Megatron source tree serves both kinds of host.
"""

from __future__ import annotations

import torch


def current() -> torch.device:
    """The current CUDA device, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rng_state() -> torch.Tensor:
    """State of the current device's default generator (uint8)."""
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def seed(value: int) -> None:
    """Seed the current device's default generator."""
    if torch.cuda.is_available():
        torch.cuda.manual_seed(value)
    else:
        torch.random.default_generator.manual_seed(value)
