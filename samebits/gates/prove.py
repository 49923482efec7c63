"""`samebits prove CASE`: run every leg of a case with its controls, and write the evidence."""

from __future__ import annotations

import contextlib
import datetime
import functools
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits import evidence, faults, files, runtime
from samebits import recipe as recipes
from samebits.contract import Contract, build
from samebits.contract.platform import describe, require
from samebits.errors import Refused, shown
from samebits.evidence import DifferenceReport, required, rows
from samebits.evidence.pairs import of_layouts
from samebits.evidence.statement import Statement
from samebits.evidence.verdict import CONTROL_TOKENS, diverged
from samebits.gates import (
    advice,
    agreement,
    capsule,
    fired,
    forecast,
    lanes,
    locate,
    oracle,
    pages,
    rl,
    semantic,
    stages,
    workload,
)
from samebits.gates.run import Run, Stage, clock, say
from samebits.gates.streams import Counts, Stream, compare
from samebits.patching.workspace import Workspace
from samebits.recipe import Recipe

if TYPE_CHECKING:
    from samebits.gates import ladder

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
    comparisons, oracles, rl_record = _judge(run, done)
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
    legs = {}
    for name, leg in recipe.data["legs"].items():
        found = sum(r["tokens"] for r in [*comparisons, *oracles] if r["leg"] == name)
        legs[name] = {**leg, "tokens": max(1, min(leg["tokens"], found))}
    data = {**recipe.data, "legs": legs}
    if "rl" in data:
        data["rl"] = {**data["rl"], "steps": Size.quick().rl_steps}
    return replace(recipe, data=data)


# --- stages -------------------------------------------------------------------------------------


def _stages(run: Run, size: Size) -> dict[str, Stage]:
    """Run what the recipe's legs need, side by side, with what finds a broken setup first."""
    done: dict[str, Stage] = {}
    works = _refit_works(run, size) if run.recipe.refits_only else _all_works(run, size, done)
    begun = time.monotonic()
    for count, (name, stage) in enumerate(lanes.run(works), start=1):
        took = "not needed"
        if stage is not None:
            done[name] = stage
            took = f"{stage.facts['seconds']:.0f} s"
        elapsed = clock(time.monotonic() - begun)
        say(f"{name}: {took} (stage {count} of {len(works)}, {elapsed} so far)")
        _tell_unfired(run, name, done)
        if name in ("rl_stock", "rl_aligned"):
            _tell_unmoved(run, name, done[name])
        if {"rollout_stress", "trainer"} <= done.keys():
            _agree(run, done)
    return done


def _rl_task(run: Run, size: Size, arithmetic: str, *after: str) -> lanes.Task:
    """An arm of the RL run. One waits for the other: two optimizers at a time would double the
    memory of a run."""
    sizes = {"stock": (size.stock_rl_steps, size.stock_rl_prompts), "aligned": (size.rl_steps,)}
    work = functools.partial(_rl, run, arithmetic, *sizes[arithmetic])
    name = f"rl_{arithmetic}"
    alone = stages.rl_alone(run.recipe)
    return lanes.Task(name, functools.partial(run.stage, name, work), after, alone)


def _refit_works(run: Run, size: Size) -> list[lanes.Task]:
    """The stages of a case that claims leg E alone; the claim comes first."""
    return [_rl_task(run, size, "aligned"), _rl_task(run, size, "stock", "rl_aligned")]


def _all_works(run: Run, size: Size, done: Mapping[str, Stage]) -> list[lanes.Task]:
    """All stages, once the capsules of a run are written and their hazards forecast."""
    budget = stages.stress(run)["max_num_batched_tokens"]
    requests = workload.main(run.recipe, run.model, size.requests, size.response, budget)
    if size.long_prompt is not None:
        requests.append(workload.long(run.recipe, size.long_prompt, size.response))
    capsule.write(requests, run.folder / "capsule.json")
    controls = workload.control(
        run.recipe, run.model, size.control_requests, size.control_response, size.control_prompt
    )
    for capsule_requests in (requests, controls):
        semantic.distinct((request.prompt, request.seed) for request in capsule_requests)
    forecast.check(run, requests)
    return _works(run, size, requests, controls, done)


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


def _works(
    run: Run,
    size: Size,
    requests: Sequence[capsule.Request],
    controls: Sequence[capsule.Request],
    done: Mapping[str, Stage],
) -> list[lanes.Task]:
    """All stages of a run, each with those whose results it reads from `done`."""
    legs, base = run.recipe.legs, workload.CONTROL_BASE
    works: list[lanes.Task] = []

    def add(name: str, work: Callable[[], Stage], *after: str, alone: bool = False) -> None:
        works.append(lanes.Task(name, lambda: run.stage(name, work), after, alone))

    def whole() -> Sequence[Sequence[int]]:
        return done["rollout_stress"].facts["sequences"]

    def own() -> Sequence[Sequence[int]]:
        return done["stock_rollout"].facts["sequences"]

    alone = stages.rl_alone(run.recipe)
    if run.recipe.rl is not None and alone:
        works.append(_rl_task(run, size, "stock"))  # first: it needs most memory
    add("rollout_stress", lambda: stages.rollout_stress(run, requests))
    if run.recipe.rl is not None and not alone:
        works.append(_rl_task(run, size, "stock"))  # early: it keeps one core busy for longest
    add("stock_rollout", lambda: stages.rollout_control(run, controls, arithmetic="stock"))
    add(
        "rollout_plain",
        lambda: stages.rollout_plain(run, requests, whole(), own(), size.alone),
        "rollout_stress",
        "stock_rollout",
    )
    add(
        "trainer",
        lambda: stages.trainer_score(run, whole(), layouts=("padded", "packed")),
        "rollout_stress",
    )
    if run.recipe.gdn_schedule is not None:
        _gdn_works(run, requests, own, add)
    if run.recipe.rl is not None:
        works.append(_rl_task(run, size, "aligned", "trainer", "rl_stock"))
    add(
        "stock_trainer",
        lambda: stages.trainer_score(run, own(), base=base, arithmetic="stock"),
        "stock_rollout",
    )
    planted = lanes.Task(
        "planted_rollout",
        lambda: _planted(run, controls, done["stock_rollout"]),
        ("stock_rollout",),
    )
    works.append(planted)
    if "O" in legs:
        add("oracle", lambda: stages.fp32_oracle(run, own()), "stock_rollout")
        add(
            "planted_oracle",
            lambda: stages.trainer_score(run, own(), base=base, fault=_oracle_fault(run.recipe)),
            "stock_rollout",
        )
    if "D" in legs:
        _layout_works(run, whole, add)
    return works


def _gdn_works(
    run: Run,
    requests: Sequence[capsule.Request],
    own: Callable[[], Sequence[Sequence[int]]],
    add,
) -> None:
    """Other ways to cut a prompt than that of the stress engine, and the schedule not named."""
    add("rollout_paged", lambda: stages.rollout_paged(run, requests), "rollout_stress")
    add("rollout_slices", lambda: stages.rollout_slices(run, requests), "rollout_stress")
    add(
        "planted_schedule",
        lambda: stages.trainer_score(
            run, own(), base=workload.CONTROL_BASE, fault="other_gdn_schedule"
        ),
        "stock_rollout",
    )


def _rl(run: Run, arithmetic: str, steps: int | None, prompts_per_step: int | None = None) -> Stage:
    return rl.run_rl(
        run,
        steps=steps or rl.settings_of(run.recipe)["steps"],
        arithmetic=arithmetic,
        prompts_per_step=prompts_per_step,
        refitted_tokens=CONTROL_TOKENS if arithmetic == "stock" else 0,
    )


# Ways in which a control arm computes what it prefills in a batch again.
_SELF_CONTROLS = ("alone", "decode")


def _planted(run: Run, controls: Sequence[capsule.Request], stock: Stage) -> Stage | None:
    """A planted fault for legs A and B, where stock happens to agree with itself."""
    streams = stock.streams
    pairs = (compare(streams[arm], streams["batch"]) for arm in _SELF_CONTROLS)
    if all(diverged(_control("stock", counts)) for counts in pairs):
        return None
    fault = "k_cut_by_rows"
    return run.stage(
        "planted_rollout",
        lambda: stages.rollout_control(run, controls, arithmetic="aligned", fault=fault),
    )


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


def _layout_works(run: Run, whole: Callable[[], Sequence[Sequence[int]]], add) -> None:
    """Ranks of one engine wait for each other, so such an engine keeps all CPUs."""
    for tp in run.recipe.rollout_tp:
        if tp > 1:
            add(
                f"rollout_tp{tp}",
                lambda tp=tp: stages.rollout_score(run, whole(), base=0, tp=tp),
                "rollout_stress",
                alone=True,
            )
    for tp in run.recipe.trainer_tp:
        if tp > 1:
            add(
                f"trainer_tp{tp}",
                lambda tp=tp: stages.trainer_score(run, whole(), tp=tp),
                "rollout_stress",
                alone=True,
            )
    largest = max(run.recipe.trainer_tp)
    add(
        "planted_ranks",
        lambda: stages.trainer_score(run, whole(), tp=largest, fault="rank_order_sum"),
        "rollout_stress",
        alone=True,
    )


# --- legs ---------------------------------------------------------------------------------------


class _Book:
    """Collects comparison records; every one names the command that repeats it."""

    def __init__(self, run: Run):
        self.command = required.command(run.recipe.case, run.flag)
        self.records: list[dict[str, Any]] = []

    def add(self, leg: str, name: str, counts: Counts, **fields) -> None:
        values = counts.values
        self.records.append(
            evidence.comparison(
                leg,
                name,
                rows.of(leg, name).sentence,
                tokens=counts.tokens,
                mismatches=counts.mismatches,
                streams=(counts.left_digest, counts.right_digest),
                max_abs=None if values is None else values.max_abs,
                first=None if counts.first is None else asdict(counts.first),
                command=self.command,
                **fields,
            )
        )


def _control(name: str, counts: Counts) -> dict[str, Any]:
    """Of whole rows, those with finite values: their digests do not say what they hold."""
    if counts.values is None:
        return evidence.control(name, counts.tokens, counts.finite)
    return evidence.control(name, counts.tokens, counts.mismatches, counts.values.max_abs)


def _judge(run: Run, done: Mapping[str, Stage]):
    """Comparison, oracle and RL records of everything that ran."""
    legs = run.recipe.legs
    book = _Book(run)
    if not run.recipe.refits_only:
        _leg_a(book, done)
        (_leg_b if "rollout_paged" not in done else _leg_b_of_states)(book, done)
        _leg_c(book, done)
    if "D" in legs:
        _leg_d(book, run, done)
    rl_record = None
    if "rl_aligned" in done:
        _leg_e(book, done)
        rl_record = _rl_record(run, done)
    if "F" in legs:
        _leg_f(book, run, done)
    oracles = [_leg_o(book, run, done)] if "O" in legs else []
    return book.records, oracles, rl_record


def _self_control(done: Mapping[str, Stage], left: str, right: str) -> dict[str, Any]:
    """Stock against itself, or the planted fault where stock happens to agree with itself."""
    streams = done["stock_rollout"].streams
    stock = _control("stock", compare(streams[left], streams[right]))
    if diverged(stock) or "planted_rollout" not in done:
        return stock
    planted = done["planted_rollout"].streams
    return _control("k_cut_by_rows", compare(planted[left], planted[right]))


def _leg_a(book: _Book, done: Mapping[str, Stage]) -> None:
    plain, stress = done["rollout_plain"], done["rollout_stress"]
    hazards = fired.batched(plain, stress)
    pair = "prefill-alone/prefill-batch"
    book.add(
        "A",
        pair,
        compare(plain.streams["alone"], plain.streams["batch"]),
        hazards=hazards[pair],
        control=_self_control(done, "alone", "batch"),
    )
    mixed = stress.streams["decode"]
    for arm in ("alone", "batch"):
        pair = f"decode-{arm}/decode-mixed"
        counts = compare(plain.streams[f"decode_{arm}"], mixed, sampled=True)
        book.add("A", pair, counts, hazards=hazards[pair])


def _leg_b(book: _Book, done: Mapping[str, Stage]) -> None:
    name = fired.ROWS["rollout_stress"]
    book.add(
        "B",
        name,
        compare(done["rollout_stress"].streams["decode"], done["rollout_plain"].streams["batch"]),
        hazards=fired.decoded(name, done["rollout_stress"]),
        control=_self_control(done, "decode", "batch"),
    )


def _leg_b_of_states(book: _Book, done: Mapping[str, Stage]) -> None:
    """Three engines decode the same requests along paths that share as little as possible."""
    prefill = done["rollout_plain"].streams["batch"]
    sliced = done["rollout_stress"].streams["decode"]
    paged = done["rollout_paged"].streams["decode"]
    in_slices, in_pages = (fired.ROWS_OF_STATES[n] for n in ("rollout_stress", "rollout_paged"))
    book.add(
        "B",
        in_slices,
        compare(sliced, prefill),
        hazards=fired.decoded(in_slices, done["rollout_stress"]),
        control=_self_control(done, "decode", "batch"),
    )
    book.add(
        "B",
        in_pages,
        compare(paged, prefill, sampled=True),
        hazards=fired.decoded(in_pages, done["rollout_paged"]),
    )
    book.add(
        "B",
        "decode-one-token-slices/prefill",
        compare(done["rollout_slices"].streams["decode"], prefill, sampled=True),
        hazards={"one_token_slice": done["rollout_slices"].facts["one_token_slices"]},
    )
    book.add(
        "B",
        "decode-sliced/decode-paged",
        compare(sliced, paged, sampled=True),
    )


def _leg_c(book: _Book, done: Mapping[str, Stage]) -> None:
    prefill, trainer = done["rollout_plain"].streams["batch"], done["trainer"].streams
    count = len(done["rollout_stress"].facts["sequences"])
    stock = compare(done["stock_trainer"].streams["padded"], done["stock_rollout"].streams["batch"])
    controls = {"padded": _control("stock", stock)}
    if "planted_schedule" in done:
        other = done["planted_schedule"].streams["padded"]
        controls["packed"] = _control(
            "other_gdn_schedule", compare(other, done["rollout_plain"].streams["extra"])
        )
    for layout in ("padded", "packed"):
        book.add(
            "C",
            f"trainer-{layout}/prefill",
            compare(trainer[layout], prefill),
            hazards={layout: count},
            control=controls.get(layout),
        )


def _layout(done: Mapping[str, Stage], side: str, tp: int) -> Stream:
    """Score of the main sequences by one layout; one rank is what the other legs ran."""
    if tp == 1:
        return {
            "rollout": done["rollout_plain"].streams["batch"],
            "trainer": done["trainer"].streams["padded"],
        }[side]
    return done[f"{side}_tp{tp}"].streams[{"rollout": "score", "trainer": "padded"}[side]]


def _ranks(done: Mapping[str, Stage], side: str, tp: int) -> int:
    """Ranks that really computed what `_layout` returns, as the engine counted them."""
    if side == "trainer":
        return done["trainer" if tp == 1 else f"trainer_tp{tp}"].facts["info"]["ranks"]
    if tp == 1:
        return done["rollout_plain"].facts["batch_hazards"]["ranks"]
    return done[f"rollout_tp{tp}"].facts["hazards"]["ranks"]


def _leg_d(book: _Book, run: Run, done: Mapping[str, Stage]) -> None:
    largest = max(run.recipe.trainer_tp)
    planted = compare(done["planted_ranks"].streams["padded"], _layout(done, "rollout", 1))
    for trainer_tp in run.recipe.trainer_tp:
        for rollout_tp in run.recipe.rollout_tp:
            last = (trainer_tp, rollout_tp) == (largest, 1)
            trained, rolled = (
                _ranks(done, "trainer", trainer_tp),
                _ranks(done, "rollout", rollout_tp),
            )
            layouts = (f"tp{trained}", f"tp{rolled}")
            book.add(
                "D",
                of_layouts(*layouts),
                compare(_layout(done, "trainer", trainer_tp), _layout(done, "rollout", rollout_tp)),
                layouts=layouts,
                hazards={"trainer_tp2": int(trained == 2), "rollout_tp2": int(rolled == 2)},
                control=_control("rank_order_sum", planted) if last else None,
            )


def _leg_e(book: _Book, done: Mapping[str, Stage]) -> None:
    book.add(
        "E",
        "rollout/trainer-after-refits",
        rl.as_counts(done["rl_aligned"]),
        hazards=fired.refitted(done["rl_aligned"]),
        control=_control("stock", rl.as_counts(done["rl_stock"])),
    )


def _leg_f(book: _Book, run: Run, done: Mapping[str, Stage]) -> None:
    trainer, stock = done["trainer"].streams, done["stock_trainer"].streams["padded"]
    # A digest names its columns, so equal ones cover on both sides what the trainer counted.
    counted = done["trainer"].facts["info"]["digest_columns"]
    columns = {"whole_row": counted if counted == run.recipe.config["vocab_size"] else 0}
    control = _control("stock", compare(stock, done["stock_rollout"].streams["batch"], "row"))
    for name, left, layout in (
        ("decode-rows/trainer-rows", done["rollout_stress"].streams["decode"], "padded"),
        ("prefill-rows/packed-trainer-rows", done["rollout_plain"].streams["batch"], "packed"),
    ):
        book.add(
            "F",
            name,
            compare(left, trainer[layout], "row"),
            hazards=columns,
            control=control,
        )


def _oracle_fault(recipe: Recipe) -> str:
    """The planted fault of leg O: the one that the recipe names, or else another rotary base."""
    named = recipe.legs["O"].control
    return named if named in faults.PLANTED else "rope_base_doubled"


def _leg_o(book: _Book, run: Run, done: Mapping[str, Stage]) -> dict[str, Any]:
    reference = done["oracle"].streams["oracle"]
    tokens, *aligned = oracle.distance(done["rollout_plain"].streams["extra"], reference)
    _, *stock = oracle.distance(done["stock_rollout"].streams["batch"], reference)
    planted, mean, _ = oracle.distance(done["planted_oracle"].streams["padded"], reference)
    name = "prefill/fp32-hugging-face"
    return evidence.oracle(
        name,
        rows.of("O", name).sentence,
        tokens=tokens,
        aligned=(aligned[0], aligned[1]),
        stock=(stock[0], stock[1]),
        control=(_oracle_fault(run.recipe), planted, mean),
        command=book.command,
    )


def _rl_record(run: Run, done: Mapping[str, Stage]) -> dict[str, Any]:
    arms = {}
    for arm in ("aligned", "stock"):
        arms[arm] = [
            evidence.rl_step(step["step"], step, step["reward"])
            for step in done[f"rl_{arm}"].facts["steps"]
        ]
    return evidence.rl(arms["aligned"], arms["stock"], required.rl_command(run.recipe.case))
