"""Small cases with contracts of the present sources, and faults planted in one of their engines."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import small_models
import torch
import yaml
from quoted import ROOT

from samebits import recipe as recipes
from samebits.contract import Contract, build
from samebits.engines.rollout import RolloutEngine, RolloutSettings
from samebits.gates import capsule, stages, workload
from samebits.gates import run as runs
from samebits.gates.locate.arms import Arms, Subject
from samebits.gates.run import Run
from samebits.patching.workspace import Workspace
from samebits.weights import sources

# Sums so long that their order shows.
DENSE, HYBRID = small_models.dense(512), small_models.hybrid(512)
RL = small_models.RL


def open_run(folder: Path, base: str, config: dict, **changes) -> Run:
    """A run of a small model on the patch series of the case `base`; its stages lie in `folder`.

    changes   parts of the recipe that are others
    """
    data = yaml.safe_load((ROOT / "cases" / base / "recipe.yaml").read_text())
    data["case"], data["rl"] = folder.name, RL
    data["model"]["config"] |= config
    data.pop("run", None)
    data |= changes
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data))
    recipe = recipes.load(folder)
    build.write(build.build(recipe), recipe.contract_path)
    model = sources.prepare(recipe, Workspace(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.Workspace, "find", lambda: Workspace(folder))
        patch.setattr(runs.current, "trees", lambda _: {})
        patch.setattr(runs.current, "dependencies", lambda _: {})
        return Run(recipe, Contract.of(recipe), model, {})


def plant(patch: pytest.MonkeyPatch, *, rollout: str | None = None, trainer: str | None = None):
    """Every engine that starts from now on carries the fault of its side."""
    settings_of, start = RolloutSettings.of, stages.trainer
    patch.setattr(
        RolloutSettings, "of", lambda *args, **c: settings_of(*args, **({"fault": rollout} | c))
    )
    patch.setattr(stages, "trainer", lambda run, **c: start(run, **({"fault": trainer} | c)))


def arms_of(run: Run, lengths=(80, 70, 33), response: int = 6) -> Arms:
    """Arms of the first of a few sequences, which the engine of leg B decoded in one batch."""
    draw = random.Random(3)
    vocabulary = run.recipe.config["vocab_size"]
    tags = ["chunk-plus-one", *["x"] * (len(lengths) - 1)]
    requests = [
        capsule.Request(
            tuple(draw.randrange(3, vocabulary) for _ in range(length)), 5 + length, response, tag
        )
        for length, tag in zip(lengths, tags, strict=True)
    ]
    settings = RolloutSettings.of(run.recipe, run.model, **stages.stress(run))
    with RolloutEngine(settings) as engine:
        done = engine.generate(workload.to_engine(requests))
    whole = workload.sequences(requests, done)
    return Arms(Subject(run, 0, whole[0], requests, whole))


def call(arm, layer: int | None, region: str, number: int = 0):
    """The call of a region in a layer of an arm."""
    return [c for c in arm.calls if (c.layer, c.region) == (layer, region)][number]


def row(found, position: int) -> torch.Tensor:
    """Output of a call at a position, [1, features] bf16 or fp32."""
    (first, *_) = (i for i, at in enumerate(found.positions) if at == position)
    values = torch.from_numpy(found.output[first : first + 1].copy())
    wide = values.element_size() == 4
    return values.view(torch.float32 if wide else torch.bfloat16)


def weight(run: Run, name: str) -> torch.Tensor:
    """A published tensor of the model before any step."""
    return _weights(run.model)[name]


@functools.cache
def _weights(model: Path) -> dict[str, torch.Tensor]:
    return dict(sources.open_model(model))


def pattern(values: torch.Tensor, column: int) -> str:
    """Bits of one element of [1, features], as a report shows them."""
    wide = values.dtype == torch.float32
    bits = values.contiguous().view(torch.int32 if wide else torch.int16)[0, column].item()
    return f"{bits & (0xFFFFFFFF if wide else 0xFFFF):0{8 if wide else 4}x}"
