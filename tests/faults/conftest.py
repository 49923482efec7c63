"""Small cases whose healthy stages ran once; a fault is then planted in one engine of one of them.

A fault is planted where every engine of a run is started (`RolloutSettings.of`, `stages.trainer`),
so that the command under test (`samebits prove`, `--locate`, `samebits rl`) knows nothing of it, as
it would know nothing of a wrong line in a patch.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import small_models
import yaml
from quoted import ROOT

from samebits import cli
from samebits import recipe as recipes
from samebits.contract import Contract, build
from samebits.engines.rollout import RolloutSettings
from samebits.gates import prove, stages, workload
from samebits.gates import run as runs
from samebits.gates.run import Run, Stage
from samebits.patching.workspace import Workspace
from samebits.weights import sources

DENSE, HYBRID = small_models.dense(128), small_models.hybrid(128)
RL = small_models.RL
ANY = {"tokens": 1, "hazards": [], "control": "stock"}
REQUESTS, RESPONSE, ALONE = 14, 6, 2


@dataclass
class Faulty:
    """A case, its healthy stages, and the commands that look for a fault in it."""

    run: Run
    requests: list[Any]
    done: dict[str, Stage]
    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def plant(self, *, rollout: str | None = None, trainer: str | None = None) -> None:
        """Every engine that starts from now on carries the fault of its side."""
        settings_of, start_trainer = RolloutSettings.of, stages.trainer

        def of(*args, **changes):
            return settings_of(*args, **(changes | {"fault": changes.get("fault") or rollout}))

        def start(run, **changes):
            return start_trainer(run, **(changes | {"fault": changes.get("fault") or trainer}))

        self.patch.setattr(RolloutSettings, "of", of)
        self.patch.setattr(stages, "trainer", start)

    def command(self, *words: str) -> tuple[int, str]:
        """Exit code and output of `samebits WORDS`, where CASE stands for this case."""

        @contextlib.contextmanager
        def locked(*_) -> Iterator[Run]:
            yield self.run

        self.patch.setattr(prove, "locked_run", locked)
        self.patch.setattr(prove, "_stages", lambda *_: self.done)
        folder = str(self.run.recipe.folder)
        code = cli.run([folder if word == "CASE" else word for word in words])
        shown = self.capsys.readouterr()
        return code, shown.out + shown.err

    def keep(self) -> None:
        """Write what `--locate` reads of an earlier run, for stages that ran in the test."""
        _keep(self.run, self.requests, self.done)

    def legs(self) -> set[str]:
        """Legs with a mismatch in the statement that `samebits prove` wrote."""
        found = json.loads((self.run.folder / "evidence.json").read_text())
        return {r["leg"] for r in found["predicate"]["comparisons"] if r["mismatches"]}

    def reports(self) -> list[dict[str, Any]]:
        """What `samebits prove` wrote about the places of the differences."""
        return json.loads((self.run.folder / "difference.json").read_text())


def _case(folder: Path, base: str, config: dict, legs: dict, **contract) -> recipes.Recipe:
    """A case of its own in `folder`, on the patch series of the case `base`."""
    data = yaml.safe_load((ROOT / "cases" / base / "recipe.yaml").read_text())
    data["case"] = folder.name
    data["model"]["config"] |= config
    data["contract"] |= contract
    data["legs"] = legs
    data["rl"] = RL
    data.pop("run", None)
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data))
    recipe = recipes.load(folder)
    build.write(build.build(recipe), recipe.contract_path)
    return recipe


def _open(recipe: recipes.Recipe, folder: Path) -> Run:
    """A run whose stages lie in `folder`."""
    model = sources.prepare(recipe, Workspace(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.Workspace, "find", lambda: Workspace(folder))
        patch.setattr(runs.current, "trees", lambda _: {})
        patch.setattr(runs.current, "dependencies", lambda _: {})
        return Run(recipe, Contract.of(recipe), model, {}, " --quick")


Healthy = tuple[Run, list, dict[str, Stage]]


@pytest.fixture(scope="session")
def dense(tmp_path_factory) -> Healthy:
    """Legs A, B, C and F of a dense model, all healthy: run, requests, stages."""
    folder = tmp_path_factory.mktemp("dense")
    legs = {name: ANY for name in "ABCF"}
    run = _open(_case(folder / "faults-dense", "qwen3-tiny", DENSE, legs), folder)
    budget = stages.stress(run)["max_num_batched_tokens"]
    requests = workload.main(run.recipe, run.model, REQUESTS, RESPONSE, budget)
    controls = workload.control(run.recipe, run.model, 4, 8, 32)
    done = {"rollout_stress": stages.rollout_stress(run, requests)}
    done["stock_rollout"] = stages.rollout_control(run, controls, arithmetic="stock")
    whole, own = (done[name].facts["sequences"] for name in ("rollout_stress", "stock_rollout"))
    done["rollout_plain"] = stages.rollout_plain(run, requests, whole, own, ALONE)
    done["trainer"] = stages.trainer_score(run, whole, layouts=("padded", "packed"))
    base = workload.CONTROL_BASE
    done["stock_trainer"] = stages.trainer_score(run, own, base=base, arithmetic="stock")
    _keep(run, requests, done)
    return run, requests, done


@pytest.fixture(scope="session")
def ranks(dense, tmp_path_factory) -> Healthy:
    """Leg D of the dense model. Healthy layouts of two ranks are not run: they give the streams of
    one rank, which is what the other legs of all cases show."""
    run, requests, done = dense
    data = run.recipe.data | {"legs": {**run.recipe.data["legs"], "D": ANY}}
    wider = copy.copy(run)
    wider.recipe, wider.folder = replace(run.recipe, data=data), tmp_path_factory.mktemp("ranks")
    layouts = {
        "rollout_tp2": Stage(
            {"score": done["rollout_plain"].streams["batch"]}, {"hazards": {"ranks": 2}}
        ),
        "trainer_tp2": Stage({"padded": done["trainer"].streams["padded"]}, {}),
        "planted_ranks": done["stock_trainer"],
    }
    _keep(wider, requests, done)
    return wider, requests, done | layouts


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory) -> Healthy:
    """A model with Gated DeltaNet layers, schedule cpr, of which nothing has run yet."""
    folder = tmp_path_factory.mktemp("hybrid")
    legs = {name: ANY for name in "ABC"}
    run = _open(_case(folder / "faults-hybrid", "qwen3.5-tiny-cpr", HYBRID, legs), folder)
    return run, workload.main(run.recipe, run.model, REQUESTS, RESPONSE, 65), {}


def _keep(run: Run, requests, done: Mapping[str, Stage]) -> None:
    """What `samebits prove CASE --locate N` reads of an earlier run."""
    from samebits.gates import capsule

    capsule.write(requests, run.folder / "capsule.json")
    facts = {"sequences": done["rollout_stress"].facts["sequences"]}
    (run.folder / "rollout_stress.json").write_text(json.dumps(facts))


@pytest.fixture
def faulty(monkeypatch, capsys) -> Callable[..., Faulty]:
    """(run, requests, healthy stages) -> `Faulty`; the stages may be replaced."""

    def of(run, requests, done) -> Faulty:
        return Faulty(run, requests, dict(done), monkeypatch, capsys)

    return of
