"""Rollout and trainer hold one contract, answer its probes alike, and served all that it binds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samebits.contract import Binding, Contract
from samebits.contract.model import ENGINE_CASES


def contracts(contract: Contract, digests: Mapping[str, str]) -> None:
    """`digests`: who -> digest of the contract bytes that process loaded. SB0312."""
    for who, digest in digests.items():
        contract.check_peer(digest, who)


def answers(rollout: Mapping[str, Any], trainer: Mapping[str, str]) -> None:
    """The rollout's binding (`RolloutEngine.binding`) against the trainer's answers. SB0320."""
    Binding(role="rollout", **rollout).check_peer(trainer)


def served(
    contract: Contract,
    rollout: Mapping[str, int],
    trainer: Mapping[str, int],
    trainer_cases: tuple[str, ...],
) -> None:
    """Every bound region ran on both sides; one that never did is a violation (SB0313)."""
    contract.check_served(rollout, ENGINE_CASES)
    contract.check_served(trainer, trainer_cases)
