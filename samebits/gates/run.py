"""One proving run: a folder of finished stages, so that an interrupted run goes on where it was.

The folder is named by what the results depend on (recipe, weights, prompts, contract, patched
trees, sources of operators, hooks, engines, weight sync, faults and gates), so a change of any of
them starts afresh and never reuses old streams.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.contract import Contract, canonical
from samebits.contract.sources import module_file, source_hash
from samebits.errors import SamebitsError
from samebits.evidence import current
from samebits.gates.streams import Stream
from samebits.patching.workspace import Workspace
from samebits.recipe import Recipe

# Set while stages that did nothing wrong are being stopped, by Ctrl-C or the failure of another:
# what their engines then report is no fault of theirs.
stopping = threading.Event()


@dataclass(frozen=True)
class Stage:
    """Result of one stage: named streams, and JSON-able facts about how they came about."""

    streams: dict[str, Stream]
    facts: dict[str, Any]


class Run:
    """Folder, recipe, contract and model of a run; `flag` is the option that gave it its size.

    A `prefix` of the folder's name keeps a run apart from others of the same size and sources.
    """

    def __init__(
        self,
        recipe: Recipe,
        contract: Contract,
        model: Path,
        options: dict[str, int],
        flag: str = "",
        prefix: str = "",
    ):
        self.flag = flag
        self.recipe, self.contract, self.model, self.options = recipe, contract, model, options
        self.workspace = Workspace.find()
        self.dependencies = current.dependencies(recipe)
        key = canonical.digest(
            {
                "recipe": recipe.digest,
                "contract": contract.identity,
                "trees": {k: v or "" for k, v in current.trees(recipe).items()},
                "dependencies": self.dependencies,
                "sources": {s["name"]: s["content_hash"] for s in current.sources(contract)},
                "gates": source_hash([f"samebits.gates.{name}" for name in _PRODUCERS]),
                "engines": source_hash(engine_modules()),
                "options": options,
            }
        )
        self.folder = self.workspace.build / "runs" / recipe.case / f"{prefix}{key[:16]}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def has(self, name: str) -> bool:
        """Whether an earlier run finished a stage."""
        return (self.folder / f"{name}.json").exists()

    def stage(self, name: str, work: Callable[[], Stage]) -> Stage:
        """Run a stage, or load it when an earlier run finished it."""
        record = self.folder / f"{name}.json"
        if self.has(name):
            facts = json.loads(record.read_text())
            say(f"{name}: finished earlier, reused")
            loaded = {
                s: Stream.load(self.folder / f"{name}.{s}.npz") for s in facts.pop("_streams")
            }
            return Stage(loaded, facts)
        started = time.monotonic()
        say(f"{name} ...")
        try:
            done = work()
        except SamebitsError as error:
            took = clock(time.monotonic() - started)
            how = "stopped" if stopping.is_set() else f"ended by {error.error_id}"
            say(f"{name}: {how} after {took}; finished stages are kept")
            raise
        for stream, content in done.streams.items():
            content.save(self.folder / f"{name}.{stream}.npz")
        facts = {**done.facts, "seconds": round(time.monotonic() - started, 1)}
        unfinished = record.with_suffix(".part")
        unfinished.write_text(json.dumps({**facts, "_streams": sorted(done.streams)}))
        os.replace(unfinished, record)  # written last: its presence says that all streams are there
        return Stage(done.streams, facts)


def engine_modules() -> list[str]:
    """What starts, feeds and refits the engines. No evidence names it, and it can move streams."""
    found = ["samebits.faults"]
    for package in ("samebits.engines", "samebits.weights"):
        files = module_file(package).parent.glob("*.py")
        found += sorted(f"{package}.{f.stem}" for f in files if f.stem != "__init__")
    return found


def clock(seconds: float) -> str:
    """Minutes and seconds, as in 3:07."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def say(text: str) -> None:
    """Tell progress on stderr."""
    sys.stderr.write(f"prove: {text}\n")  # in one piece: stages that run side by side share stderr


# What decides the streams; how they are judged and shown may change without running them again.
_PRODUCERS = (
    "capsule",
    "oracle",
    "pages",
    "policy",
    "rl",
    "semantic",
    "stages",
    "streams",
    "tasks",
    "workload",
)
