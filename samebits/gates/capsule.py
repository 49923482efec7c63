"""The workload of a case: requests chosen so that every hazard of its legs happens.

A request's identity (its index) and its token ids are the capsule; every arm replays the same.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Requests of `synthetic` that stand for one corner each; random ones follow.
CORNERS = 12
# What requests of the measured arm and of the negative controls are drawn from.
SEEDS = {"capsule": 11, "control": 13}
# What the ids of a long prompt are drawn from.
LONG_SEED = 14
# Positions of the two identical prompts with different seeds, in every capsule.
TWINS = (6, 7)


@dataclass(frozen=True)
class Request:
    """One prompt: token ids, sampling seed, length of the response to sample."""

    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    tag: str


def synthetic(
    *,
    vocabulary: int,
    block_size: int,
    partition: int,
    budget: int,
    max_model_len: int,
    max_tokens: int,
    count: int,
    seed: int,
) -> list[Request]:
    """Requests of random ids: one for each corner of the scheduler, then random ones up to `count`.

    Lengths: one token, exactly one block, block +- 1, exactly the step budget, over it (so that a
    prompt is split), two identical prompts with different seeds, a long shared prefix, and more
    than one attention partition.
    """
    draw = random.Random(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, vocabulary) for _ in range(n))

    longest = max_model_len - max_tokens - 1
    prefix = ids(min(4 * block_size, longest - 8))
    twin = ids(block_size + 3)
    corner: list[tuple[str, tuple[int, ...]]] = [
        ("one-token", ids(1)),
        ("one-block", ids(block_size)),
        ("block-minus-one", ids(block_size - 1)),
        ("block-plus-one", ids(block_size + 1)),
        ("budget", ids(min(budget, longest))),
        ("over-budget", ids(min(2 * budget + 5, longest))),
        ("twin", twin),
        ("twin", twin),
        ("shared-prefix", prefix + ids(3)),
        ("shared-prefix", prefix + ids(7)),
        ("shared-prefix", prefix + ids(1)),
        ("over-partition", ids(min(partition + 44, longest))),
    ]
    while len(corner) < count:
        corner.append(("random", ids(draw.randrange(2, min(2 * budget, longest)))))
    return _requests(corner[:count], seed, max_tokens)


def chunked(
    *,
    vocabulary: int,
    chunk: int,
    page: int,
    max_model_len: int,
    max_tokens: int,
    count: int,
    seed: int,
) -> list[Request]:
    """As `synthetic`, for a model that cuts its recurrence at multiples of `chunk` tokens.

    page   tokens between two states that the prefix cache keeps
    Lengths: one token, a chunk and one token off, a page and a few tokens less (so that the
    response crosses its end), two identical prompts with different seeds, a prefix of two pages
    that is shared with the first request, and two pages and a few tokens less, several times: one
    that loses its pages has left a state behind, and goes on from that.
    """
    draw = random.Random(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, vocabulary) for _ in range(n))

    prefix = ids(min(2 * page + chunk // 2, max_model_len - max_tokens - chunk - 1))
    twin = ids(chunk + 3)
    corner: list[tuple[str, tuple[int, ...]]] = [
        ("shared-prefix", prefix + ids(3)),
        ("one-token", ids(1)),
        ("chunk-minus-one", ids(chunk - 1)),
        ("one-chunk", ids(chunk)),
        ("chunk-plus-one", ids(chunk + 1)),
        ("chunk-minus-four", ids(chunk - 4)),
        ("twin", twin),
        ("twin", twin),
        ("shared-prefix", prefix + ids(1)),
        ("shared-prefix", prefix + ids(chunk)),
        ("page-minus-three", ids(page - 3)),
        ("page-minus-five", ids(page - 5)),
        ("one-page", ids(page)),
    ]
    longest = max_model_len - max_tokens - 1
    corner += [(f"two-pages-minus-{n}", ids(min(2 * page - n, longest))) for n in range(2, 8)]
    while len(corner) < count:
        corner.append(("random", ids(draw.randrange(2, page + chunk))))
    return _requests(corner[:count], seed, max_tokens)


def large_paged(
    *, vocabulary: int, chunk: int, page: int, max_tokens: int, count: int, seed: int
) -> list[Request]:
    """As `chunked`, where pages are large: four prompts are about as long as one, others short.

    The first fills a page, and the second goes on behind it, from its state where that is cached.
    Two are a few tokens less than a page: `gates.pages` gives an engine so many pages that those
    two fill them, and when one crosses the end of its page, the other loses its own. Two chunks are
    the most that a drawn prompt has.
    """
    draw = random.Random(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, vocabulary) for _ in range(n))

    prefix, twin = ids(page), ids(chunk - 3)
    corner: list[tuple[str, tuple[int, ...]]] = [
        ("shared-prefix", prefix),
        ("shared-prefix", prefix + ids(1)),
        ("one-token", ids(1)),
        ("chunk-minus-one", ids(chunk - 1)),
        ("one-chunk", ids(chunk)),
        ("chunk-plus-one", ids(chunk + 1)),
        ("twin", twin),
        ("twin", twin),
        ("chunk-minus-four", ids(chunk - 4)),
        ("page-minus-three", ids(page - 3)),
        ("page-minus-five", ids(page - 5)),
    ]
    while len(corner) < count:
        corner.append(("random", ids(draw.randrange(2, 2 * chunk))))
    return _requests(corner[:count], seed, max_tokens)


def _requests(
    tagged: Sequence[tuple[str, tuple[int, ...]]], seed: int, max_tokens: int
) -> list[Request]:
    """One request for each prompt, with a seed of its own."""
    return [
        Request(prompt, seed=seed * 1000 + i, max_tokens=max_tokens, tag=tag)
        for i, (tag, prompt) in enumerate(tagged)
    ]


def write(requests: list[Request], path: Path) -> str:
    """Store a capsule as JSON; returns the sha256 of its bytes."""
    text = json.dumps([asdict(request) for request in requests], separators=(",", ":"))
    path.write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path) -> list[Request]:
    """The requests that `write` wrote."""
    return [
        Request(**{**record, "prompt": tuple(record["prompt"])})
        for record in json.loads(path.read_text())
    ]
