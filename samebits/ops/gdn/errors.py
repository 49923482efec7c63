"""Error of both schedules, and of the gradients, against the recurrence in float64.

    python -m samebits.ops.gdn.errors

prints the tables of README.md (under a minute on two cores); relative errors in the 2-norm.
"""

from __future__ import annotations

import torch

from samebits.ops import gdn
from samebits.ops.gdn import oracle, scenarios

TOKENS, KEY_HEADS, HEADS, DIM = 200, 2, 4, 128
GRADIENT_TOKENS = (1, 63, 64, 65, 130)
LEAVES = ("q", "k", "v", "g", "beta", "initial_state")


def relative(value: torch.Tensor, truth: torch.Tensor) -> float:
    """||value - truth|| / ||truth|| in the 2-norm; 0 if both are zero."""
    distance = (value.double() - truth).norm()
    return float(distance / truth.norm()) if distance else 0.0


def forward_errors(name: str, schedule: str) -> tuple[float, float]:
    """Of o over `TOKENS` rows, and of the boundary state that the last full chunk leaves."""
    operands = scenarios.make(name, TOKENS, KEY_HEADS, HEADS, DIM, DIM)
    scale = DIM**-0.5
    spec = gdn.state_spec(schedule, KEY_HEADS, HEADS, DIM, DIM)
    state = [torch.zeros((1, *shape), dtype=dtype) for _, shape, dtype in spec]
    zero, ends = torch.tensor([0]), torch.tensor([0, TOKENS])
    o = gdn.advance(*operands, state, zero, ends, zero, scale=scale, schedule=schedule)
    cut = TOKENS // gdn.CHUNK * gdn.CHUNK
    before, final = oracle.recurrence([x[:cut] for x in operands], [0, cut], scale)
    after, _ = oracle.recurrence([x[cut:] for x in operands], [0, TOKENS - cut], scale, final)
    return relative(o, torch.cat([before, after])), relative(state[0], final)


def gradient_errors(
    name: str, tokens: int, schedule: str, *, key_heads: int = 1, heads: int = 2, dim: int = 32
) -> dict[str, float]:
    """Of `varlen`'s gradient into every operand, for one random output gradient."""
    operands = scenarios.make(name, tokens, key_heads, heads, dim, dim)
    random = torch.Generator().manual_seed(tokens)
    state = torch.randn(1, heads, dim, dim, generator=random)
    grad = torch.randn(tokens, heads, dim, generator=random).bfloat16()
    scale = dim**-0.5
    ours = [x.clone().requires_grad_() for x in (*operands, state)]
    q, k, v, g, beta, h = ours
    starts = torch.tensor([0, tokens])
    gdn.varlen(q, k, v, g, beta, starts, scale, schedule, initial_state=h).backward(grad)
    exact = [x.double().requires_grad_() for x in (*operands, state)]
    truth, _ = oracle.recurrence(exact[:5], [0, tokens], scale, exact[5])
    truth.backward(grad.double())
    return {
        leaf: relative(a.grad, b.grad)
        for leaf, a, b in zip(LEAVES, ours, exact, strict=True)
        if a.grad is not None and b.grad is not None
    }


def tables() -> str:
    """Both tables in Markdown."""
    columns = [f"{schedule} {what}" for schedule in gdn.SCHEDULES for what in ("o", "state")]
    lines = [f"| inputs | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in scenarios.NAMES:
        errors = [e for schedule in gdn.SCHEDULES for e in forward_errors(name, schedule)]
        lines.append(f"| {name} | " + " | ".join(f"{e:.2e}" for e in errors) + " |")
    lines += ["", f"| tokens | {' | '.join(LEAVES)} |", "|---" * (len(LEAVES) + 1) + "|"]
    for tokens in GRADIENT_TOKENS:
        errors = list(gradient_errors("n", tokens, "chunk_row").values())
        lines.append(f"| {tokens} | " + " | ".join(f"{e:.1e}" for e in errors) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
