"""How much a proving run computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from samebits.gates import pages
from samebits.recipe import Recipe

# Tokens of the longest sequence up to which runs that are not recorded fill the stress engine.
_SHORT = 512


@dataclass(frozen=True)
class Size:
    """How much a run computes; None among the RL sizes means what the recipe says.

    The stock arm of the RL run is its negative control: it takes fewer steps in the demo, because
    torch's bf16 gradients are slow on CPUs without bf16 instructions. `quick` is for continuous
    integration and is never recorded; `full` is what is recorded. A step whose rewards are all
    alike moves no weight, so the aligned arm of `quick` takes three to see one that does.

    control_prompt   prompts of the control capsule are shorter than this
    control_tokens   step budget of control engines
    alone_decoded    of the `alone` sequences, how many decode alone as well
    stress_*         step budget, sequences at a time and pages of the stress engine
    long_prompt      tokens of a prompt that one request more has
                     A None leaves what `gates.stages` says.
    flag             option of `samebits prove` that asks for this size, with a leading blank
    """

    requests: int = 28
    response: int = 20
    alone: int = 8
    control_requests: int = 8
    control_response: int = 16
    rl_steps: int | None = None
    stock_rl_steps: int | None = 2
    stock_rl_prompts: int | None = None
    control_prompt: int = 64
    control_tokens: int | None = None
    alone_decoded: int | None = None
    stress_tokens: int | None = None
    stress_seqs: int | None = None
    stress_blocks: int | None = None
    long_prompt: int | None = None
    flag: str = ""

    @classmethod
    def quick(cls) -> Size:
        """Size for continuous integration."""
        return cls(18, 8, 4, 6, 8, 3, 2, 1, flag=" --quick")

    @classmethod
    def full(cls) -> Size:
        """Size of a recorded run of a case that asks for no other."""
        return cls(48, 32, 16, 8, 24, None, None, flag=" --record")

    @classmethod
    def of(cls, recipe: Recipe, *, quick: bool, record: bool) -> Size:
        """The size that the options of `samebits prove` ask for."""
        if record:
            sizes: Mapping[str, Any] = recipe.run
            return replace(cls.full(), **sizes)
        size = cls.quick() if quick else cls()
        if recipe.gdn_schedule is not None:
            # Pages of states are large: a short response never needs one that is not there, and
            # a request has to hold two of them when it is preempted. Distances of leg O are within
            # some percent of stock's, so that a few hundred tokens do not tell them apart.
            if pages.large(recipe.platform, recipe.engine["block_size"]):
                return replace(size, **pages.RUN)
            if not quick:
                return size
            return replace(size, requests=20, response=24, control_requests=16, control_prompt=400)
        if recipe.engine["max_model_len"] > _SHORT:
            # The stress engine has more pages: without more to hold, no request is preempted.
            return replace(size, requests=32, response=48)
        return size
