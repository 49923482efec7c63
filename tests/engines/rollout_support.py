"""Requests with what became of them: whole sequences, and decode against prefill by bits."""

from __future__ import annotations


def whole(asked, done) -> list[list[int]]:
    """Prompt and response of every request."""
    return [[*r.prompt, *c.tokens] for r, c in zip(asked, done, strict=True)]


def mismatches(asked, done, scores) -> int:
    """Sampled tokens whose decode logprob differs from the one of their prefill, by bits."""
    return sum(
        int((c.logprob_bits != s.logprob_bits[len(r.prompt) - 1 :]).sum())
        for r, c, s in zip(asked, done, scores, strict=True)
    )
