"""`samebits prove CASE`: run every leg of a case with its controls, and write the evidence."""

from __future__ import annotations

import contextlib
import datetime
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from samebits import evidence, files, runtime
from samebits import recipe as recipes
from samebits.contract import Contract, build
from samebits.contract.platform import describe, require
from samebits.errors import Refused, shown
from samebits.evidence import DifferenceReport, required
from samebits.evidence.statement import Statement
from samebits.gates import (
    advice,
    agreement,
    capsule,
    fired,
    lanes,
    legs,
    locate,
    rl,
    semantic,
    works,
)
from samebits.gates.run import Run, Stage, clock, say
from samebits.gates.sizes import Size
from samebits.patching.workspace import Workspace
from samebits.recipe import Recipe

if TYPE_CHECKING:
    from samebits.gates import ladder


@dataclass(frozen=True)
class Outcome:
    """What a proving run leaves: the statement, where it was written, the stages behind it.

    differences   one report for each comparison with a mismatch, which have been told and stored
                  in `difference.json`
    """

    statement: Statement
    path: Path
    stages: Mapping[str, Stage]
    run: Run
    differences: Sequence[DifferenceReport] = ()


def open_run(case: str, size: Size | ladder.Size, prefix: str = "") -> Run:
    """Recipe, contract and model of a case; everything missing is prepared or refused.

    Refused before anything is downloaded or started: the arithmetic of a control in this process
    (SB0930), engine sizes that vLLM would refuse (SB0328), a platform that this machine is not
    (SB0450, SB0451), a contract that does not fit the recipe, sources that are not those it binds
    (SB0309), a patched tree that is missing (SB0115) or was edited (SB0114).
    """
    from samebits.casework import engine
    from samebits.patching import trees
    from samebits.weights import sources

    if runtime.regions() and not runtime.aligned():
        raise Refused(
            "SB0930",
            seen=f"SAMEBITS_ARITHMETIC={runtime.arithmetic()}",
            required="no SAMEBITS_ARITHMETIC",
            hint="unset SAMEBITS_ARITHMETIC",
        )
    recipe = recipes.load(case)
    engine.check(recipe)
    require(recipe.platform)
    contract = Contract.of(recipe)
    contract.check_sources()
    for upstream, series in recipe.series.items():
        trees.tree_path(upstream, series)
    model = sources.prepare(recipe)
    options = {k: v for k, v in asdict(size).items() if isinstance(v, int)}
    return Run(recipe, contract, model, options, size.flag, prefix)


@contextlib.contextmanager
def locked_run(case: str, size: Size | ladder.Size, **kept_apart: str) -> Iterator[Run]:
    """`open_run` while no other run of this case works in this checkout (SB0108)."""
    recipe = recipes.load(case)
    with Workspace.find().lock(f"run-{recipe.case}", wait_seconds=0):
        yield open_run(case, size, **kept_apart)


@dataclass(frozen=True)
class Listener:
    """What is called while a proving run goes on.

    judged    with the statement and where it was written, before any difference is traced
    located   with each report on a difference, as it is done
    """

    judged: Callable[[Statement, Path], None] = lambda *_: None
    located: Callable[[DifferenceReport], None] = lambda _: None


def prove(
    case: str, *, quick: bool = False, record: bool = False, listener: Listener | None = None
) -> Outcome:
    """Run all legs of the recipe. `record` writes to the case folder, otherwise to `build/runs`."""
    size = Size.of(recipes.load(case), quick=quick, record=record)
    with locked_run(case, size) as run:
        return _prove(run, size, quick, record, listener)


def rerun(case: str) -> Outcome:
    """The recorded run computed afresh, apart from it: nothing recorded is read or written.

    An interrupted one goes on where it was; a finished one is moved aside and never reused.
    """
    recipe = recipes.load(case)
    size = Size.of(recipe, quick=False, record=True)
    with locked_run(case, size, prefix="rerun-") as run:
        if (run.folder / recipe.evidence_path.name).exists():
            files.move_aside(run.folder, "done")
            run.folder.mkdir()
        return _prove(run, size, quick=False, record=False)


def _prove(
    run: Run, size: Size, quick: bool, record: bool, listener: Listener | None = None
) -> Outcome:
    listener = listener or Listener()
    started = _now()
    done = _stages(run, size)
    statement = state(run, done, quick=quick, started=started)
    path = run.recipe.evidence_path if record else run.folder / run.recipe.evidence_path.name
    statement = evidence.write(statement, path)
    listener.judged(statement, path)
    # After the evidence, which an engine that fails now may not lose.
    differences: list[DifferenceReport] = []
    beside = path.with_name("difference.json")
    locate.write(differences, beside)
    for report in locate.reports(run, statement.predicate["comparisons"]):
        differences.append(report)
        locate.write(differences, beside)
        listener.located(report)
    if record:
        _name_evidence(run)
    return Outcome(statement, path, done, run, differences)


def _name_evidence(run: Run) -> None:
    """Let the contract name the evidence that proves it, as `samebits contract build` would."""
    if build.write(build.with_proofs(run.contract, run.recipe), run.recipe.contract_path):
        say(f"{shown(run.recipe.contract_path)}: names the evidence that proves it")


def state(run: Run, done: Mapping[str, Stage], *, quick: bool, started: str) -> Statement:
    """Statement of finished stages; `quick` asks of each leg only as many tokens as it ran."""
    comparisons, oracles, rl_record = legs.judge(run, done)
    return evidence.build(
        _relaxed(run.recipe, comparisons, oracles) if quick else run.recipe,
        run.contract,
        limits=required.limits(run.recipe.platform),
        happenstance={"started": started, "finished": _now(), "host": platform.machine()},
        comparisons=comparisons,
        oracles=oracles,
        rl=rl_record,
        dependencies=run.dependencies,
        intent=describe(run.recipe.platform),
        seeds=required.seeds(run.recipe),
        switches=_switches(run, done),
        not_covered=required.not_covered(run.recipe.platform, run.recipe.left_out),
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _switches(run: Run, done: Mapping[str, Stage]) -> dict[str, str]:
    if run.recipe.refits_only:
        facts = done["rl_aligned"].facts
        return semantic.switches(facts["semantics"], facts["pairs"])
    requests = capsule.read(run.folder / "capsule.json")
    pairs = semantic.distinct((request.prompt, request.seed) for request in requests)
    return semantic.switches(done["rollout_stress"].facts["semantics"], pairs)


def _relaxed(recipe: Recipe, comparisons, oracles) -> Recipe:
    """The recipe of a quick run: the same legs and hazards, fewer tokens and RL steps."""
    relaxed = {}
    for name, leg in recipe.data["legs"].items():
        found = sum(r["tokens"] for r in [*comparisons, *oracles] if r["leg"] == name)
        relaxed[name] = {**leg, "tokens": max(1, min(leg["tokens"], found))}
    data = {**recipe.data, "legs": relaxed}
    if "rl" in data:
        data["rl"] = {**data["rl"], "steps": Size.quick().rl_steps}
    return replace(recipe, data=data)


# --- stages -------------------------------------------------------------------------------------


def _stages(run: Run, size: Size) -> dict[str, Stage]:
    """Run what the recipe's legs need, side by side, with what finds a broken setup first."""
    done: dict[str, Stage] = {}
    todo = works.tasks(run, size, done)
    begun = time.monotonic()
    for count, (name, stage) in enumerate(lanes.run(todo, lanes.most(run.recipe)), start=1):
        took = "not needed"
        if stage is not None:
            done[name] = stage
            took = f"{stage.facts['seconds']:.0f} s"
        elapsed = clock(time.monotonic() - begun)
        say(f"{name}: {took} (stage {count} of {len(todo)}, {elapsed} so far)")
        _tell_unfired(run, name, done)
        if name in ("rl_stock", "rl_aligned"):
            _tell_unmoved(run, name, done[name])
        if {"rollout_stress", "trainer"} <= done.keys():
            _agree(run, done)
    return done


def _tell_unfired(run: Run, name: str, done: Mapping[str, Stage]) -> None:
    """Hazards that a stage should have fired and did not: the verdict will not be EQUAL."""
    for reason in fired.missing(run.recipe, name, done) if name in done else ():
        hint = advice.of(reason, recorded=run.flag == " --record")
        say(f"{name}: {reason}" + (f"; {hint}" if hint else ""))


def _tell_unmoved(run: Run, name: str, stage: Stage) -> None:
    """Steps whose refit sent the weights as they were; no verdict hangs on them alone."""
    steps = ", ".join(map(str, rl.unmoved(stage)))
    if steps:
        size = "stock_rl_prompts" if name == "rl_stock" else "prompts_per_step"
        cure = f"; raise `{size}` where every step should move them" if run.flag else ""
        say(f"{name}: all rewards of step {steps} were alike, so its refit moved no weight{cure}")


def _agree(run: Run, done: Mapping[str, Stage]) -> None:
    """One contract in every aligned process so far, equal probe answers, all regions served."""
    agreement.contracts(
        run.contract,
        {name: stage.facts["contract"] for name, stage in done.items() if "contract" in stage.facts}
        | {
            name: stage.facts["info"]["contract_digest"]
            for name, stage in done.items()
            if "info" in stage.facts and stage.facts["info"]["arithmetic"] == "aligned"
        },
    )
    stress, trainer = done["rollout_stress"].facts, done["trainer"].facts["info"]
    agreement.answers(stress["binding"], trainer["answers"])
    agreement.served(run.contract, stress["served"], trainer["served"], ("trainer_score",))
