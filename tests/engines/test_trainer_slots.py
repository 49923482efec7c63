"""Checksums of live parameters: shards add up, and a copy is no parameter. Without an engine."""

from __future__ import annotations

import pytest
import torch

from samebits import bits
from samebits.engines import trainer as engine
from samebits.engines.trainer import Trainer
from samebits.engines.trainer_slots import Slot
from samebits.errors import Refused
from samebits.weights.checksums import tensor_checksum

WHOLE = torch.randn(24, 6, generator=torch.Generator().manual_seed(3)).bfloat16()
CUTS = [(0, None), (0, (8, 8, 8)), (0, (16, 4, 4)), (1, None), (None, None)]


def _slot(cut, rank: int, ranks: int) -> Slot:
    dimension, sections = cut
    empty = torch.empty(0)
    shape = list(WHOLE.shape)
    if dimension is not None:
        shape[dimension] //= ranks
    place = Slot("w", tuple(WHOLE.shape), dimension, empty.new_empty(shape), sections)
    return Slot("w", place.shape, dimension, place.share(WHOLE, rank, ranks), sections)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_slot_knows_where_its_share_lies(cut, ranks):
    sums = []
    for rank in range(ranks):
        slot = _slot(cut, rank, ranks)
        index = slot.index(rank, ranks)
        sums.append(tensor_checksum(slot.local(ranks), shape=slot.shape, index=index))
    whole = tensor_checksum(WHOLE)
    if cut[0] is None:
        assert set(sums) == {whole}
    else:
        assert bits.add_digests(*sums) == whole and (ranks == 1 or whole not in sums)


@pytest.fixture
def places(monkeypatch):
    """A trainer of one rank and no engine, and the slots that it is made to have."""
    found: list[Slot] = []
    monkeypatch.setattr(engine, "slots", lambda *_: iter(found))
    monkeypatch.setattr(
        engine.dist, "all_gather", lambda out, mine, group: [o.copy_(mine) for o in out]
    )
    trainer = Trainer.__new__(Trainer)
    trainer.model = torch.nn.Linear(6, 24).bfloat16()
    trainer.arch = trainer.group = None  # type: ignore[assignment]
    trainer.tp_rank, trainer.tp_size, trainer.step, trainer._loaded = 0, 1, 5, True
    return trainer, found


def test_live_checksums_are_those_of_the_parameters(places):
    trainer, found = places
    weight, bias = trainer.model.weight.detach(), trainer.model.bias.detach()
    found += [Slot("w", (24, 6), 0, weight.view(2, 12, 6)), Slot("b", (24,), None, bias)]
    sums = trainer.live_checksums()
    assert sums == {"w": bits.mixsum(weight), "b": bits.mixsum(bias)}
    bias.add_(1)
    assert trainer.live_checksums() == sums | {"b": bits.mixsum(bias)} != sums


def test_a_view_of_a_copy_is_no_parameter(places):
    trainer, found = places
    weight = trainer.model.weight.detach()
    found += [Slot("w", (24, 6), 0, weight), Slot("b", (24, 6), 0, weight.clone())]
    with pytest.raises(Refused, match="`b` from memory that is no parameter at step 5") as caught:
        trainer.live_checksums()
    assert caught.value.error_id == "SB0710"
