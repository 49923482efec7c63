"""The configurations that a benchmark of whole engines compares, and a choice among them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from samebits.bench import engine_arm, engine_memory
from samebits.bench.engine_arm import LONG_RESPONSE, REQUESTS, RESPONSE, Arm
from samebits.engines.rollout import RolloutSettings
from samebits.errors import Refused
from samebits.recipe import Recipe

_BACKENDS = (("FA3", "FLASH_ATTN"), ("Triton", "TRITON_ATTN"))


@dataclass(frozen=True)
class Choice:
    """Configurations to run beside the aligned one, which always runs: those of `names`, with
    `fast` ours and vLLM's own with its fastest kernels, and by default all."""

    names: tuple[str, ...] = ()
    fast: bool = False

    def check(self, arms: Sequence[Arm]) -> None:
        """SB0909 for a name that no configuration has."""
        known = [arm.name for arm in arms]
        unknown = [name for name in self.names if name not in known]
        if unknown:
            raise Refused(
                "SB0909",
                seen=f"configuration {', '.join(unknown)}",
                required=f"of {'; '.join(known)}",
                hint="samebits bench run --help",
            )

    def takes(self, arm: Arm) -> bool:
        """Whether a configuration runs."""
        if arm.name in self.names or not (self.names or self.fast):
            return True
        return self.fast and (arm.aligned or (_plain(arm) and arm.backend == "FLASH_ATTN"))


def _plain(arm: Arm) -> bool:
    """One of vLLM's own that differs in runner and attention alone."""
    return arm.rated and not arm.invariant and arm.prefill == "triton"


def again(arm: Arm) -> Arm | None:
    """What to try where a configuration did not run: the same with graphs of decode steps alone."""
    if not arm.compiled or not _plain(arm):
        return None
    return replace(arm, name=arm.name.replace("compiled", "decode graphs"), compiled=False)


def arms(case: Recipe, model: Path, stock: Path) -> tuple[Arm, list[Arm]]:
    """The aligned configuration as cases prove it, and others.

    Of these vLLM's own come first, in the order in which it takes them by itself, and last what is
    not proved: its batch invariance, and aligned steps that are prepared ahead. A model with
    recurrent states adds vLLM's own choice of their dtype and of kernels that prefill.
    """
    hybrid = case.gdn_schedule is not None
    response = LONG_RESPONSE if hybrid else RESPONSE
    length = engine_arm.length_of(response)
    # A page of ours holds a state, so the case says how many tokens it has.
    block = case.engine["block_size"] if hybrid else engine_arm.BLOCK
    cache = engine_memory.cache(case.config, block, length, REQUESTS)
    settings = RolloutSettings.of(
        case,
        model,
        max_model_len=length,
        max_num_batched_tokens=engine_arm.BUDGET,
        max_num_seqs=REQUESTS,
        kv_blocks=cache.pages,
        block_size=block,
        prefix_caching=False,
        cuda_graphs=1,
    )

    def ours(name: str, ahead: bool) -> Arm:
        fields = json.loads(json.dumps(asdict(replace(settings, ahead=ahead)), default=str))
        return Arm(name, str(model), fields, response=response, cached=cache.bytes)

    common = _stock(case, length) | {"response": response, "compiled": True}

    def own(what: str, runner: int, backend: str, **changes: Any) -> Arm:
        name = f"vLLM V{runner}, {what}, compiled"
        return Arm(name, str(stock), None, runner, backend, **{**common, **changes})

    found = [own(label, runner, name) for label, name in _BACKENDS for runner in (2, 1)]
    if hybrid:
        found.append(own("FA3, states in the model's dtype", 1, "FLASH_ATTN", states="auto"))
        found.append(own("FA3, FlashInfer's prefill", 1, "FLASH_ATTN", prefill="flashinfer"))
    found.append(own("FA3, batch-invariant", 1, "FLASH_ATTN", invariant=True))
    found.append(ours("aligned, steps prepared ahead", True))
    return ours("aligned", False), found


def _stock(case: Recipe, length: int) -> dict[str, Any]:
    """Cache and states of vLLM's own: it chooses the tokens of a page that a state has to fit."""
    if case.gdn_schedule is None:
        cache = engine_memory.cache(case.config, engine_arm.BLOCK, length, REQUESTS)
        return {"pages": cache.pages, "cached": cache.bytes}
    block = engine_memory.stock_block(case.config)
    cache = engine_memory.cache(case.config, block, length, REQUESTS)
    return {"block": 0, "cached": cache.bytes, "states": "float32"}
