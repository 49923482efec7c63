"""A weight sync leaves no cached block behind, whatever the engine says. No engine is started."""

from __future__ import annotations

import types

import pytest

from samebits.engines.rollout import RolloutEngine
from samebits.errors import Different


@pytest.fixture
def engine(monkeypatch):
    """`engine(blocks of the first reset, of the next ones)`: one whose calls are answered here."""

    def of(*dropped: int) -> RolloutEngine:
        made, answers = RolloutEngine.__new__(RolloutEngine), list(dropped)
        monkeypatch.setattr(made, "_rpc", lambda *_: [{}], raising=False)
        monkeypatch.setattr(made, "_call", lambda *_: answers.pop(0), raising=False)
        return made

    return of


MANIFEST = types.SimpleNamespace(to_json=lambda: "", step=1, checksums=dict)


def test_a_cache_that_is_empty_after_its_reset_is_well(engine):
    assert engine(7, 0).sync_weights(MANIFEST)["dropped_blocks"] == 7
    assert engine(0, 0).sync_weights(MANIFEST)["dropped_blocks"] == 0


def test_blocks_that_a_reset_left_are_different(engine):
    with pytest.raises(Different, match="SB0906") as error:
        engine(7, 7).sync_weights(MANIFEST)
    assert "7 cached blocks" in error.value.seen
