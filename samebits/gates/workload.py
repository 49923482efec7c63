"""Turn recipe and prompts into capsules, and engine answers into streams."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from samebits import prompts
from samebits.engines.rollout_wire import Completion, Request, Score
from samebits.gates import capsule, pages
from samebits.gates.streams import Stream
from samebits.recipe import Recipe

# Sequences of the control capsule are numbered from here, so that streams never mix.
CONTROL_BASE = 10_000
_LOW = (1 << 64) - 1


def main(
    recipe: Recipe, model: Path, count: int, max_tokens: int, budget: int
) -> list[capsule.Request]:
    """Requests of the measured arm: the scheduler's corners, then real prompts if there are any."""
    if recipe.gdn_schedule is not None:
        from samebits.ops import gdn

        sizes: dict[str, int] = {
            "vocabulary": recipe.config["vocab_size"],
            "chunk": gdn.CHUNK,
            "page": recipe.engine["block_size"],
            "max_tokens": max_tokens,
            "count": count,
            "seed": capsule.SEEDS["capsule"],
        }
        if pages.large(recipe.platform, recipe.engine["block_size"]):
            return capsule.large_paged(**sizes)
        return capsule.chunked(**sizes, max_model_len=recipe.engine["max_model_len"])
    requests = capsule.synthetic(
        vocabulary=recipe.config["vocab_size"],
        block_size=recipe.engine["block_size"],
        partition=recipe.attention_partition,
        budget=budget,
        max_model_len=recipe.engine["max_model_len"],
        max_tokens=max_tokens,
        count=count,
        seed=capsule.SEEDS["capsule"],
    )
    for index, ids in enumerate(_prompts(recipe, model, count)):
        slot = count - 1 - index
        if slot < capsule.CORNERS:
            break
        requests[slot] = capsule.Request(tuple(ids), 11_000 + slot, max_tokens, "prompt")
    return requests


def long(recipe: Recipe, tokens: int, max_tokens: int) -> capsule.Request:
    """A request with a prompt of so many drawn ids."""
    draw = random.Random(capsule.LONG_SEED)
    ids = tuple(draw.randrange(3, recipe.config["vocab_size"]) for _ in range(tokens))
    return capsule.Request(ids, 14_000, max_tokens, "long")


def control(
    recipe: Recipe, model: Path, count: int, max_tokens: int, prompt: int = 64
) -> list[capsule.Request]:
    """Requests of the negative controls: short, because stock operators may be slow.

    prompt   their drawn prompts are shorter than this
    """
    requests = capsule.synthetic(
        vocabulary=recipe.config["vocab_size"],
        block_size=recipe.engine["block_size"],
        partition=recipe.attention_partition,
        budget=prompt // 2,
        max_model_len=recipe.engine["max_model_len"],
        max_tokens=max_tokens,
        count=capsule.CORNERS + count,
        seed=capsule.SEEDS["control"],
    )[capsule.CORNERS :]
    for index, ids in enumerate(_prompts(recipe, model, count // 2)):
        requests[index] = capsule.Request(tuple(ids), 13_000 + index, max_tokens, "prompt")
    return requests


def _prompts(recipe: Recipe, model: Path, count: int) -> list[Sequence[int]]:
    """Token ids of real prompts; none for a case that has no prompt file."""
    if not prompts.path(recipe).exists():
        return []
    return [prompt.ids for prompt in prompts.load(recipe, prompts.tokenizer_of(model))[:count]]


def to_engine(requests: Sequence[capsule.Request]) -> list[Request]:
    """The requests as the rollout engine takes them; a response has its full length."""
    return [Request(r.prompt, r.max_tokens, r.seed, ignore_eos=True) for r in requests]


def sequences(
    requests: Sequence[capsule.Request], completions: Sequence[Completion]
) -> list[list[int]]:
    """Prompt and response of every request, as token ids."""
    return [[*r.prompt, *c.tokens] for r, c in zip(requests, completions, strict=True)]


def _digest_rows(found: dict[int, int] | None, positions: range) -> np.ndarray | None:
    if not found:
        return None
    rows = np.zeros((len(positions), 2), np.uint64)
    for i, position in enumerate(positions):
        digest = found.get(position, 0)
        rows[i] = digest & _LOW, digest >> 64
    return rows


def decoded(
    requests: Sequence[capsule.Request],
    completions: Sequence[Completion],
    digests: dict[str, dict[int, int]] | None = None,
    base: int = 0,
) -> Stream:
    """Stream of the sampled tokens, as decode computed them."""
    stream = Stream()
    for index, (request, done) in enumerate(zip(requests, completions, strict=True)):
        start = len(request.prompt)
        found = (digests or {}).get(done.request_id)
        rows = _digest_rows(found, range(start, start + len(done.tokens)))
        stream.add(base + index, start, done.tokens, done.logprob_bits, rows)
    return stream


def scored(
    whole: Sequence[Sequence[int]],
    scores: Sequence[Score],
    digests: dict[str, dict[int, int]] | None = None,
    base: int = 0,
) -> Stream:
    """Stream of whole sequences, as prefill computed them."""
    stream = Stream()
    for index, (tokens, score) in enumerate(zip(whole, scores, strict=True)):
        rows = _digest_rows((digests or {}).get(score.request_id), range(1, len(tokens)))
        stream.add(base + index, 1, tokens[1:], score.logprob_bits, rows)
    return stream


def trained(whole: Sequence[Sequence[int]], scores, base: int = 0) -> Stream:
    """Stream of whole sequences, as the trainer scored them (`engines.trainer.Scores`)."""
    stream = Stream()
    for index, (tokens, logprobs) in enumerate(zip(whole, scores.logprobs, strict=True)):
        rows = None
        if scores.digests is not None:
            values = [int(d, 16) for d in scores.digests[index]]
            rows = np.array([[v & _LOW, v >> 64] for v in values], np.uint64).reshape(-1, 2)
        stream.add(base + index, 1, tokens[1:], logprobs, rows)
    return stream
