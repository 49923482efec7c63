"""The loaded contract: accessors, and the checks that an engine makes against it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.contract import canonical
from samebits.contract.dims import dims_of
from samebits.contract.fits import misfits
from samebits.contract.sources import source_hash
from samebits.errors import NotObserved, Refused, word
from samebits.plan import ReductionPlan

if TYPE_CHECKING:
    from samebits.contract.platform import Binding
    from samebits.ops.registry import Implementation
    from samebits.recipe import Recipe

ENGINE_CASES = ("engine_decode", "engine_prefill")
TRAINER_CASES = ("trainer_score", "trainer_train")
CASES = ENGINE_CASES + TRAINER_CASES
ROLES = {"rollout": ENGINE_CASES, "trainer": TRAINER_CASES}


def schema() -> dict[str, Any]:
    """The JSON schema of a contract."""
    return canonical.load_schema("samebits.contract")


def compute_digests(data: Mapping[str, Any]) -> dict[str, str]:
    """The four digests of a contract document.

    semantic          the model, and which regions each case computes
    numerical_policy  what decides bits: kind of chip, implementations, sources, constants, claimed
                      sizes; so contracts of two platforms never have one identity
    deployment        memory and transport settings, proven not to move bits
    platform          the platforms with a recorded known answer, and the answers

    The evidence of a claim is in none of them: evidence names the contract, not the reverse.
    """
    topology = data["claims"]["topology"]
    semantic = {
        "model": data["model"],
        "cases": data["cases"],
        "regions": [[entry["regions"], entry["cases"]] for entry in data["composition"]],
    }
    numerical = {
        "schema_version": data["schema_version"],
        "composition": data["composition"],
        "topology": {axis: claim["sizes"] for axis, claim in topology.items()},
        "state_invalidation": data["claims"]["state_invalidation"],
        "tolerances": data["claims"]["tolerances"],
    }
    if "platform" in data:
        numerical["platform"] = data["platform"]
    return {
        "semantic": canonical.digest(semantic),
        "numerical_policy": canonical.digest(numerical),
        "deployment": canonical.digest(data["deployment"]),
        "platform": canonical.digest(data["platforms"]),
    }


@dataclass(frozen=True)
class Contract:
    """A validated contract. `raw` is the file's bytes, `data` what they decode to."""

    raw: bytes
    data: Mapping[str, Any]
    path: Path | None = None

    @classmethod
    def load(cls, path: str | Path) -> Contract:
        """Read and validate a contract file (or the folder of its case)."""
        path = Path(path)
        if path.is_dir():
            path = path / "contract.json"
        hint = "samebits case list"
        if (path.parent / "recipe.yaml").is_file():
            hint = f"samebits contract build {word(path.parent)}"
        return cls.parse(canonical.read(path, "contract", hint), path)

    @classmethod
    def of(cls, recipe: Recipe) -> Contract:
        """The contract of a case, `load`ed; SB0323 where it is not what the recipe asks for."""
        contract = cls.load(recipe.contract_path)
        contract.check_recipe(recipe)
        return contract

    @classmethod
    def parse(cls, raw: bytes, path: Path | None = None) -> Contract:
        """Validate bytes: strict JSON, closed schema, canonical form, recomputed digests."""
        what = str(path or "contract")
        data = canonical.decode(raw, what)
        canonical.check_schema(data, schema(), "SB0304", what)
        _check_consistent(data, what, path)
        expected = compute_digests(data)
        for name, value in expected.items():
            if data["digests"][name] != value:
                raise Refused(
                    "SB0307",
                    seen=f"{what}: {name} digest {data['digests'][name][:16]}..",
                    required=f"{value[:16]}.., the digest of what the file says",
                    hint=_rebuild(path),
                )
        return cls(raw, data, path)

    @property
    def case(self) -> str:
        """Name of the model case."""
        return self.data["model"]["case"]

    @property
    def digest(self) -> str:
        """sha256 of the file: what engines exchange at each weight sync."""
        return canonical.sha256(self.raw)

    @property
    def digests(self) -> Mapping[str, str]:
        """semantic, numerical_policy, deployment, platform."""
        return self.data["digests"]

    @cached_property
    def identity(self) -> str:
        """Digest of what both sides must compute; admitting a platform does not change it."""
        return canonical.digest([self.digests["semantic"], self.digests["numerical_policy"]])

    @property
    def platform(self) -> str:
        """What the bound implementations run on: `cpu` or `sm90` (`runtime.PLATFORMS`)."""
        return self.data.get("platform", "cpu")

    @cached_property
    def _by_region(self) -> dict[str, Mapping[str, Any]]:
        return {region: entry for entry in self.data["composition"] for region in entry["regions"]}

    @property
    def regions(self) -> tuple[str, ...]:
        """Bound regions, in forward order."""
        return tuple(self._by_region)

    def entry(self, region: str) -> Mapping[str, Any]:
        """The composition entry that binds `region`."""
        if region not in self._by_region:
            raise Refused(
                "SB0315",
                seen=f"region {region}",
                required=f"one of {', '.join(self.regions)}",
                hint=f"samebits contract show {self.case}",
            )
        return self._by_region[region]

    def constants(self, region: str) -> Mapping[str, int | str]:
        """Constants of the schedule of `region`."""
        return self.entry(region)["constants"]

    def plan(self, region: str) -> ReductionPlan:
        """Reduction plan of `region`; one leaf where the schedule does not cut its sum."""
        leaves = self.constants(region).get("leaves", 1)
        assert isinstance(leaves, int)  # the schema check and the builder leave nothing else
        return ReductionPlan(leaves)

    def tp_sizes(self, role: str) -> tuple[int, ...]:
        """Tensor-parallel sizes that `role` (`rollout`, `trainer`) may run with."""
        return tuple(self.data["claims"]["topology"][f"{role}_tp"]["sizes"])

    def check_tp(self, role: str, size: int) -> None:
        """Refuse a tensor-parallel size that the contract does not claim."""
        if size not in self.tp_sizes(role):
            raise Refused(
                "SB0316",
                seen=f"{role} with tensor-parallel size {size}",
                required=f"one of {list(self.tp_sizes(role))}, claimed by case {self.case}",
                hint="samebits explain SB0316",
            )

    def check_model(self, hf_config: Any) -> None:
        """Refuse unless `hf_config` (a Hugging Face config, or a dict) is this contract's model."""
        required = self.data["model"]["dims"]
        seen = dims_of(hf_config, self.data["model"]["architecture"])
        wrong = [name for name in required if seen.get(name) != required[name]]
        if wrong:
            raise Refused(
                "SB0311",
                seen=", ".join(f"{name}={_show(seen.get(name))}" for name in wrong),
                required=", ".join(f"{name}={_show(required[name])}" for name in wrong)
                + f" (contract of {self.case})",
                hint=f"samebits contract show {self.case}",
            )

    def check_recipe(self, recipe: Recipe) -> None:
        """Refuse the contract of another case, or of an earlier state of the recipe."""
        fields = misfits(self.data, recipe)
        named = [entry for entry in fields if not entry[0].endswith("_digest")]
        wrong = [entry for field in named or fields for entry in _differing(*field)]
        if wrong:
            raise Refused(
                "SB0323",
                seen=f"{self.path or 'contract'}: "
                + ", ".join(f"{field} {_show(found)}" for field, found, _ in wrong),
                required=", ".join(f"{field} {_show(wanted)}" for field, _, wanted in wrong)
                + f" (recipe of {recipe.case})",
                hint=f"samebits contract build {recipe.case}",
            )

    def changed_sources(self) -> dict[str, str]:
        """Region -> why its present source is not the bound one. Reads files, imports nothing."""
        changed = {}
        for region in self.regions:
            entry = self.entry(region)
            try:
                content = source_hash(entry["modules"])
            except Refused as gone:
                changed[region] = gone.seen
                continue
            if content != entry["content_hash"]:
                changed[region] = f"source of {entry['implementation']} has hash {content[:16]}.."
        return changed

    def check_sources(self) -> None:
        """Refuse (SB0309) where the present sources are not what the contract binds."""
        changed = self.changed_sources()
        if changed:
            region = next(iter(changed))
            more = f" and {len(changed) - 1} more regions" if len(changed) > 1 else ""
            raise Refused(
                "SB0309",
                seen=f"{region}: {changed[region]}{more}",
                required=f"{self.entry(region)['content_hash'][:16]}.., which the contract binds",
                hint=f"samebits contract diff {self.case}",
            )

    def check_peer(self, digest: str, peer: str = "the other engine") -> None:
        """Refuse when the other side loaded other contract bytes."""
        if digest != self.digest:
            raise Refused(
                "SB0312",
                seen=f"{peer} holds contract {digest[:16]}..",
                required=f"{self.digest[:16]}.., the one loaded here",
                hint=f"samebits contract show {self.case}",
            )

    def check_served(self, counts: Mapping[str, int], cases: Iterable[str]) -> None:
        """A region bound for one of `cases` that never ran is a violation, whatever was equal."""
        wanted = set(cases)
        idle = [
            region
            for region, entry in self._by_region.items()
            if wanted & set(entry["cases"]) and counts.get(region, 0) < 1
        ]
        if idle:
            raise NotObserved(
                "SB0313",
                seen=f"never served: {', '.join(idle)}",
                required=f"every region bound for {', '.join(sorted(wanted))} runs at least once",
                hint=f"samebits contract show {self.case}",
            )

    def bind(
        self, role: str, implementations: Mapping[str, Implementation] | None = None
    ) -> Binding:
        """Check this process's operators against the contract and run their probes."""
        from samebits.contract.platform import bind

        return bind(self, role, implementations)


def _rebuild(path: Path | None) -> str:
    """What makes the very file anew; one without a recipe beside it can only be understood."""
    if path is not None and (path.parent / "recipe.yaml").is_file():
        return f"samebits contract build {word(path.parent)}"
    return "samebits explain SB0307"


def _differing(field: str, found: Any, wanted: Any) -> Iterator[tuple[str, Any, Any]]:
    """The keys in which two values of a field differ; a digest of them says nothing more."""
    if not (isinstance(found, Mapping) and isinstance(wanted, Mapping)) or "bits" in found:
        yield field, found, wanted
        return
    for key in sorted({*found, *wanted}):
        if found.get(key) != wanted.get(key):
            yield f"{field}.{key}", found.get(key), wanted.get(key)


def _show(value: Any) -> str:
    is_float = isinstance(value, dict) and set(value) == {"bits", "dtype"}
    return str(canonical.from_bits(value)) if is_float else str(value)


def _check_consistent(data: Mapping[str, Any], what: str, path: Path | None) -> None:
    """What a JSON schema cannot say: each region once, keys and inner digests true."""
    problems = []
    regions = [region for entry in data["composition"] for region in entry["regions"]]
    problems += [f"region {r} is bound twice" for r in sorted(set(regions)) if regions.count(r) > 1]
    platform = data.get("platform", "cpu")
    problems += [
        f"{entry['implementation']} is bound on {platform}"
        for entry in data["composition"]
        if f".{platform}." not in entry["implementation"]
    ]
    problems += [
        f"platform {key[:16]}.. is of kind {record['description'].get('kind')}, not {platform}"
        for key, record in data["platforms"].items()
        if record["description"].get("kind") != platform
    ]
    for entry in data["composition"]:
        leaves = entry["constants"].get("leaves", 1)
        if not isinstance(leaves, int) or leaves < 1 or leaves & (leaves - 1):
            problems.append(f"{entry['regions'][0]}: leaves is {leaves!r}, not a power of two")
    if canonical.digest(data["model"]["dims"]) != data["model"]["dims_digest"]:
        problems.append("dims_digest is not the digest of dims")
    for key, record in data["platforms"].items():
        if canonical.digest(record["description"]) != key:
            problems.append(f"platform key {key[:16]}.. is not the digest of its description")
        unknown = sorted(set(record["known_answers"]) - set(regions))
        problems += [f"known answer for {region}, which is not bound" for region in unknown]
    if problems:
        raise Refused(
            "SB0307",
            seen=f"{what}: {problems[0]}",
            required="a contract that agrees with itself",
            hint=_rebuild(path),
        )
