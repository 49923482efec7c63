"""What evidence depends on, as it is now: trees, sources, weights, prompts. Reads files only."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits import prompts
from samebits.contract import canonical
from samebits.contract.sources import source_hash
from samebits.evidence import pairs

if TYPE_CHECKING:
    from samebits.contract import Contract
    from samebits.recipe import Recipe

HOOKS = ("vllm", "megatron", "verl")


def trees(recipe: Recipe) -> dict[str, str | None]:
    """Upstream -> tree id after the case's series in `patches/pins.yaml`, None if not recorded."""
    from samebits.patching import pins
    from samebits.patching.workspace import Workspace

    known = pins.load(Workspace.find())
    found: dict[str, str | None] = {}
    for upstream, series in recipe.series.items():
        pin = known.get(upstream)
        found[upstream] = (pin.trees or {}).get(series) if pin else None
    return found


def dependencies(recipe: Recipe) -> dict[str, str]:
    """Uri -> sha256 of what a run reads: the source of the weights, and the prompts if any.

    Drawn weights have no file: the digest is that of the model as the recipe describes it.
    """
    source = recipe.source
    if source["kind"] == "gguf-wheel":
        wheel = f"pkg:pypi/{source['distribution']}@{source['version']}"
        found = {wheel: source["wheel_sha256"], f"{wheel}#{source['file']}": source["sha256"]}
    else:
        found = {f"weights:{source['kind']}": canonical.digest(recipe.data["model"])}
    file = prompts.path(recipe)
    if file.is_file():
        found[file.name] = canonical.sha256(file.read_bytes())
    return found


def platform_of(sources: Sequence[Mapping[str, Any]]) -> str:
    """Platform of the recorded implementations: `implementation/gemm.row.sm90.1` is one of sm90."""
    named = (source["name"] for source in sources)
    on_gpu = any(name.startswith("implementation/") and ".sm90." in name for name in named)
    return "sm90" if on_gpu else "cpu"


def _foreign(parts: Sequence[str], gdn: bool, platform: str) -> bool:
    """Whether a hook's module (its dotted name in parts) is out of reach of a case."""
    of_cpu = any(part.startswith("cpu_") for part in parts)
    return (
        ("gdn" in parts and not gdn)
        or ("cuda" in parts and platform == "cpu")
        or (of_cpu and platform != "cpu")
    )


def hook_modules(engine: str, gdn: bool = False, platform: str = "cpu") -> list[str]:
    """All modules of `samebits.hooks.<engine>`, also those added since the evidence was written.

    Its package `gdn` counts only where Gated DeltaNet is bound, `cuda` not on a CPU, and modules
    called `cpu_*` only there: no other case can reach them.
    """
    spec = importlib.util.find_spec("samebits")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    names = []
    for file in (root / "hooks" / engine).rglob("*.py"):
        parts = file.relative_to(root.parent).with_suffix("").parts
        if _foreign(parts, gdn, platform):
            continue
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(names)


def _source(name: str, modules: list[str]) -> dict[str, Any]:
    return {"name": name, "modules": modules, "content_hash": source_hash(modules)}


def hook_sources(recorded: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every engine's hooks, with their content hash, that a case with these sources can reach."""
    gdn, platform = pairs.has_states(recorded), platform_of(recorded)
    return [_source(f"hooks/{engine}", hook_modules(engine, gdn, platform)) for engine in HOOKS]


def bound_sources(contract: Contract) -> list[dict[str, Any]]:
    """The implementations that a contract binds, as it binds them."""
    return [
        {
            "name": f"implementation/{entry['implementation']}",
            "modules": list(entry["modules"]),
            "content_hash": entry["content_hash"],
        }
        for entry in contract.data["composition"]
    ]


def sources(contract: Contract) -> list[dict[str, Any]]:
    """Bound implementations and hooks with their content hashes."""
    bound = [_source(entry["name"], entry["modules"]) for entry in bound_sources(contract)]
    return bound + hook_sources(bound)


def changed_sources(recorded: list[dict[str, Any]]) -> list[str]:
    """Names of recorded sources whose files, or whose set of files, are no longer the same."""
    from samebits.errors import Refused

    now = {source["name"]: source["content_hash"] for source in hook_sources(recorded)}
    changed = []
    for source in recorded:
        try:
            content = now.get(source["name"]) or source_hash(source["modules"])
        except Refused:  # a module that is gone
            content = "missing"
        if content != source["content_hash"]:
            changed.append(source["name"])
    return changed
