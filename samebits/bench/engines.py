"""Whole engines on a GPU: `samebits bench run engines --case CASE --record`.

Rollout: tokens of 256 concurrent requests, aligned with CUDA graphs, against the fastest of vLLM's
own configurations, and of a model with recurrent states the pages of a sequence. Trainer: forward
and backward of 8192 tokens, aligned against Megatron's local spec. The gate comes first: what the
aligned engine decodes equals its own prefill, and that the trainer's score; while it is red there
are no rows.

Every configuration is one process, and what it measured is kept in `build/bench` under the state of
the sources: a run that was interrupted goes on with the next one. A configuration that does not run
is kept with its reason; delete its file to try again.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from samebits import env, files
from samebits import recipe as recipes
from samebits.bench import engine_arm, engine_choice, engine_memory, engine_rows
from samebits.bench.engine_arm import MODES, PASS, Arm, median
from samebits.bench.engine_choice import Choice
from samebits.bench.engine_process import ArmProcess
from samebits.bench.rollout import loss, trainer_of
from samebits.contract import Contract, canonical
from samebits.contract.platform import require
from samebits.contract.sources import source_hash
from samebits.engines.rollout import RolloutSettings
from samebits.engines.trainer_batch import TrainBatch
from samebits.errors import Different, Refused, SamebitsError
from samebits.gates.run import engine_modules
from samebits.mismatch import as_bits
from samebits.patching.workspace import Workspace
from samebits.recipe import Recipe

_FREE = 0.92  # share of the free memory that engines may fill together
_Item = TypeVar("_Item")


def rows(name: str, choice: Choice | None = None) -> list[dict[str, Any]]:
    """Rows of the case's engines; SB0440 while the gate is red.

    choice   configurations to run (all by default); the others are in the rows as not run, unless
             this state of the sources measured them before, and rows without one of those that
             compete say so and have no target
    """
    choice = choice or Choice()
    case = recipes.load(name)
    require(case.platform)
    Contract.of(case).check_sources()
    from samebits.weights import sources

    model = sources.prepare(case)
    folder = _folder(case)
    found = [*_rollouts(case, model, folder, choice)]
    passes = {a: _passes(case, model, folder, a) for a in ("aligned", "stock")}
    gate(found[0], passes["aligned"], Contract.of(case).regions)
    return [
        *engine_rows.rollout_rows(case.case, found),
        *engine_rows.memory_rows(case.case, found),
        *engine_rows.trainer_rows(case.case, passes),
    ]


def _folder(case: Recipe) -> Path:
    """Where this state of the sources keeps what was measured."""
    key = canonical.digest(
        {
            "recipe": case.digest,
            "contract": Contract.of(case).identity,
            "chip": env.chip(),
            "memory": _memory()[1],
            "engines": source_hash(engine_modules()),
            "sources": source_hash(
                [
                    "samebits.casework.memory",
                    "samebits.bench.engines",
                    "samebits.bench.engine_arm",
                    "samebits.bench.engine_choice",
                    "samebits.bench.engine_memory",
                    "samebits.bench.engine_process",
                    "samebits.bench.engine_worker",
                    "samebits.bench.stock_hybrid",
                ]
            ),
        }
    )
    folder = Workspace.find().build / "bench" / case.case / key[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _kept(path: Path, measure: Callable[[], dict[str, Any]], *, aligned: bool) -> dict[str, Any]:
    """What a file holds, or else what `measure` returns, which is then written to it.

    A failure of an aligned engine is not kept: it is there to be repaired.
    """
    if path.exists():
        found = json.loads(path.read_text())
    else:
        found = measure()
        if not aligned or "failed" not in found:
            files.write_atomic(path, json.dumps(found).encode())
    sys.stderr.write(f"bench: {found['name']}: {shown(found)}\n")
    return found


def shown(found: Mapping[str, Any]) -> str:
    """One configuration in a line."""
    if "failed" in found:
        return f"not measured: {found['failed']}"
    seconds = found["seconds"]
    times = seconds.items() if isinstance(seconds, dict) else [("a pass", seconds)]
    parts = [f"{what} {statistics.median(values):.3f} s" for what, values in times]
    return f"{', '.join(parts)}; gate {found['mismatches']} of {found['gated']} differ"


def gate(rollout: Mapping[str, Any], passes: Mapping[str, Any], regions: Collection[str]) -> None:
    """SB0440 unless the aligned engine served every region and decoded what it prefilled, and the
    trainer, where it ran, scored and trained with the same bits."""
    compared = [("decode and prefill", rollout["mismatches"], rollout["gated"])]
    if "failed" not in passes:
        scored, prefilled = passes["scored"], rollout["prefilled"]
        tokens = sum(map(len, scored))
        compared += [
            ("score and prefill", engine_arm.differing(scored, prefilled), tokens),
            ("score and training forward", passes["mismatches"], tokens),
        ]
    wrong = [f"{what}: {n} of {of} tokens differ" for what, n, of in compared if n or not of]
    wrong += [f"{region} was not served" for region in regions if not rollout["served"].get(region)]
    if wrong:
        raise Different(
            "SB0440",
            seen="; ".join(wrong),
            required="decode, prefill and the trainer's score with equal bits",
            hint="samebits explain SB0440",
        )


# --- rollout --------------------------------------------------------------------------------


def _rollouts(case: Recipe, model: Path, folder: Path, choice: Choice) -> Iterator[dict[str, Any]]:
    """What every configuration measured, the aligned one first, and last those that did not run.

    As many as the GPU holds start together, and are measured in turn. One that does not start
    compiled is tried with graphs of decode steps alone.
    """
    stock = folder.parent / "model"
    aligned, own = engine_choice.arms(case, model, stock)
    choice.check(own)
    _write_model(model, stock)
    with contextlib.ExitStack() as processes:
        turns = [_Turn(case, arm, folder, processes) for arm in (aligned, *own)]
        running = [t for t in turns if t.arm is aligned or t.kept or choice.takes(t.arm)]
        weights, free = _weights(stock), _memory()[0]

        def size(turn: _Turn) -> int:
            if turn.kept:
                return 0
            return engine_memory.engine_bytes(case.config, weights, turn.arm.cached)

        best: dict[str, float] = {}
        for batch in batches(running, size, int(free * _FREE)):
            for turn in batch:
                turn.start()
            for turn in batch:
                turn.wait()
            for turn in batch:
                for found in turn.measurements(best):
                    if turn.arm is aligned:
                        _require_ran(found)
                    yield found
                    if "failed" not in found and turn.arm.rated:
                        best = {m: min(median(found, m), best.get(m, np.inf)) for m in MODES}
                    if turn.arm is aligned and found["mismatches"]:
                        return  # the gate is red: nothing is to be timed
    yield from (engine_rows.left_out(t.arm) for t in turns if t not in running)


def _require_ran(found: Mapping[str, Any]) -> None:
    """SB0512 where the aligned engine did not run."""
    if "failed" in found:
        raise Refused(
            "SB0512",
            seen=found["failed"],
            required="a running vLLM process",
            hint="samebits explain SB0512",
        )


def batches(
    items: Sequence[_Item], size: Callable[[_Item], int], free: int
) -> Iterator[list[_Item]]:
    """Items in their order, in runs whose sizes fit in `free` together; one item at least."""
    batch = list[_Item]()
    for item in items:
        if batch and sum(map(size, batch)) + size(item) > free:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _memory() -> tuple[int, int]:
    """(free, all) bytes of the GPU."""
    import torch

    return torch.cuda.mem_get_info()


def _weights(stock: Path) -> int:
    """Bytes of the model's weights."""
    return (stock / "model.safetensors").stat().st_size


def _write_model(model: Path, stock: Path) -> None:
    """The model's folder with its weights in a file, as stock vLLM reads them; written once."""
    import torch
    from safetensors.torch import save_file

    from samebits.weights.sources import MARKER, open_model

    marker = stock / MARKER
    if marker.exists() and marker.read_bytes() == (model / MARKER).read_bytes():
        return
    shutil.rmtree(stock, ignore_errors=True)
    draft = stock.with_name(".model.draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(model, draft)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {name: tensor.cpu() for name, tensor in open_model(model, device)}
    save_file(tensors, draft / "model.safetensors", {"format": "pt"})
    draft.replace(stock)
    torch.cuda.empty_cache()  # the engines need the memory


def _environment(case: Recipe, arm: Arm) -> dict[str, str]:
    """Variables of a configuration's process: those of the aligned engine, or none of ours."""
    settings = RolloutSettings.of(case, Path(arm.model))
    variables = settings.environment()
    if arm.aligned:
        return variables
    from samebits.ops import gpu

    for name in ("SAMEBITS_CONTRACT", "SAMEBITS_PLATFORM", "SAMEBITS_ARITHMETIC"):
        del variables[name]
    return variables | {
        "VLLM_PLUGINS": "",
        "VLLM_USE_V2_MODEL_RUNNER": str(arm.runner - 1),
        "VLLM_BATCH_INVARIANT": str(int(arm.invariant)),
        "TRITON_PTXAS_PATH": str(gpu.ptxas()),
    }


class _Turn:
    """A configuration: what it measured earlier, or a process that measures it."""

    def __init__(self, case: Recipe, arm: Arm, folder: Path, processes: contextlib.ExitStack):
        self.arm = arm
        self._case, self._folder, self._processes = case, folder, processes
        self._stem = "".join(c if c.isalnum() else "-" for c in arm.name)
        self._process: ArmProcess | None = None

    @property
    def kept(self) -> bool:
        """Whether it was measured, or failed, earlier."""
        return self._path.exists()

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._stem}.json"

    def start(self) -> None:
        """Start the process, unless the answer is at hand."""
        if self._process is None and not self.kept:
            sys.stderr.write(f"bench: {self.arm.name} ...\n")
            environment = _environment(self._case, self.arm)
            self._process = ArmProcess(self.arm, environment, self._folder, self._stem)
            self._processes.callback(self._process.stop)

    def wait(self) -> None:
        """Until the engine runs, or has failed; nothing where none was started."""
        if self._process is not None:
            self._process.started()

    def measurements(self, best: Mapping[str, float]) -> Iterator[dict[str, Any]]:
        """What it measured; where it failed, also what is tried in its place."""
        found = self.measure(best)
        yield found
        other = engine_choice.again(self.arm)
        if "failed" in found and other is not None:
            yield _Turn(self._case, other, self._folder, self._processes).measure(best)

    def measure(self, best: Mapping[str, float]) -> dict[str, Any]:
        """{name, seconds, ...} or {name, failed}."""
        self.start()

        def measured() -> dict[str, Any]:
            assert self._process is not None
            return self._process.measure(best)

        return _kept(self._path, measured, aligned=self.arm.aligned)


# --- trainer --------------------------------------------------------------------------------


def _passes(case: Recipe, model: Path, folder: Path, arithmetic: str) -> dict[str, Any]:
    """Seconds of forward and backward passes, and the mismatches of score and training forward.

    In micro-batches of as many sequences as fit beside weights and gradients. Megatron's own gated
    delta net is a loop in torch here, with which nobody trains: it is not timed.
    """
    name = f"trainer, {arithmetic}"

    def measure() -> dict[str, Any]:
        import torch

        if arithmetic == "stock" and case.gdn_schedule is not None:
            return {"name": name, "failed": "not run: its gated delta net is a loop in torch"}
        weights, total = _weights(folder.parent / "model"), _memory()[1]
        sequences = engine_memory.pass_sequences(case.config, weights, total, *PASS)
        if not sequences:
            return {"name": name, "failed": "no sequence fits beside weights and gradients"}
        sys.stderr.write(f"bench: {name}, {sequences} of {PASS[0]} sequences at a time ...\n")
        whole = engine_arm.prompts(case.config["vocab_size"], *PASS, seed=3)
        options = {"gradients": True, "micro_tokens": sequences * PASS[1]}
        try:
            with trainer_of(case, model, arithmetic, **options) as trainer:
                scores = trainer.score(whole)
                ones = [torch.ones(len(ids) - 1) for ids in whole]
                batch = TrainBatch(whole, ones, ones, scores.logprobs)
                seconds, trained = trainer.time_passes(batch, loss, engine_arm.REPEATS + 2)
                peak = trainer.info()["peak_gpu_bytes"]
        except (SamebitsError, RuntimeError) as error:
            return {"name": name, "failed": str(error)[-500:]}
        scored, passed = (
            [as_bits(x).tolist() for x in part] for part in (scores.logprobs, trained)
        )
        return {
            "name": name,
            "seconds": seconds,
            "sequences": sequences,
            "memory": {"allocated": peak},
            "mismatches": engine_arm.differing(scored, passed),
            "gated": sum(map(len, scored)),
            "scored": scored,
        }

    path = folder / f"trainer-{arithmetic}.json"
    return _kept(path, measure, aligned=arithmetic == "aligned")
