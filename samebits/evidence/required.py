"""What every statement says in the same words, and what a run must have meant.

Gates write these; `verify` demands them of a file that somebody gives it, so that no statement can
be EQUAL for other semantics, limits or packages than those that the gates let through.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from samebits import recipe as recipes
from samebits.contract import Contract
from samebits.contract.platform import FIELDS, VERSIONS
from samebits.errors import Refused
from samebits.evidence import current, pairs, rows
from samebits.evidence.statement import PROVED_AGAIN, UNSIGNED, Statement

_LIMITS = (
    "Equality holds on one platform, engine against engine on the same kind of chip; nothing is "
    "claimed across platforms.",
    "Temperature 1, top-p 1, no penalties, no logits processors; other sampling is refused.",
    "Tensor parallelism only; pipeline, context, expert and sequence parallelism are refused.",
    "verl's algorithm functions, metrics and data structures run; its trainer loop does not.",
)
_LIMITS_OF = {
    "cpu": "CPU arithmetic: kernels for GPUs are not part of this statement.",
    "sm90": "One GPU of compute capability 9.0; the rollout replays decode steps from CUDA graphs. "
    "torch.compile is not part of this statement.",
}
_NOT_COVERED = ("sequence, pipeline, context and expert parallelism",)
_NOT_COVERED_OF = {
    "cpu": ("CUDA",),
    "sm90": ("several GPUs", "torch.compile"),
}
# More platforms than this are not combined to find the contract that a run was bound to.
_PLATFORMS = 8


def limits(platform: str) -> tuple[str, ...]:
    """Sentences that bound every statement of a case on `platform`."""
    return (*_LIMITS, _LIMITS_OF[platform])


def not_covered(platform: str, left_out: tuple[str, ...] = ()) -> tuple[str, ...]:
    """What a case on `platform` does not cover; `left_out` as of its recipe."""
    return (*left_out, *_NOT_COVERED_OF[platform], *_NOT_COVERED)


def command(case: str, flag: str = "") -> str:
    """The command that repeats a run; `flag` as of `gates.sizes.Size`."""
    return f"samebits prove {case}{flag}"


def rl_command(case: str) -> str:
    """The command that repeats the RL run alone."""
    return f"samebits rl {case}"


def seeds(recipe: recipes.Recipe) -> dict[str, int]:
    """Seeds of everything that a run of a case draws."""
    from samebits.gates import capsule

    drawn = {} if recipe.refits_only else capsule.SEEDS
    return {**drawn, **({"rl": recipe.rl["seed"]} if recipe.rl else {})}


def check(statement: Statement, recipe: recipes.Recipe) -> None:
    """SB0813 for other words, semantics or packages; SB0814 for another file of the contract."""
    for problem in _problems(statement.predicate, recipe):
        raise Refused(
            "SB0813",
            seen=problem,
            required="what the gates of this case demand and write",
            hint=f"samebits prove {recipe.case} --record",
        )
    if recipe.contract_path.is_file():
        contract = Contract.load(recipe.contract_path)
        if contract.identity == statement.predicate["parameters"]["contract"]["identity"]:
            _check_contract(statement, contract)


def _problems(predicate: Mapping[str, Any], recipe: recipes.Recipe) -> Iterator[str]:
    yield from _problems_of_words(predicate, recipe)
    yield from _problems_of_semantics(predicate, recipe)
    yield from _problems_of_origin(predicate, recipe)
    yield from _problems_of_platform(predicate, recipe)
    served = "" if recipe.refits_only else "ABC"  # which run whatever else is asked for
    asked = {*recipe.legs, *served, *("E" if recipe.rl else "")}
    ran = {row["leg"] for row in [*predicate["comparisons"], *predicate["oracle"]]}
    for leg in sorted(ran - asked):
        yield f"leg {leg}, which the recipe does not ask for"
    if predicate["rl"] is not None and recipe.rl is None:
        yield "an RL run, which the recipe does not ask for"
    yield from rows.problems(predicate, recipe)


def _problems_of_words(predicate: Mapping[str, Any], recipe: recipes.Recipe) -> Iterator[str]:
    if predicate["limits"] != [*limits(recipe.platform), UNSIGNED]:
        yield "other limits"
    if predicate["claim"]["not_covered"] != [*not_covered(recipe.platform, recipe.left_out)]:
        yield f"not covered: {', '.join(predicate['claim']['not_covered'])}"
    commands = {command(recipe.case), command(recipe.case, " --record")}
    for row in [*predicate["comparisons"], *predicate["oracle"]]:
        if row["command"] not in commands:
            yield f"leg {row['leg']}, {row['name']}: command {row['command']}"
    rl = predicate["rl"]
    if rl is not None and rl["command"] != rl_command(recipe.case):
        yield f"RL: command {rl['command']}"


def _problems_of_origin(predicate: Mapping[str, Any], recipe: recipes.Recipe) -> Iterator[str]:
    """Gates repeat no run inside of another and attach no files."""
    for name in ("repeats", "reproductions", "byproducts"):
        if predicate[name]:
            yield f"{name}, which no run writes"
    older = predicate["supersedes"]
    if older is not None and older["reason"] != PROVED_AGAIN:
        yield f"supersedes another, because {older['reason']}"
    with_states = pairs.has_states(predicate["sources"])
    for source in predicate["sources"]:
        group, _, engine = source["name"].partition("/")
        if group == "hooks":
            modules = current.hook_modules(engine, with_states, recipe.platform)
            # Where its files have changed too, the statement is stale.
            unchanged = source["content_hash"] == current.source_hash(modules)
            if unchanged and source["modules"] != modules:
                yield f"modules {', '.join(source['modules'])} of {source['name']}"
    if predicate["parameters"]["seeds"] != seeds(recipe):
        yield f"seeds {predicate['parameters']['seeds']}"


def _problems_of_platform(predicate: Mapping[str, Any], recipe: recipes.Recipe) -> Iterator[str]:
    """The chip and the implementations are those of the recipe's platform."""
    intent = predicate["environment"]["intent"]
    fields = set(FIELDS[recipe.platform])
    if set(intent) != fields:
        yield f"platform described by {', '.join(sorted(set(intent) ^ fields))}"
    bound = current.platform_of(predicate["sources"])
    for what, found in (("chip", intent.get("kind")), ("implementations", bound)):
        if found != recipe.platform:
            yield f"{what} of {found}, where the recipe is for {recipe.platform}"


def _problems_of_semantics(predicate: Mapping[str, Any], recipe: recipes.Recipe) -> Iterator[str]:
    from samebits.gates import semantic

    switches = dict(predicate["parameters"]["switches"])
    pairs = switches.pop("distinct_prompt_seed_pairs", None)
    wanted = semantic.required(recipe)
    for name in sorted({*switches, *wanted}):
        if switches.get(name) != wanted.get(name):
            yield f"switch {name}: {switches.get(name, 'not set')}"
    requests = _requests(predicate, recipe)
    each = {str(count // len(predicate["shards"])) for count in requests.values()}
    if pairs == "0" or {pairs} != each:
        found = " and ".join(f"{count} {kind}" for kind, count in requests.items())
        yield f"{pairs} distinct pairs of prompt and seed, for {found} sequences"


def _requests(predicate: Mapping[str, Any], recipe: recipes.Recipe) -> dict[str, int]:
    """How many requests were made, in every way that says so."""
    if recipe.refits_only:
        sizes = recipe.rl or {}
        names = ("steps", "prompts_per_step", "samples_per_prompt")
        return {"sampled": math.prod(sizes.get(name, 0) for name in names)}
    return {
        layout: sum(row["hazards"].get(layout, 0) for row in predicate["comparisons"])
        for layout in ("padded", "packed")
    }


def _check_contract(statement: Statement, contract: Contract) -> None:
    predicate = statement.predicate
    platforms = contract.data["platforms"].values()
    intent = predicate["environment"]["intent"]
    admitted = [_versions(entry["description"]) for entry in platforms]
    if admitted and _versions(intent) not in admitted:
        raise Refused(
            "SB0813",
            seen=_shown(_versions(intent)),
            required=" or ".join(map(_shown, admitted)),
            hint="samebits doctor",
        )
    found = predicate["parameters"]["contract"]["digest"]
    if not any(found == digest for digest in _earlier(contract, predicate["supersedes"])):
        raise Refused(
            "SB0814",
            seen=f"contract file {found[:16]}..",
            required=f"{contract.digest[:16]}.. ({contract.path}), or the same before it named "
            "this evidence or admitted a platform",
            hint=f"samebits prove {statement.case} --record",
        )


def _versions(description: Mapping[str, str]) -> dict[str, str]:
    """Versions of what computes, without the label of a build (`+cpu`); the rest of a platform may
    differ in a second run."""
    names = VERSIONS[description["kind"]]
    return {name: description[name].partition("+")[0] for name in names}


def _shown(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _earlier(contract: Contract, supersedes: Mapping[str, str] | None) -> Iterator[str]:
    """Digests of the contract file now, and of what it can have been when its case was proved.

    A contract names evidence only after that was written, and admits platforms without changing
    what is computed: so it may have named none or the older evidence, and held fewer platforms.
    """
    from samebits.contract.build import seal

    yield contract.digest
    platforms = list(contract.data["platforms"].items())[:_PLATFORMS]
    kept = [
        dict(chosen)
        for count in range(len(platforms), -1, -1)
        for chosen in itertools.combinations(platforms, count)
    ]
    topology = contract.data["claims"]["topology"]
    axes = sorted(topology)
    proofs = {None, *(claim["evidence"] for claim in topology.values())}
    if supersedes:
        proofs.add(supersedes["statement"])
    for named in itertools.product(proofs, repeat=len(axes)):
        for chosen in kept:
            data = copy.deepcopy(dict(contract.data)) | {"platforms": chosen}
            for axis, proof in zip(axes, named, strict=True):
                data["claims"]["topology"][axis]["evidence"] = proof
            yield seal(data).digest
