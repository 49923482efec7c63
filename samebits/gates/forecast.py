"""Which hazards of leg B fire, from sizes alone: vLLM's scheduler runs without a model.

A response has its full length, so what is sampled decides nothing: the counters are those that the
engines will have, but for which page a request gets. Seconds here save the minutes of a run whose
verdict is known before it starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.engines.rollout import RolloutSettings
from samebits.errors import Refused
from samebits.gates import advice, capsule, fired, pages, stages
from samebits.gates.run import Run, say
from samebits.recipe import Recipe

_LIMIT = 600  # seconds, of a machine that others use


def check(run: Run, requests: Sequence[capsule.Request]) -> None:
    """Say which hazards the engines of a run will fire; SB0931 where one never will.

    Of models with states on a CPU, whose pages decide it; other runs are not looked at, nor is one
    whose engines are done.
    """
    recipe = run.recipe
    ran = all((run.folder / f"{name}.json").exists() for name in fired.ROWS_OF_STATES)
    if recipe.gdn_schedule is None or recipe.platform != "cpu" or ran:
        return
    engines = {
        "rollout_stress": Served(recipe, stages.stress(run), 0, requests),
        "rollout_paged": Served(recipe, pages.paged(recipe), 1, requests),
    }
    reports = counters(run.model, list(engines.values()))
    for (name, engine), report in zip(engines.items(), reports, strict=True):
        counts = fired.scheduled(fired.ROWS_OF_STATES[name], report)
        reasons = [report["stuck"]] if "stuck" in report else fired.never(recipe, "B", counts)
        if reasons:
            hints = dict.fromkeys(advice.of(r, recorded=run.flag == " --record") for r in reasons)
            raise Refused(
                "SB0931",
                seen=f"{name}, {_words(engine.sizes)}: {'; '.join(reasons)}",
                required="; ".join(h for h in hints if h) or _needed(report),
                hint=f"samebits case show {recipe.case}",
            )
        say(f"{name}, from sizes alone: {_words(counts)}")


def _needed(report: dict[str, Any]) -> str:
    if "stuck" in report:
        return "pages for the longest request"
    return "requests and engine sizes that do what the hazard names"


@dataclass(frozen=True)
class Served:
    """An engine of a recipe, with `sizes` of its own, and what it serves: `first` of the requests,
    and the others when those are done."""

    recipe: Recipe
    sizes: Mapping[str, Any]
    first: int
    requests: Sequence[capsule.Request]

    def as_list(self) -> list[Any]:
        """For `gates.scheduled`."""
        given = {
            "page": self.recipe.engine["block_size"],
            "max_model_len": self.recipe.engine["max_model_len"],
            "states": pages.states(self.recipe),
            "prefix_caching": True,
            "first": self.first,
            **self.sizes,
        }
        return [given, [[r.prompt, r.max_tokens] for r in self.requests]]


def counters(model: Path, engines: Sequence[Served]) -> list[dict[str, Any]]:
    """What each engine counts; SB0512 where vLLM, as patched for the first of them, fails."""
    recipe, asked = engines[0].recipe, [engine.as_list() for engine in engines]
    own = {**RolloutSettings.of(recipe, model).environment(), "VLLM_PLUGINS": "none"}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(asked, file)
        file.flush()
        command = [sys.executable, "-m", "samebits.gates.scheduled", file.name]
        try:
            done = subprocess.run(
                command, env=own, capture_output=True, text=True, timeout=_LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            raise _failed(f"no answer within {_LIMIT} s") from None
    if done.returncode:
        raise _failed("\n            ".join(done.stderr.strip().splitlines()[-10:]))
    return json.loads(done.stdout.splitlines()[-1])


def _failed(seen: str) -> Refused:
    return Refused(
        "SB0512",
        seen=seen,
        required="vLLM's scheduler with the sizes of the recipe",
        hint="samebits explain SB0512",
    )


def _words(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
