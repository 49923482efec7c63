"""Checks that operators share: what they let through, and what a refusal names."""

import pytest
import torch

from samebits.errors import Refused
from samebits.ops.checks import place, require_ids, require_shard


def test_one_process_is_rank_0_of_1():
    assert place(None) == (1, 0)


@pytest.mark.parametrize(
    ("at", "start", "held"), [((1, 0), 0, 8), ((1, 0), 0, 11), ((4, 0), 0, 8), ((4, 3), 24, 8)]
)
def test_a_shard_in_its_place_passes(at, start, held):
    require_shard("SB0431", "columns", at, start=start, held=held, width=8)


@pytest.mark.parametrize(
    ("at", "start", "held"), [((1, 0), 1, 8), ((4, 3), 16, 8), ((4, 3), 24, 9), ((4, 3), 24, 7)]
)
def test_a_shard_elsewhere_is_refused(at, start, held):
    with pytest.raises(Refused) as caught:
        require_shard("SB0423", "rows", at, start=start, held=held, width=8)
    error, (ranks, rank) = caught.value, at
    assert error.error_id == "SB0423"
    assert error.seen == f"rank {rank} of {ranks} holds rows {start} to {start + held}"
    assert error.required == f"rows {8 * rank} to {8 * rank + 8}"


def test_ids_inside_pass_and_so_do_none():
    require_ids("SB0422", "token", torch.tensor([[0, 6], [3, 3]]), 7)
    require_ids("SB0422", "token", torch.empty(0, dtype=torch.int64), 7)


@pytest.mark.parametrize("outside", [-1, 7])
def test_an_id_outside_is_refused(outside):
    with pytest.raises(Refused) as caught:
        require_ids("SB0432", "target", torch.tensor([3, outside]), 7)
    error = caught.value
    assert (error.error_id, error.required) == ("SB0432", "0 <= id < 7")
    assert error.seen == f"target ids from {min(3, outside)} to {max(3, outside)}"
