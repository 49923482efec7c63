"""Build a contract from a recipe and the installed operators; admit a new platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits import files
from samebits import recipe as recipes
from samebits.contract import canonical
from samebits.contract.fits import decisions_of, deployment_of, model_of, platform_of, sizes_of
from samebits.contract.model import CASES, Contract, compute_digests
from samebits.contract.platform import Binding, describe, require, run_probes
from samebits.errors import Refused
from samebits.plan import ReductionPlan

if TYPE_CHECKING:
    from samebits.ops.registry import Implementation

# A constant that an implementation registers with one of these is filled in from the recipe.
FROM_CONTRACT = ("contract", "plan")


def _check_expressible(recipe: recipes.Recipe) -> None:
    """Refuse dimensions that the reduction plan, or a claimed layout, cannot express."""
    config = recipe.config
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    plan = ReductionPlan(recipe.leaves)
    for length in (heads * config["head_dim"], config["intermediate_size"]):
        plan.cuts(length)
    vocabulary = ReductionPlan(recipe.vocabulary_leaves)
    vocabulary.cuts(config["vocab_size"])
    for size in sorted({*recipe.trainer_tp, *recipe.rollout_tp}):
        plan.local(size)
        vocabulary.local(size)
        if heads % size or kv_heads % size:
            raise Refused(
                "SB0316",
                seen=f"{recipe.case}: {heads} heads and {kv_heads} KV heads over {size} ranks",
                required="head counts that divide by every claimed tensor-parallel size",
                hint="samebits explain SB0316",
            )


def _constants(recipe: recipes.Recipe, implementation: Implementation) -> dict[str, Any]:
    """What the implementation fixes, with what the recipe decides filled in."""
    constants: dict[str, Any] = dict(implementation.constants)
    for name, value in decisions_of(recipe).get(implementation.region, {}).items():
        if name in constants and constants[name] not in (*FROM_CONTRACT, value):
            raise Refused(
                "SB0319",
                seen=f"{implementation.id} fixes {name}={constants[name]}",
                required=f"{name}={value}, which the recipe of {recipe.case} asks for",
                hint="samebits explain SB0319",
            )
        constants[name] = value
    return constants


def _composition(
    recipe: recipes.Recipe, installed: Mapping[str, Implementation]
) -> list[dict[str, Any]]:
    from samebits.ops import registry

    regions = registry.regions_of(recipe.architecture)
    missing = [region for region in regions if region not in installed]
    if missing:
        raise Refused(
            "SB0318",
            seen=f"no implementation of {', '.join(missing)}",
            required="one for every region of the model",
            hint="samebits explain SB0318",
        )
    return [
        {
            "regions": [region],
            "cases": list(CASES),
            "implementation": installed[region].id,
            "modules": list(installed[region].modules),
            "content_hash": installed[region].content_hash(),
            "constants": _constants(recipe, installed[region]),
        }
        for region in regions
    ]


def _kept_answers(
    previous: Contract | None, composition: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Known answers of an earlier build, for the regions whose entry did not change."""
    if previous is None:
        return {}
    unchanged = {e["regions"][0] for e in composition if e in previous.data["composition"]}
    kept: dict[str, dict[str, Any]] = {}
    for key, record in previous.data["platforms"].items():
        answers = {r: a for r, a in record["known_answers"].items() if r in unchanged}
        if answers:
            kept[key] = {"description": record["description"], "known_answers": answers}
    return kept


def build(
    recipe: recipes.Recipe,
    implementations: Mapping[str, Implementation] | None = None,
    previous: Contract | None = None,
    *,
    renew: bool = False,
    probe: bool = True,
    told: Callable[[str, int, int], None] | None = None,
) -> Contract:
    """Contract of a recipe. The same inputs give the same bytes.

    previous  an earlier build, whose known answers for unchanged entries stay on record
    renew     replace answers that this platform recorded earlier, instead of refusing (SB0310)
              when an operator gives other bits although its source did not change
    probe     False: compute nothing, and keep the answers of `previous`; what a machine without
              the recipe's chip can compare
    told      as of `platform.run_probes`: probes compile and run for a minute or more

    Refuses as `platform.require` where probes cannot run here, and SB0328 as `casework.engine`.
    """
    from samebits.casework import engine
    from samebits.ops import registry

    _check_expressible(recipe)
    engine.check(recipe)
    if probe:
        require(recipe.platform)
    installed = (
        registry.implementations(recipe.platform) if implementations is None else implementations
    )
    composition = _composition(recipe, installed)
    platforms = _kept_answers(previous, composition)
    if probe:
        regions = registry.regions_of(recipe.architecture)
        answers = run_probes({region: installed[region] for region in regions}, told)
        description = describe(recipe.platform)
        key = canonical.digest(description)
        recorded = platforms.get(key, {"known_answers": {}})["known_answers"]
        if not renew:
            _check_recorded(recipe, answers, recorded)
        platforms[key] = {"description": description, "known_answers": answers}
    contract = seal(
        {
            "schema_version": 1,
            **platform_of(recipe),
            "model": model_of(recipe),
            "cases": list(CASES),
            "composition": composition,
            "claims": {
                "topology": {
                    axis: {"sizes": sizes, "evidence": None}
                    for axis, sizes in sizes_of(recipe).items()
                },
                "state_invalidation": {
                    "kv_cache": ["weight_sync"],
                    "prefix_cache": ["weight_sync"],
                },
                "tolerances": [],
            },
            "deployment": deployment_of(recipe),
            "platforms": platforms,
        }
    )
    return with_proofs(contract, recipe)


def with_proofs(contract: Contract, recipe: recipes.Recipe) -> Contract:
    """The contract with each topology claim naming the recorded evidence that proves it, or none.

    Its identity stays: evidence that is fresh for a contract is so for the one that names it.
    """
    claims = dict(contract.data["claims"])
    proofs = proofs_of(contract, recipe)
    claims["topology"] = {
        axis: claim | {"evidence": proofs[axis]} for axis, claim in claims["topology"].items()
    }
    return seal(dict(contract.data) | {"claims": claims}, contract.path)


def _check_recorded(
    recipe: recipes.Recipe, answers: Mapping[str, str], recorded: Mapping[str, str]
) -> None:
    for region, answer in recorded.items():
        if answers[region] != answer:
            raise Refused(
                "SB0310",
                seen=f"{region}: probe answered {answers[region]}, and its source is unchanged",
                required=f"{answer}, recorded earlier for this platform",
                hint=f"samebits contract build {recipe.case} --renew",
            )


def proofs_of(contract: Contract, recipe: recipes.Recipe) -> dict[str, str | None]:
    """Topology axis -> digest of the case's evidence where it proves this very contract EQUAL."""
    from samebits.evidence.statement import Statement
    from samebits.evidence.verdict import EQUAL, judge_legs

    topology = contract.data["claims"]["topology"]
    nothing: dict[str, str | None] = dict.fromkeys(topology)
    if not recipe.evidence_path.is_file():
        return nothing
    statement = Statement.load(recipe.evidence_path)
    identity = statement.predicate["parameters"]["contract"]["identity"]
    if statement.verdict != EQUAL or identity != contract.identity:
        return nothing
    ranks = "D" in judge_legs(statement.predicate)
    return {
        axis: statement.digest if claim["sizes"] == [1] or ranks else None
        for axis, claim in topology.items()
    }


def check_proofs(contract: Contract, recipe: recipes.Recipe) -> None:
    """Refuse (SB0325) a topology claim that names other evidence than the one that proves it."""
    for axis, proof in proofs_of(contract, recipe).items():
        named = contract.data["claims"]["topology"][axis]["evidence"]
        if named not in (None, proof):
            raise Refused(
                "SB0325",
                seen=f"{contract.path or 'contract'}: {axis} names evidence {named[:16]}..",
                required=f"{proof[:16]}.." if proof else "none: no evidence here proves it EQUAL",
                hint=f"samebits contract build {recipe.case}",
            )


def seal(data: dict[str, Any], path: Path | None = None) -> Contract:
    """Compute the digests of a contract document and validate the result."""
    data = {name: value for name, value in data.items() if name != "digests"}
    data["digests"] = compute_digests(data)
    return Contract.parse(canonical.encode(data, "contract"), path)


def admit(contract: Contract, rollout: Binding, trainer: Binding) -> Contract:
    """The contract with this platform's answers added, after both engines gave the same ones."""
    rollout.check_peer(trainer.answers)
    platforms = dict(contract.data["platforms"])
    kept = platforms.get(rollout.platform, {"known_answers": {}})["known_answers"]
    answers = dict(rollout.answers) | dict(trainer.answers)
    platforms[rollout.platform] = {
        "description": dict(rollout.description),
        "known_answers": answers | kept,
    }
    return seal(dict(contract.data) | {"platforms": platforms}, contract.path)


def write(contract: Contract, path: Path) -> bool:
    """Write atomically; False when the file already holds these bytes."""
    if path.exists() and path.read_bytes() == contract.raw:
        return False
    files.write_atomic(path, contract.raw)
    return True


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(path, left, right) of every leaf in which two contract documents differ."""
    found: list[tuple[str, Any, Any]] = []

    def walk(where: str, a: Any, b: Any) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for name in sorted({*a, *b}):
                walk(f"{where}.{name}".lstrip("."), a.get(name), b.get(name))
        elif a != b:
            found.append((where, a, b))

    def flat(data: Mapping[str, Any]) -> dict[str, Any]:
        entries = {"+".join(e["regions"]): e for e in data["composition"]}
        return dict(data) | {"composition": entries}

    walk("", flat(left), flat(right))
    return found
