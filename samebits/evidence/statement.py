"""Build, write and read statements. A producer gives counts; verdict and digests are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits import files
from samebits.contract import canonical
from samebits.contract.fits import sizes_of
from samebits.errors import Refused
from samebits.evidence.verdict import CLAIM, ORACLE_FACTOR, check_consistent, judge

if TYPE_CHECKING:
    from samebits.contract import Contract
    from samebits.recipe import Recipe

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:samebits:evidence:v1"
# True of every statement, so no producer has to name it.
UNSIGNED = (
    "This statement carries no signature: its digest shows accidents and edits; "
    "only running it again shows a forgery."
)
# Why a run replaces another.
PROVED_AGAIN = "the case was proved again"
# Goes up when the rules of `verdict` change.
VERIFIER = {"id": "samebits.evidence", "version": "3"}


def schema() -> dict[str, Any]:
    """The JSON schema of a statement."""
    return canonical.load_schema("samebits.evidence")


def number(value: float) -> dict[str, str]:
    """A float as shortest decimal and as float64 bit pattern."""
    return {"decimal": repr(float(value))} | canonical.float_bits(float(value), "float64")


def control(
    name: str, tokens: int, mismatches: int, max_abs: float | None = None
) -> dict[str, Any]:
    """Negative control of a comparison: `stock`, or the name of a planted fault."""
    return {
        "kind": "stock" if name == "stock" else "planted",
        "name": name,
        "tokens": tokens,
        "mismatches": mismatches,
        "max_abs": None if max_abs is None else number(max_abs),
    }


def comparison(
    leg: str,
    name: str,
    sentence: str,
    *,
    tokens: int,
    mismatches: int,
    streams: tuple[str, str],
    command: str,
    max_abs: float | None = None,
    first: Mapping[str, Any] | None = None,
    hazards: Mapping[str, int] | None = None,
    control: Mapping[str, Any] | None = None,
    fault: str | None = None,
    layouts: tuple[str, str] = ("tp1", "tp1"),
) -> dict[str, Any]:
    """One compared pair of streams of leg A to F.

    streams   sha256 of the left and of the right stream
    max_abs   largest |dlogp|; None when digests of whole logit rows were compared
    first     {sequence, position, token, left, right} of the first difference
    """
    left, right = streams
    if mismatches and left == right:  # a NaN on both sides: equal bytes, and still a mismatch
        right = canonical.sha256(b"NaN in " + right.encode())
    return {
        "leg": leg,
        "name": name,
        "sentence": sentence,
        "compared": "row" if max_abs is None else "logprob",
        "layouts": {"left": layouts[0], "right": layouts[1]},
        "tokens": tokens,
        "mismatches": mismatches,
        "max_abs": None if max_abs is None else number(max_abs),
        "first_difference": None if first is None else dict(first),
        "streams": [{"left": left, "right": right}],
        "hazards": dict(hazards or {}),
        "fault": fault,
        "control": None if control is None else dict(control),
        "command": command,
    }


def oracle(
    name: str,
    sentence: str,
    *,
    tokens: int,
    aligned: tuple[float, float],
    stock: tuple[float, float],
    command: str,
    control: tuple[str, int, float] | None = None,
    hazards: Mapping[str, int] | None = None,
    fault: str | None = None,
) -> dict[str, Any]:
    """Leg O: distance to an fp32 oracle, (mean, max) |dlogp| of the aligned and the stock arm.

    control   (name of the planted fault, tokens, mean |dlogp|); must be further away than stock
              (`verdict.ORACLE_FACTOR`), while the aligned arm must not
    """
    return {
        "leg": "O",
        "name": name,
        "sentence": sentence,
        "tokens": tokens,
        "aligned_mean": number(aligned[0]),
        "aligned_max": number(aligned[1]),
        "stock_mean": number(stock[0]),
        "stock_max": number(stock[1]),
        "factor": number(ORACLE_FACTOR),
        "hazards": dict(hazards or {}),
        "fault": fault,
        "control": None
        if control is None
        else {
            "kind": "planted",
            "name": control[0],
            "tokens": control[1],
            "mean": number(control[2]),
        },
        "command": command,
    }


def rl_step(step: int, measured: Mapping[str, float | int], reward: float) -> dict[str, Any]:
    """One RL step (1-based) from `samebits.mismatch.Mismatch.as_dict()` and its mean reward."""
    record: dict[str, Any] = {
        "step": step,
        "tokens": int(measured["tokens"]),
        "mismatches": int(measured["mismatches"]),
        "reward": number(reward),
    }
    for name in ("max_abs", "mean_abs", "k3_kl", "is_ratio_max", "is_ratio_median"):
        record[name] = number(float(measured[name]))
    return record


def rl(
    aligned: Sequence[Mapping[str, Any]],
    stock: Sequence[Mapping[str, Any]],
    command: str,
    fault: str | None = None,
) -> dict[str, Any]:
    """The RL run: `rl_step` records of the aligned arm and of its stock control."""
    return {
        "aligned": [dict(step) for step in aligned],
        "stock": [dict(step) for step in stock],
        "fault": fault,
        "command": command,
    }


def integrity(data: Mapping[str, Any]) -> str:
    """Digest of a statement without its own `integrity` field."""
    predicate = {k: v for k, v in data["predicate"].items() if k != "integrity"}
    return canonical.digest({"subject": data["subject"], "predicate": predicate})


def unsealed(raw: bytes, what: str, closed: dict[str, Any]) -> Mapping[str, Any]:
    """Decoded strict JSON of a closed schema (SB0801) whose integrity digest is true (SB0802)."""
    data = canonical.decode(raw, what)
    canonical.check_schema(data, closed, "SB0801", what)
    seen, required = data["predicate"]["integrity"], integrity(data)
    if seen != required:
        raise Refused(
            "SB0802",
            seen=f"{what}: integrity digest {seen[:16]}..",
            required=f"{required[:16]}.., the digest of what the file says",
            hint="samebits explain SB0802",
        )
    return data


@dataclass(frozen=True)
class Statement:
    """A validated statement: strict JSON, closed schema, true integrity digest, true verdict."""

    raw: bytes
    data: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path) -> Statement:
        """Read and `parse` an evidence file; SB0303 where it cannot be read."""
        return cls.parse(canonical.read(path, "evidence", "samebits case list"), str(path))

    @classmethod
    def parse(cls, raw: bytes, what: str) -> Statement:
        """Refuse anything but what `build` could have written."""
        data = unsealed(raw, what, schema())
        predicate = data["predicate"]
        check_consistent(data, what)
        verdict = judge(predicate).verdict
        if predicate["verdict"] != verdict:
            raise Refused(
                "SB0803",
                seen=f"{what}: verdict {predicate['verdict']}",
                required=f"{verdict}, which follows from its counts",
                hint="samebits explain SB0803",
            )
        return cls(raw, data)

    @property
    def digest(self) -> str:
        """sha256 of the file."""
        return canonical.sha256(self.raw)

    @property
    def predicate(self) -> Mapping[str, Any]:
        """The statement's predicate: what was claimed, run and counted."""
        return self.data["predicate"]

    @property
    def verdict(self) -> str:
        """EQUAL, DIFFERENT or NOT_OBSERVED."""
        return self.predicate["verdict"]

    @property
    def case(self) -> str:
        """Name of the model case."""
        return self.predicate["parameters"]["case"]


def seal(data: Mapping[str, Any]) -> Statement:
    """Compute verdict and integrity of a statement document, and validate the result."""
    predicate = {k: v for k, v in data["predicate"].items() if k not in ("integrity", "verdict")}
    predicate["verdict"] = judge(predicate).verdict
    sealed = dict(data) | {"predicate": predicate}
    predicate["integrity"] = integrity(sealed)
    return Statement.parse(canonical.encode(sealed, "evidence"), "evidence")


def build(
    recipe: Recipe,
    contract: Contract,
    *,
    limits: Sequence[str],
    happenstance: Mapping[str, str],
    comparisons: Sequence[Mapping[str, Any]] = (),
    oracles: Sequence[Mapping[str, Any]] = (),
    rl: Mapping[str, Any] | None = None,
    trees: Mapping[str, str] | None = None,
    dependencies: Mapping[str, str] | None = None,
    intent: Mapping[str, str] | None = None,
    seeds: Mapping[str, int] | None = None,
    switches: Mapping[str, str] | None = None,
    not_covered: Sequence[str] = (),
    repeats: Mapping[str, str] | None = None,
    byproducts: Sequence[Mapping[str, Any]] = (),
    shard: str = "all",
) -> Statement:
    """Statement of one run (or shard of a run) of a case.

    limits        plain sentences, at least one; that statements are not signed is added
    happenstance  `started` and `finished` (ISO 8601), host class, clocks; never compared
    trees         upstream -> tree id that really ran (default: those that pins.yaml records)
    dependencies  uri -> sha256 of what was read (default: the case's weights and prompts, now)
    intent        versions and settings that could move bits (`contract.platform.describe`)
    repeats       run name -> `streams_digest` of a repeat on this machine
    shard         `all`, or `IofN` for a part; `merge` refuses the same part twice
    """
    from samebits.evidence import current

    ran = current.trees(recipe) if trees is None else trees
    read = current.dependencies(recipe) if dependencies is None else dependencies
    sources = current.sources(contract)
    subject: list[dict[str, Any]] = [
        {"name": f"tree/{upstream}", "digest": {"gitTree": tree}}
        for upstream, tree in sorted(ran.items())
        if tree is not None
    ]
    subject.append({"name": f"contract/{contract.case}", "digest": {"sha256": contract.identity}})
    subject.append({"name": f"recipe/{recipe.case}", "digest": {"sha256": recipe.digest}})
    subject += [{"name": s["name"], "digest": {"sha256": s["content_hash"]}} for s in sources]
    legs = recipe.legs
    return seal(
        {
            "_type": STATEMENT_TYPE,
            "predicateType": PREDICATE_TYPE,
            "subject": subject,
            "predicate": {
                "claim": {
                    "id": f"{recipe.case}/{CLAIM}",
                    "sentence": "Rollout and trainer compute the same bits for the "
                    "log-probability of every compared token.",
                    "equality": "bits",
                    "covered": list(contract.data["cases"]),
                    "not_covered": list(not_covered),
                },
                "parameters": {
                    "case": recipe.case,
                    "recipe": recipe.digest,
                    "contract": {"identity": contract.identity, "digest": contract.digest},
                    "legs": required_legs(legs),
                    "layouts": sizes_of(recipe),
                    "rl_steps": int((recipe.rl or {}).get("steps", 0 if rl is None else 1)),
                    "seeds": dict(seeds or {}),
                    "switches": dict(switches or {}),
                },
                "resolvedDependencies": [
                    {"uri": uri, "digest": {"sha256": digest}}
                    for uri, digest in sorted(read.items())
                ],
                "environment": {"intent": dict(intent or {}), "happenstance": dict(happenstance)},
                "sources": sources,
                "comparisons": [dict(record) for record in comparisons],
                "oracle": [dict(record) for record in oracles],
                "rl": None if rl is None else dict(rl),
                "shards": [shard],
                "repeats": [{"run": r, "streams": d} for r, d in sorted((repeats or {}).items())],
                "reproductions": [],
                "byproducts": [dict(record) for record in byproducts],
                "verifier": dict(VERIFIER),
                "limits": [*limits, UNSIGNED] if limits else [],  # none is refused by the schema
                "supersedes": None,
            },
        }
    )


def required_legs(legs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a recipe asks of each leg, as evidence records it."""
    return {
        name: {"tokens": leg.tokens, "hazards": list(leg.hazards), "control": leg.control}
        for name, leg in legs.items()
    }


def write(statement: Statement, path: Path, reason: str = PROVED_AGAIN) -> Statement:
    """Write atomically. An older valid statement at `path` is named in `supersedes`."""
    if path.exists():
        older = path.read_bytes()
        if older == statement.raw:
            return statement
        predicate = dict(statement.predicate)
        predicate["supersedes"] = {"statement": canonical.sha256(older), "reason": reason}
        statement = seal(dict(statement.data) | {"predicate": predicate})
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, statement.raw)
    return statement
