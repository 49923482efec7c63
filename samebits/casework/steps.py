"""The steps from a published model to a proven case, and where a case stands.

A step has an entry condition (`after`), one command, a pass line and the evidence that it leaves.
Its state is read from recipe, pins, contract and statements, each checked as `samebits verify`
checks it. A ledger adds what people decided; it can stop a step, never finish one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from samebits import evidence
from samebits import recipe as recipes
from samebits.casework import inventory, layouts, ledger, published, writeup
from samebits.contract import Contract, build
from samebits.errors import (
    EXIT_DIFFERENT,
    EXIT_EQUAL,
    EXIT_NOT_OBSERVED,
    EXIT_REFUSED,
    NotObserved,
    Refused,
    SamebitsError,
)
from samebits.evidence import current
from samebits.evidence.statement import Statement
from samebits.evidence.verdict import DIFFERENT, EQUAL, judge_controls
from samebits.evidence.verify import Result, changes
from samebits.patching.workspace import Workspace
from samebits.recipe import PUBLISHED, Recipe

DONE, OPEN, WAITING = "done", "open", "waiting"
# `different`: evidence shows a difference. `not observed`: it ran, and too little happened.
# `stale`: something it stands on changed. `refused`: a file that cannot be used.
DIFFERS, UNSEEN, STALE, BAD = "different", "not observed", "stale", "refused"
BLOCKED, OUT = "blocked", "out-of-scope"
SETTLED = (DONE, OUT)
# What evidence says against a case, which no decision hides.
AGAINST = (DIFFERS, BAD)
_SEMANTICS = {
    "distinct_prompt_seed_pairs",
    "logprobs_mode",
    "sampling",
    "sampling_refused",
    "token_ids",
    "vocabulary",
}


@dataclass(frozen=True)
class Found:
    """What the files say of a step, before entry conditions and decisions; `why` in a sentence."""

    state: str
    why: str = ""
    command: str | None = None


class Case:
    """Everything about a case that steps read; each part is looked at once.

    local   whether unrecorded runs of this machine (`build/runs`) count for the steps before the
            recorded one
    """

    def __init__(self, recipe: Recipe, *, local: bool = True):
        self.recipe, self.local = recipe, local
        self.name = recipe.case

    @cached_property
    def contract(self) -> Contract | SamebitsError:
        """The contract, or why there is none that fits the recipe."""
        try:
            return Contract.of(self.recipe)
        except SamebitsError as error:
            return error

    @cached_property
    def recorded(self) -> Result | SamebitsError:
        """The recorded evidence, verified, or why it is none."""
        try:
            return evidence.verify(self.recipe.folder)
        except SamebitsError as error:
            return error

    @cached_property
    def ran(self) -> tuple[Statement, str] | None:
        """The newest statement of the present sources and contract, and where it is from."""
        if isinstance(self.recorded, Result) and not self.recorded.stale:
            return self.recorded.statement, "recorded run"
        if not self.local:
            return None
        files = sorted(
            self._runs.glob("*/evidence.json"), key=lambda p: p.stat().st_mtime, reverse=True
        )
        for path in files:
            try:
                statement = Statement.load(path)
                if statement.case == self.name and not changes(statement, self.recipe):
                    return statement, "unrecorded run of this machine"
            except SamebitsError:
                continue  # an unfinished run, or one of another state of the project
        return None

    @cached_property
    def inventory(self) -> dict[str, Any] | None:
        """What `samebits trace` found here with the present contract."""
        if not self.local or not isinstance(self.contract, Contract):
            return None
        return inventory.read(self._runs, self.contract)

    @cached_property
    def siblings(self) -> list[Recipe]:
        """Other cases of the same model and weights, with its operators and patches: what one of
        them claims, this one need not show again."""

        def parts(of: Recipe) -> list[Any]:
            return [of.platform, *(of.data[part] for part in ("model", "series", "contract"))]

        found = []
        for name in recipes.known_cases():
            with contextlib.suppress(SamebitsError):  # a broken case shows nothing of another
                recipe = recipes.load(name)
                if name != self.name and parts(recipe) == parts(self.recipe):
                    found.append(recipe)
        return found

    @property
    def _runs(self) -> Path:
        """Folder of this machine's runs of the case."""
        return Workspace.find().build / "runs" / self.name

    @cached_property
    def claims_ranks(self) -> bool:
        """Whether recipe and contract claim more than one rank on a side."""
        return any(size > 1 for size in (*self.recipe.trainer_tp, *self.recipe.rollout_tp))


@dataclass(frozen=True)
class Step:
    """One step. `command` is for `{case}`; `claimed` says whether the case claims what it shows."""

    name: str
    title: str
    after: tuple[str, ...]
    command: str
    passes: str
    leaves: str
    find: Callable[[Case], Found] = field(repr=False)
    claimed: Callable[[Case], bool] = field(repr=False, default=lambda case: False)


# --- what the files say ---------------------------------------------------------------------------


def _intake(case: Case) -> Found:
    path = case.recipe.folder / PUBLISHED
    if path.is_file():
        config = published.read(path)
        gaps = published.gaps(config)
        if gaps:
            return Found(OPEN, f"not covered: {'; '.join(map(str, gaps))}")
        wrong = published.differences(config, case.recipe.config, path)
        if wrong:
            return Found(OPEN, f"recipe.yaml is not the published model: {'; '.join(wrong)}")
    problems = layouts.problems_of(case.recipe)
    if problems:
        return Found(OPEN, "; ".join(problems))
    layers = case.recipe.config["num_hidden_layers"]
    interval = case.recipe.config.get("full_attention_interval", 1)
    if layers < interval:
        return Found(OPEN, f"{layers} layers, none with full attention: {interval} have one")
    source = f"of {PUBLISHED}" if path.is_file() else f"of the recipe; there is no {PUBLISHED}"
    return Found(DONE, f"{case.recipe.architecture}, {layers} layers with the dimensions {source}")


def _pins(case: Case) -> Found:
    lacking = [name for name, tree in current.trees(case.recipe).items() if tree is None]
    if lacking:
        upstream = lacking[0]
        series = case.recipe.series[upstream]
        return Found(
            OPEN,
            f"pins.yaml has no tree of {', '.join(lacking)} after series {series}",
            f"samebits patch export {upstream} --record",
        )
    named = ", ".join(
        f"{name} {tree[:12]}" for name, tree in current.trees(case.recipe).items() if tree
    )
    return Found(DONE, f"trees {named}")


def _contract(case: Case) -> Found:
    contract = case.contract
    if not isinstance(contract, Contract):
        missing = not case.recipe.contract_path.is_file()
        return Found(
            OPEN if missing else STALE, "no contract.json" if missing else _brief(contract)
        )
    changed = current.changed_sources(current.bound_sources(contract))
    if changed:
        return Found(STALE, f"{', '.join(changed)} changed since the contract was built")
    if _names_other_evidence(contract, case.recipe):
        return Found(OPEN, "contract.json names other evidence than what proves it now")
    return Found(DONE, f"{len(contract.regions)} regions bound, identity {contract.identity[:12]}")


def _names_other_evidence(contract: Contract, recipe: Recipe) -> bool:
    """Whether `samebits contract diff` would list the evidence of a claim."""
    try:
        proofs = build.proofs_of(contract, recipe)
    except SamebitsError:
        return False  # no evidence: its legs say so
    topology = contract.data["claims"]["topology"]
    return any(topology[axis]["evidence"] != proof for axis, proof in proofs.items())


def _semantics(case: Case) -> Found:
    if case.ran is None:
        return _first_run(case)
    statement, where = case.ran
    seen = statement.predicate["parameters"]["switches"]
    vocabulary = str(case.recipe.config["vocab_size"])
    if (
        not set(seen) >= _SEMANTICS
        or seen["vocabulary"] != vocabulary
        or seen["logprobs_mode"] != "raw_logprobs"
    ):
        return Found(UNSEEN, f"the {where} does not say how it sampled and reported")
    pairs = seen["distinct_prompt_seed_pairs"]
    return Found(DONE, f"{pairs} distinct (prompt, seed) pairs, raw log-probabilities; {where}")


def _baseline(case: Case) -> Found:
    if case.ran is None:
        return _first_run(case)
    statement, where = case.ran
    judged = judge_controls(statement.predicate)
    if judged.reasons:
        return Found(UNSEEN, f"{'; '.join(judged.reasons)}; {where}")
    controls = [
        f"{r['leg']} {r['control']['name']} {r['control']['mismatches']}/{r['control']['tokens']}"
        for r in statement.predicate["comparisons"]
        if r["control"] is not None
    ]
    return Found(DONE, f"{', '.join(controls)}; {where}")


def _regions(case: Case) -> Found:
    from samebits.ops import registry

    if not isinstance(case.contract, Contract):
        return _no_run(case)
    wanted = registry.regions_of(case.recipe.architecture)
    missing = [region for region in wanted if region not in case.contract.regions]
    if missing:
        return Found(OPEN, f"no contract covers {', '.join(missing)}")
    traced = case.inventory
    for problem in inventory.PROBLEMS:
        if traced and traced[problem]:
            return Found(OPEN, f"{problem}: {', '.join(traced[problem])}")
    if case.ran is None and traced is None:
        return _no_run(case)
    # A run in which a bound region was not served by both engines ends without a statement.
    where = case.ran[1] if case.ran else "trace of this machine"
    return Found(DONE, f"{len(wanted)} regions bound, and served by both engines; {where}")


def _no_run(case: Case) -> Found:
    if isinstance(case.recorded, Result) and case.recorded.stale:
        return Found(STALE, case.recorded.stale[0])
    return Found(OPEN, "no run of the present sources and contract")


def _first_run(case: Case) -> Found:
    """As `_no_run`; a case that differs from a proved one in dimensions is recorded at once, since
    nothing of a quick run is used again."""
    found, alike = _no_run(case), _proved_alike(case.recipe)
    if found.state != OPEN or alike is None:
        return found
    why = f"{found.why}; {alike} is proved with its operators and patches: no need of --quick"
    return Found(OPEN, why, _RECORD.format(case=case.name))


def _proved_alike(recipe: Recipe) -> str | None:
    """A case with EQUAL evidence that is not stale, of the same architecture, platform, series and
    schedule."""

    def kind(of: Recipe) -> tuple[Any, ...]:
        return of.architecture, of.platform, dict(of.series), of.gdn_schedule

    for name in recipes.known_cases():
        try:
            other = recipes.load(name)
            recorded = name != recipe.case and other.evidence_path.is_file()
            if not recorded or kind(other) != kind(recipe):
                continue
            result = evidence.verify(other.folder)
            if not result.stale and result.statement.verdict == EQUAL:
                return name
        except SamebitsError:
            continue  # a broken case proves nothing of another
    return None


def _claims(recipe: Recipe, name: str) -> bool:
    """Whether a recipe claims a leg, or `rl`."""
    return recipe.rl is not None if name == "rl" else name in recipe.legs


def _leg(name: str, step: str) -> Callable[[Case], Found]:
    """What recorded evidence says of a leg, or of `rl`."""

    def find(case: Case) -> Found:
        what = "RL run" if name == "rl" else f"leg {name}"
        if not _claims(case.recipe, name):
            other = next((r.case for r in case.siblings if _claims(r, name)), None)
            if other is not None:
                return Found(OUT, f"{other} claims {what} of the same model, with its weights")
            return _unasked(case, what, step)
        result = case.recorded
        if isinstance(result, NotObserved):
            return Found(OPEN, "no recorded evidence")
        if isinstance(result, SamebitsError):
            return Found(BAD, _brief(result))
        if result.stale:
            return Found(STALE, result.stale[0])
        judged, row = result.legs[name], result.as_dict()["legs"][name]
        if judged.verdict == DIFFERENT:
            return Found(DIFFERS, judged.reasons[0], _locating(case, result, name))
        if judged.verdict != EQUAL:
            return Found(UNSEEN, "; ".join(judged.reasons))
        count = f"{row['mismatches']} of {row['tokens']:,} tokens differ"
        return Found(DONE, f"distances of {row['tokens']:,} tokens" if name == "O" else count)

    return find


def _unasked(case: Case, what: str, step: str) -> Found:
    """A step whose proof the recipe leaves out: somebody adds it, or says why not."""
    why = f"recipe.yaml asks for no {what}: add it as in cases/_template"
    if step not in ledger.optional_steps() or step == "topology":
        return Found(OPEN, why, f"samebits case show {case.name}")
    return Found(
        OPEN,
        f"{why}, or put it out of scope",
        f'samebits case decide {case.name} {step} out-of-scope --reason "WHY"',
    )


def _locating(case: Case, result: Result, leg: str) -> str | None:
    """The command that locates the first difference of a leg, where one can."""
    for record in result.statement.predicate["comparisons"]:
        first = record["first_difference"]
        if record["leg"] == leg and first is not None and leg in "BCDF":
            return f"samebits prove {case.name} --record --locate {first['sequence']}"
    return None


def _topology(case: Case) -> Found:
    if not case.claims_ranks:
        return Found(OUT, "recipe and contract claim one rank on each side")
    return _leg("D", "topology")(case)


def _fired(step: str, *hazards: str) -> Callable[[Case], Found]:
    """Leg E, and these hazards in its evidence."""

    def find(case: Case) -> Found:
        found = _leg("E", step)(case)
        if found.state != DONE:
            return found
        assert isinstance(case.recorded, Result)
        rows = [r for r in case.recorded.statement.predicate["comparisons"] if r["leg"] == "E"]
        counts = {name: sum(r["hazards"].get(name, 0) for r in rows) for name in hazards}
        if not all(counts.values()):
            return Found(UNSEEN, f"never fired: {', '.join(n for n, c in counts.items() if not c)}")
        return Found(DONE, ", ".join(f"{name} {count}" for name, count in counts.items()))

    return find


def rows_of(case: str) -> list[dict[str, Any]]:
    """Recorded benchmark rows of whole engines that name this case; one without a ratio, whose
    other side was not measured, says nothing of what a case costs."""
    from samebits import bench

    try:
        rows = bench.recorded()
    except NotObserved:
        return []
    mine = (row for row in rows if row["work"].endswith(f", {case}"))
    return [row for row in mine if row["ratio"] is not None]


def _overhead(case: Case) -> Found:
    rows = rows_of(case.name)
    lacking = [e for e in ("rollout", "trainer") if not any(r["work"].startswith(e) for r in rows)]
    if lacking:
        name = {"cpu": "rollout", "sm90": "engines"}[case.recipe.platform]
        return Found(
            OPEN,
            f"no recorded row of {' and '.join(lacking)} for this case",
            f"samebits bench run {name} --case {case.name} --record",
        )
    ratios = ", ".join(f"{r['work'].rpartition(', ')[0]} {r['ratio']:.2f}" for r in rows)
    return Found(DONE, f"ours over stock: {ratios}")


def _write_up(case: Case) -> Found:
    problems = writeup.problems(case.recipe)
    return Found(OPEN, "; ".join(problems)) if problems else Found(DONE, "recipe.md and broke.md")


def _brief(error: SamebitsError) -> str:
    return f"{error.error_id}: {error.seen}"


def _asks(leg: str) -> Callable[[Case], bool]:
    return lambda case: leg in case.recipe.legs


_QUICK, _RECORD = "samebits prove {case} --quick", "samebits prove {case} --record"
_STATEMENT = "evidence/evidence.json"
STEPS = (
    Step(
        "intake",
        "architecture and dimensions are supported",
        (),
        "samebits plan {case}",
        "every region has an operator, claimed layouts are admissible, dimensions are published",
        "recipe.yaml, config.json",
        _intake,
    ),
    Step(
        "pins",
        "upstreams are pinned after the case's series",
        ("intake",),
        "samebits patch check",
        "pins.yaml has a tree id of vllm, megatron and verl after the series of the recipe",
        "patches/pins.yaml",
        _pins,
    ),
    Step(
        "contract",
        "one contract binds every region",
        ("pins",),
        "samebits contract build {case}",
        "contract.json fits the recipe and the operators that are installed",
        "contract.json",
        _contract,
    ),
    Step(
        "semantics",
        "both engines mean the same",
        ("contract",),
        _QUICK,
        "token ids in and out, raw log-probabilities, other sampling refused, distinct seeds",
        "switches of a statement",
        _semantics,
    ),
    Step(
        "baseline",
        "alignment off differs",
        ("semantics",),
        _QUICK,
        "the control of every leg diverged on 32 tokens or more",
        "controls of a statement",
        _baseline,
    ),
    Step(
        "regions",
        "region inventory of both engines",
        ("contract",),
        "samebits trace {case}",
        "every region is bound and both engines called it; no sum or product outside of regions",
        "implementations of a statement, or the trace of this machine",
        _regions,
    ),
    *(
        Step(
            f"leg-{leg.lower()}",
            title,
            ("baseline", "regions"),
            _RECORD,
            f"leg {leg} is EQUAL in recorded evidence that is not stale",
            _STATEMENT,
            _leg(leg, f"leg-{leg.lower()}"),
        )
        for leg, title in (
            ("A", "a row alone = the row in any batch"),
            ("B", "decode = prefill"),
            ("C", "trainer = prefill"),
        )
    ),
    Step(
        "topology",
        "every claimed layout = one rank",
        ("leg-a", "leg-b", "leg-c"),
        _RECORD,
        "leg D is EQUAL for every layout that recipe and contract claim",
        _STATEMENT,
        _topology,
        lambda case: case.claims_ranks,
    ),
    Step(
        "rows",
        "whole logit rows are equal",
        ("leg-c",),
        _RECORD,
        "leg F is EQUAL",
        _STATEMENT,
        _leg("F", "rows"),
        _asks("F"),
    ),
    Step(
        "oracle",
        "mean distance to fp32 no larger than that of stock",
        ("leg-c",),
        _RECORD,
        "leg O: mean distance no larger than that of stock, its planted fault further away",
        _STATEMENT,
        _leg("O", "oracle"),
        _asks("O"),
    ),
    Step(
        "backward",
        "optimizer steps move the weights",
        ("leg-c",),
        _RECORD,
        "steps with a non-zero gradient fired in leg E; gradients against float64 are in tests/ops",
        _STATEMENT,
        _fired("backward", "optimizer_step"),
        _asks("E"),
    ),
    Step(
        "refit",
        "still equal after a weight sync",
        ("backward",),
        _RECORD,
        "leg E is EQUAL, refits happened, and the prefix cache was dropped",
        _STATEMENT,
        _fired("refit", "refit", "prefix_cache_invalidated"),
        _asks("E"),
    ),
    Step(
        "rl",
        "RL steps",
        ("refit",),
        _RECORD,
        "every step of the recipe without a mismatch, and the stock arm diverged",
        _STATEMENT,
        _leg("rl", "rl"),
        lambda case: case.recipe.rl is not None,
    ),
    Step(
        "overhead",
        "what it costs beside stock engines",
        ("leg-a", "leg-b", "leg-c"),
        "samebits bench run rollout --case {case} --record",
        "rows of rollout and trainer that name the case",
        "cases/bench.json",
        _overhead,
    ),
    Step(
        "write-up",
        "recipe and what broke",
        ("topology", "rows", "oracle", "rl", "overhead"),
        "samebits case status {case}",
        "recipe.md and broke.md are whole: no placeholder, limits, guards that exist",
        "recipe.md, broke.md",
        _write_up,
    ),
)


# --- where a case stands --------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A step of a case: its state, why, and the command that moves it."""

    step: str
    title: str
    state: str
    why: str
    command: str
    passes: str
    leaves: str
    after: tuple[str, ...]


@dataclass(frozen=True)
class Progress:
    """Where a case stands; `scope` as of its recipe."""

    case: str
    states: tuple[State, ...]
    notes: tuple[Mapping[str, str], ...]
    scope: str = ""

    @property
    def settled(self) -> int:
        """Steps that are done or out of scope."""
        return sum(state.state in SETTLED for state in self.states)

    @property
    def out_of_scope(self) -> int:
        """Steps whose proof the case leaves out: settled, and nothing shown."""
        return sum(state.state == OUT for state in self.states)

    def summary(self) -> str:
        """One line: steps settled, how many of them out of scope, and the scope of the case."""
        text = f"{self.case}: {self.settled} of {len(self.states)} steps settled"
        if self.out_of_scope:
            text += f", {self.out_of_scope} of them out of scope"
        return recipes.qualified(text, self.scope)

    @property
    def next(self) -> State | None:
        """The step to work on: what evidence speaks against first, else the first one open."""
        against = [s for s in self.states if s.state in AGAINST]
        return next(
            iter(against + [s for s in self.states if s.state in (OPEN, STALE, UNSEEN)]), None
        )

    @property
    def blocked(self) -> list[State]:
        """The steps that somebody decided to stop."""
        return [state for state in self.states if state.state == BLOCKED]

    def behind(self, name: str) -> list[str]:
        """The steps that wait for one, also through others that do."""
        found = {name}
        for state in self.states:
            if state.state == WAITING and found.intersection(state.after):
                found.add(state.step)
        return [state.step for state in self.states if state.step in found - {name}]

    def stopped(self) -> str:
        """One line on every blocked step: why, and what waits for it; empty where none is."""
        texts = []
        for state in self.blocked:
            behind = ", ".join(self.behind(state.step))
            texts.append(f"{state.step}: {state.why}" + (f"; {behind} after it" if behind else ""))
        return f"blocked: {'; '.join(texts)}" if texts else ""

    @property
    def exit_code(self) -> int:
        """0 all settled, 1 evidence shows a difference, 2 a file is refused, 3 otherwise."""
        states = {state.state for state in self.states}
        if BAD in states:
            return EXIT_REFUSED
        if DIFFERS in states:
            return EXIT_DIFFERENT
        return EXIT_EQUAL if states <= set(SETTLED) else EXIT_NOT_OBSERVED

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        following = self.next
        return {
            "case": self.case,
            "settled": self.settled,
            "of": len(self.states),
            "out_of_scope": self.out_of_scope,
            "scope": self.scope,
            "next": following and {"step": following.step, "command": following.command},
            "blocked": [
                {"step": s.step, "why": s.why, "behind": self.behind(s.step)} for s in self.blocked
            ],
            "steps": [asdict(state) for state in self.states],
            "notes": [dict(note) for note in self.notes],
        }


def progress(case: str, *, local: bool = True) -> Progress:
    """Where a case stands; refuses a recipe or ledger that is not one (SB0314, SB0917, SB0918)."""
    looked = Case(recipes.load(case), local=local)
    book = ledger.load(looked.recipe)
    states: dict[str, State] = {}
    for step in STEPS:
        waits = [name for name in step.after if states[name].state not in SETTLED]
        found = _decided(step, looked, book["decisions"].get(step.name), waits)
        states[step.name] = State(
            step.name,
            step.title,
            found.state,
            found.why,
            found.command or step.command.format(case=looked.name),
            step.passes,
            step.leaves,
            step.after,
        )
    notes = tuple(book["notes"])
    return Progress(looked.name, tuple(states.values()), notes, looked.recipe.scope)


def _decided(step: Step, case: Case, decision: Mapping[str, str] | None, waits: list[str]) -> Found:
    """What the files say, then what people decided, then what has to come first."""
    if decision is not None and decision["decision"] == OUT:
        refuse_claimed(case.recipe, step.name)
    found = step.find(case)
    if decision is not None and decision["decision"] == found.state:
        found = Found(found.state, f"{decision['reason']} ({decision['date']})")
    if found.state in AGAINST or (found.state in SETTLED and not waits):
        return found
    if decision is not None:
        return Found(decision["decision"], f"{decision['reason']} ({decision['date']})")
    if waits:
        return Found(WAITING, f"after {', '.join(waits)}")
    return found


def refuse_claimed(recipe: Recipe, name: str) -> None:
    """SB0918 when a step may not be out of scope, because the case claims what it shows."""
    if any(step.name == name and step.claimed(Case(recipe)) for step in STEPS):
        raise Refused(
            "SB0918",
            seen=f"{name} of {recipe.case} out of scope",
            required="a recipe that does not claim what the step shows",
            hint=f"samebits case show {recipe.case}",
        )
