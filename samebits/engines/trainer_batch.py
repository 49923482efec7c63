"""Sequences in, model inputs out: padded (bshd) or packed (thd), cut into micro-batches.

A *target* is a token that has a predecessor: a sequence of length n has n - 1 of them, and target i
is token i + 1, predicted by the row of token i. Rows of padding never reach the output layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samebits.errors import Refused

LAYOUTS = ("padded", "packed")


@dataclass(frozen=True)
class TrainBatch:
    """One optimizer step's data. Per sequence: token ids, and one value per target in each field.

    mask is 1 for targets that the loss counts (response tokens) and 0 elsewhere.
    """

    sequences: list[list[int]]
    mask: list[torch.Tensor]
    advantages: list[torch.Tensor]
    old_logprobs: list[torch.Tensor]

    def check(self, vocab: int) -> None:
        """SB0608 for token ids outside the vocabulary or fields of another length."""
        check_sequences(self.sequences, vocab)
        for field in ("mask", "advantages", "old_logprobs"):
            values = getattr(self, field)
            lengths = [int(v.numel()) for v in values]
            if lengths != [len(s) - 1 for s in self.sequences]:
                raise _bad_batch(f"{field} of lengths {lengths}", "one value per target")
        if not any(bool(m.any()) for m in self.mask):
            raise _bad_batch("a mask without any token", "at least one counted token")


def _bad_batch(seen: str, required: str) -> Refused:
    return Refused("SB0608", seen=seen, required=required, hint="samebits explain SB0608")


def check_sequences(sequences: Sequence[Sequence[int]], vocab: int) -> None:
    """SB0608 for an empty batch or sequence, or an id outside [0, vocab)."""
    if not sequences or any(not len(s) for s in sequences):
        raise _bad_batch("an empty batch or sequence", "at least one token per sequence")
    low, high = min(min(s) for s in sequences), max(max(s) for s in sequences)
    if low < 0 or high >= vocab:
        raise _bad_batch(f"token ids from {low} to {high}", f"ids in [0, {vocab})")


def micro_batches(sequences: Sequence[Sequence[int]], tokens: int) -> Iterator[range]:
    """Indices of consecutive sequences whose lengths add up to at most `tokens` (one at least)."""
    start, total = 0, 0
    for index, sequence in enumerate(sequences):
        if index > start and total + len(sequence) > tokens:
            yield range(start, index)
            start, total = index, 0
        total += len(sequence)
    yield range(start, len(sequences))


@dataclass(frozen=True)
class Inputs:
    """Arguments of `GPTModel.forward` for one micro-batch, and where its targets' rows are.

    rows     [n] int64: index into the flattened [s * b] rows of Megatron's [s, b, H] hidden state
    targets  [n] int64: the token that each of those rows predicts, sequence by sequence
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    longest: int
    rows: torch.Tensor
    targets: torch.Tensor

    def to(self, device: torch.device) -> Inputs:
        """The same with every tensor on `device`, but for `cu_seqlens`, which the host reads."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in fields.items()
            if isinstance(value, torch.Tensor) and name != "cu_seqlens"
        }
        return dataclasses.replace(self, **moved)


def inputs(sequences: Sequence[Sequence[int]], layout: str, *, with_mask: bool) -> Inputs:
    """Build one micro-batch. `with_mask` adds the causal mask that Megatron's own attention needs
    (True = hidden); the shared attention derives causality from positions."""
    if layout not in LAYOUTS:
        raise _bad_batch(f"layout {layout}", f"one of {', '.join(LAYOUTS)}")
    lengths = [len(s) for s in sequences]
    longest, count = max(lengths), len(sequences)
    targets = torch.tensor([t for s in sequences for t in s[1:]], dtype=torch.int64)
    positions = [torch.arange(n) for n in lengths]
    if layout == "packed":
        starts = torch.tensor([0, *lengths]).cumsum(0)
        rows = [start + p[:-1] for start, p in zip(starts[:-1].tolist(), positions, strict=True)]
        return Inputs(
            input_ids=torch.tensor([[t for s in sequences for t in s]], dtype=torch.int64),
            position_ids=torch.cat(positions)[None],
            attention_mask=None,
            cu_seqlens=starts.to(torch.int32),
            longest=longest,
            rows=torch.cat(rows),
            targets=targets,
        )
    ids = torch.zeros(count, longest, dtype=torch.int64)
    for index, sequence in enumerate(sequences):
        ids[index, : len(sequence)] = torch.tensor(sequence)
    mask = None
    if with_mask:
        mask = torch.ones(longest, longest, dtype=torch.bool).triu(1)[None, None]
    return Inputs(
        input_ids=ids,
        position_ids=torch.arange(longest).expand(count, longest),
        attention_mask=mask,
        cu_seqlens=None,
        longest=longest,
        rows=torch.cat([p[:-1] * count + index for index, p in enumerate(positions)]),
        targets=targets,
    )
