"""`samebits trace CASE`: what both engines really ran for one sequence, region by region.

The sequence is decoded and prefilled by the rollout and scored by the trainer, padded and packed,
each time alone. Kernels of the contract's implementations are counted by region, torch operators
by region and kind, and arithmetic outside of all regions is set apart: a sum or a product there is
covered by no contract.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samebits import files
from samebits.casework.inventory import FILE, PROBLEMS
from samebits.engines.rollout import RolloutEngine, RolloutSettings
from samebits.gates import capsule, workload
from samebits.gates.locate.arms import Arm, Arms, Subject
from samebits.gates.locate.pairs import PAIRS, Located, pair
from samebits.gates.run import Run, say
from samebits.trace.operators import POINTWISE, REDUCES

ARMS = ("prefill", "decode", "padded", "packed")
# Operators of torch that make log-probabilities; `ops.logprob` uses none of them.
_SCORES = ("log_softmax", "logsumexp")
# The prompt is longer than a chunk of recurrent layers, and ends inside of one.
_PROMPT, _RESPONSE, _SEED = 90, 6, 20_000


@dataclass(frozen=True)
class Inventory:
    """What the arms of one sequence ran.

    calls    arm -> region -> calls of the region, in forward order; passes count as one, but for
             `logprob`, which is called once for a pass that has a use for it
    watched  arm -> torch operators of its forward passes, inside of regions and outside, moves too
    outside  arm -> (phase, kind, operator) -> calls outside of all regions, without moves
    pairs    what came of comparing the arms, region by region
    """

    identity: str
    bound: Mapping[str, str]
    calls: Mapping[str, Mapping[str, int]]
    watched: Mapping[str, int]
    outside: Mapping[str, Mapping[tuple[str, str, str], int]]
    pairs: Sequence[Located]

    @property
    def unwatched(self) -> list[str]:
        """Arms of which no operator was recorded: that nothing is uncovered there says nothing."""
        return sorted(arm for arm, count in self.watched.items() if not count)

    def outside_of_regions(self, phase: str, kind: str) -> list[str]:
        """Operators of a kind outside of all regions: `forward`, or while tokens are chosen
        (`sampling`)."""
        places = {place for operators in self.outside.values() for place in operators}
        return sorted(name for *place, name in places if place == [phase, kind])

    @property
    def uncovered(self) -> list[str]:
        """Operators outside of all regions in which an order of sums shows: of a forward pass, and
        of the last step to a log-probability. What else sampling does chooses tokens."""
        scores = [
            name
            for name in self.outside_of_regions("sampling", REDUCES)
            if any(part in name for part in _SCORES)
        ]
        return sorted({*self.outside_of_regions("forward", REDUCES), *scores})

    @property
    def unbound(self) -> list[str]:
        """Regions that an engine called and the contract does not bind."""
        return sorted({r for calls in self.calls.values() for r in calls if r not in self.bound})

    @property
    def uncalled(self) -> list[str]:
        """Regions that the contract binds and an arm did not call. Of `logprob` the calls are
        counted, and an arm may have no use for one: a sampled token is taken from whole rows."""
        return sorted(
            region
            for region in self.bound
            if region != "logprob" and any(region not in calls for calls in self.calls.values())
        )

    @property
    def differing(self) -> list[str]:
        """Pairs of arms with a difference, or that could not be compared."""
        return [f"{p.left}/{p.right}" for p in self.pairs if p.differs or p.note is not None]

    @property
    def first(self) -> str | None:
        """First region of the first pair that differs, in words; None where none was reached."""
        for one in self.pairs:
            if one.differs:
                region = one.region
                if region is None:
                    place = "logprob" if one.note is None else "a place that was not traced"
                elif region.layer is None:
                    place = region.region
                else:
                    place = f"{region.region} of layer {region.layer}"
                return f"{place} ({one.left}/{one.right})"
        return None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "contract": self.identity,
            "bound": dict(self.bound),
            "calls": {arm: dict(calls) for arm, calls in self.calls.items()},
            "watched": dict(self.watched),
            "outside": {
                arm: [[*place, count] for place, count in sorted(operators.items())]
                for arm, operators in self.outside.items()
            },
            **{name: getattr(self, name) for name in PROBLEMS},
        }


def take(run: Run) -> Inventory:
    """Run the four arms, and write the inventory beside the case's runs."""
    arms = Arms(_subject(run))
    found = {}
    for name in ARMS:
        say(f"trace: {name} ...")
        found[name] = arms[name]
    made = Inventory(
        identity=run.contract.identity,
        bound={
            region: entry["implementation"]
            for entry in run.contract.data["composition"]
            for region in entry["regions"]
        },
        calls={name: _calls(arm) for name, arm in found.items()},
        watched={name: _watched(arm) for name, arm in found.items()},
        outside={name: _outside(arm) for name, arm in found.items()},
        pairs=[pair(found, left, right) for left, right in PAIRS],
    )
    text = json.dumps(made.as_dict(), indent=1) + "\n"
    files.write_atomic(run.folder.parent / FILE, text.encode())
    return made


def _subject(run: Run) -> Subject:
    """A drawn prompt, and the response that the rollout gives it."""
    longest = run.recipe.engine["max_model_len"]
    draw = random.Random(_SEED)
    length = min(_PROMPT, longest - _RESPONSE)
    prompt = tuple(draw.randrange(1, run.recipe.config["vocab_size"]) for _ in range(length))
    request = capsule.Request(prompt, _SEED, _RESPONSE, "traced")
    settings = RolloutSettings.of(run.recipe, run.model, prefix_caching=False)
    with RolloutEngine(settings) as engine:
        done = engine.generate(workload.to_engine([request]))
    return Subject(run, 0, workload.sequences([request], done)[0], [request])


def _calls(arm: Arm) -> dict[str, int]:
    scored = sum(one.count for one in arm.scored)
    return dict(Counter(call.region for call in arm.calls)) | (
        {"logprob": scored} if scored else {}
    )


def _watched(arm: Arm) -> int:
    return sum(one.count for one in arm.operators if one.phase == "forward")


def _outside(arm: Arm) -> dict[tuple[str, str, str], int]:
    return {
        (one.phase, one.kind, one.name): one.count
        for one in arm.operators
        if one.region is None and one.kind in (POINTWISE, REDUCES)
    }
