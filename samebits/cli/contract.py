"""`samebits contract`: build, show, compare and admit the contract of a model case."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebits.cli.output import show_progress
from samebits.errors import EXIT_DIFFERENT

if TYPE_CHECKING:
    from samebits.contract import Contract
    from samebits.recipe import Recipe

app = typer.Typer(
    no_args_is_help=True,
    help="The file that says which implementation computes which region.",
)

Cases = Annotated[
    list[str] | None, typer.Argument(help="Case names, folders or files; all cases by default.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _path(target: str) -> Path:
    """The contract file of a case name, a folder or a file."""
    from samebits import recipe as recipes

    given = Path(target)
    if given.suffix == ".json":
        return given
    if (given / "contract.json").is_file() and not (given / "recipe.yaml").is_file():
        return given / "contract.json"
    return recipes.load(target).contract_path


def _load(target: str) -> tuple[Contract, Recipe | None]:
    """Contract of a target. That of a case must fit the recipe beside it (SB0323)."""
    from samebits import recipe as recipes
    from samebits.contract import Contract

    contract = Contract.load(_path(target))
    assert contract.path is not None
    beside = contract.path.resolve().with_name("recipe.yaml")
    if contract.path.name != "contract.json" or not beside.is_file():
        return contract, None
    recipe = recipes.load(beside)
    contract.check_recipe(recipe)
    return contract, recipe


def _previous(path: Path) -> Any:
    """The contract at `path`, or None where there is none that can still be read."""
    from samebits.contract import Contract
    from samebits.errors import Refused

    try:
        return Contract.load(path) if path.exists() else None
    except Refused as refused:
        typer.echo(f"{path}: not used, {refused.error_id}; building anew", err=True)
        return None


@app.command()
def build(
    cases: Cases = None,
    renew: Annotated[
        bool,
        typer.Option(help="Replace this platform's recorded answers instead of refusing new ones."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Build contract.json from recipe and operators.

    The same inputs give the same bytes. Without names, a case of a platform that this machine is
    not is left as it is.
    """
    from samebits import recipe as recipes
    from samebits.contract.build import build as build_contract
    from samebits.contract.build import write
    from samebits.contract.platform import here

    rows = []
    for case in cases or recipes.known_cases():
        recipe = recipes.load(case)
        path = recipe.contract_path
        if not cases and not here(recipe.platform):
            typer.echo(f"{recipe.case}: left alone, its platform is {recipe.platform}", err=True)
            continue
        with show_progress(recipe.case, "regions") as told:
            contract = build_contract(recipe, previous=_previous(path), renew=renew, told=told)
        state = "written" if write(contract, path) else "unchanged"
        rows.append(
            {"case": recipe.case, "state": state, "digest": contract.digest, "file": str(path)}
        )
    _print(rows, as_json, lambda r: f"{r['case']}  {r['state']}  {r['digest']}  {r['file']}")


@app.command()
def show(
    case: Annotated[
        str | None, typer.Argument(help="Case or file; $SAMEBITS_CONTRACT by default.")
    ] = None,
    digests: Annotated[bool, typer.Option("--digests", help="Only the digests.")] = False,
    as_json: Json = False,
) -> None:
    """Print what a contract binds.

    Exits with 1, and names the regions on stderr, where sources here are not those that it binds.
    Refuses that of a case which is not what the case's recipe asks for, or which names other
    evidence than the case's.
    """
    from samebits import runtime
    from samebits.contract.build import check_proofs

    contract, recipe = _load(case) if case else (runtime.contract(), None)
    if recipe is not None:
        check_proofs(contract, recipe)
    shown = {"file": contract.digest, "identity": contract.identity} | dict(contract.digests)
    if digests:
        _print([shown], as_json, lambda row: "\n".join(f"{k:<18}{v}" for k, v in row.items()))
    elif as_json:
        typer.echo(json.dumps(contract.data, indent=2, sort_keys=True))
    else:
        typer.echo("\n".join(_describe(contract, shown)))
    changed = contract.changed_sources()
    for region, why in changed.items():
        typer.echo(f"not as bound: {region}: {why}", err=True)
    if changed:
        raise typer.Exit(EXIT_DIFFERENT)


def _describe(contract: Any, shown: dict[str, str]) -> list[str]:
    data = contract.data
    lines = [f"contract of {contract.case} ({data['model']['architecture']}, {contract.platform})"]
    lines.append("")
    width = max(len(region) for region in contract.regions)
    for region in contract.regions:
        entry = contract.entry(region)
        constants = ", ".join(f"{k}={_scalar(v)}" for k, v in sorted(entry["constants"].items()))
        lines.append(
            f"  {region:<{width}}  {entry['implementation']:<{width + 6}}  "
            f"{entry['content_hash'][:12]}  {constants}"
        )
    lines.append("")
    for axis, claim in sorted(data["claims"]["topology"].items()):
        sizes = ", ".join(map(str, claim["sizes"]))
        proof = claim["evidence"][:12] if claim["evidence"] else "none recorded"
        lines.append(f"  {axis:<{width}}  {sizes} (evidence: {proof})")
    lines += [f"  {'tolerances':<{width}}  none: bits are equal or they differ", ""]
    for key, record in data["platforms"].items():
        text = _words(record["description"])
        lines.append(f"  platform {key[:12]}: {len(record['known_answers'])} answers; {text}")
    return [*lines, "", *(f"  {name:<18}{value}" for name, value in shown.items())]


def _scalar(value: Any) -> str:
    from samebits.contract import canonical

    return f"{canonical.from_bits(value):.9g}" if isinstance(value, dict) else str(value)


@app.command()
def diff(
    left: Annotated[
        str | None, typer.Argument(help="Case or contract file; by default, every case with one.")
    ] = None,
    right: Annotated[
        str | None,
        typer.Argument(help="Case or contract file; by default, what `build` would write now."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List fields in which two contracts differ.

    Exits with 1 when there is one. Refuses that of a case which is not what the case's recipe
    asks for. Known answers of a platform that this machine is not are not computed again; those of
    a machine that is not on record are told, and differ only if no platform on record has them.
    """
    from samebits import recipe as recipes
    from samebits.contract.build import differences

    files = sorted(recipes.cases_folder().glob("*/contract.json"))
    names = [left] if left else [str(file) for file in files]
    rows = []
    for name in names:
        one, recipe = _load(name)
        other = _load(right)[0] if right else _rebuilt(one, recipe)
        rows += [
            {"case": one.case, "field": field, "left": a, "right": b}
            for field, a, b in differences(one.data, other.data)
        ]
    _print(
        rows,
        as_json,
        lambda row: f"{row['case']}: {row['field']}\n  - {row['left']}\n  + {row['right']}",
    )
    if rows:
        raise typer.Exit(EXIT_DIFFERENT)


def _rebuilt(contract: Contract, recipe: Recipe | None) -> Contract:
    """What `build` would write now, with known answers where this machine can compute them.

    A machine that is no platform of the contract is none of the difference either while its answers
    are those of one: bits that do not depend on the instruction set are what a contract is for.
    """
    from samebits import recipe as recipes
    from samebits.contract.build import build as build_contract
    from samebits.contract.platform import here

    asked = recipe or recipes.load(contract.case)
    built = build_contract(asked, previous=contract, probe=here(asked.platform))
    known = contract.data["platforms"].values()
    for key in built.data["platforms"].keys() - contract.data["platforms"].keys():
        record = built.data["platforms"][key]
        like = [r for r in known if r["known_answers"] == record["known_answers"]]
        if like:
            here_, there = (_words(r["description"]) for r in (record, like[0]))
            typer.echo(f"{contract.case}: {here_} is not on record; answers as {there}", err=True)
            return build_contract(asked, previous=contract, probe=False)
    return built


def _words(description: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(description.items()))


@app.command()
def admit(
    case: Annotated[str, typer.Argument(help="Case or contract file.")],
    as_json: Json = False,
) -> None:
    """Record this platform's known answers.

    Two processes, one for each engine's role, have to give the same ones.
    """
    import concurrent.futures
    import multiprocessing

    from samebits.contract.build import admit as add_platform
    from samebits.contract.build import write

    path = _path(case)
    contract, _ = _load(case)
    with concurrent.futures.ProcessPoolExecutor(
        2, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        rollout, trainer = pool.map(_bind, [path.resolve(), path.resolve()], ["rollout", "trainer"])
    changed = write(add_platform(contract, rollout, trainer), path)
    row = {
        "case": contract.case,
        "platform": rollout.platform,
        "status": rollout.status,
        "state": "written" if changed else "unchanged",
    }
    _print(
        [row],
        as_json,
        lambda r: f"{r['case']}  platform {r['platform'][:12]}: {r['status']}, {r['state']}",
    )


def _bind(path: Path, role: str) -> Any:
    """Bind in a process of its own, with no planted fault."""
    os.environ.pop("SAMEBITS_FAULT", None)
    from samebits.contract import Contract

    contract = Contract.load(path)
    os.environ["SAMEBITS_PLATFORM"] = contract.platform
    return contract.bind(role)


def _print(rows: list[dict[str, Any]], as_json: bool, line: Any) -> None:
    text = json.dumps(rows, indent=2) if as_json else "\n".join(map(line, rows))
    if text:
        typer.echo(text)
