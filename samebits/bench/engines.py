"""Whole engines on a GPU: `samebits bench run engines --case CASE --record`.

Rollout: tokens of 256 concurrent requests, aligned with CUDA graphs, against the fastest of vLLM's
own configurations. Trainer: forward and backward of 8192 tokens, aligned against Megatron's local
spec. The gate comes first: what the aligned engine decodes equals its own prefill, and that the
trainer's score; while it is red there are no rows.

Every configuration is one process, and what it measured is kept in `build/bench` under the state of
the sources: a run that was interrupted goes on with the next one. A configuration that does not run
is kept with its reason; delete its file to try again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from samebits import env, files
from samebits import recipe as recipes
from samebits.bench import engine_arm
from samebits.bench.engine_arm import MODES, PASS, REQUESTS, RESPONSE, Arm, median
from samebits.bench.engine_process import ArmProcess
from samebits.bench.rollout import loss, trainer_of
from samebits.contract import Contract, canonical
from samebits.contract.platform import require
from samebits.contract.sources import source_hash
from samebits.engines.rollout import RolloutSettings
from samebits.engines.trainer_batch import TrainBatch
from samebits.errors import Different, Refused, SamebitsError
from samebits.mismatch import as_bits
from samebits.patching.workspace import Workspace
from samebits.recipe import Recipe

THROUGHPUT = 1.053  # time allowed beside stock's: 0.95 of its tokens in a second
STEP = 1.10
_OTHER = 6 << 30  # bytes of an engine that are neither weights nor pages


def rows(name: str) -> list[dict[str, Any]]:
    """Rows of the case's engines; SB0440 while the gate is red."""
    case = recipes.load(name)
    require(case.platform)
    Contract.of(case).check_sources()
    from samebits.weights import sources

    model = sources.prepare(case)
    folder = _folder(case)
    found = [*_rollouts(case, model, folder)]
    passes = {a: _passes(case, model, folder, a) for a in ("aligned", "stock")}
    gate(found[0], passes["aligned"], Contract.of(case).regions)
    return [*rollout_rows(case.case, found), *trainer_rows(case.case, passes)]


def _folder(case: Recipe) -> Path:
    """Where this state of the sources keeps what was measured."""
    key = canonical.digest(
        {
            "recipe": case.digest,
            "contract": Contract.of(case).identity,
            "chip": env.chip(),
            "sources": source_hash(
                [
                    "samebits.bench.engines",
                    "samebits.bench.engine_arm",
                    "samebits.bench.engine_process",
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


def arms(case: Recipe, model: Path, stock: Path) -> tuple[Arm, list[Arm]]:
    """The aligned configuration as cases prove it, and others.

    Of these vLLM's own come first, in the order in which it takes them by itself, and last what is
    not proved: its batch invariance, and aligned steps that are prepared ahead.
    """
    settings = RolloutSettings.of(
        case,
        model,
        max_model_len=engine_arm.LENGTH,
        max_num_batched_tokens=engine_arm.BUDGET,
        max_num_seqs=REQUESTS,
        kv_blocks=engine_arm.PAGES,
        block_size=engine_arm.BLOCK,
        prefix_caching=False,
        cuda_graphs=1,
    )
    plain, ahead = (
        json.loads(json.dumps(asdict(replace(settings, ahead=a)), default=str))
        for a in (False, True)
    )
    own = [
        Arm(f"vLLM V{runner}, {label}, compiled", str(stock), None, runner, backend, True)
        for label, backend in (("FA3", "FLASH_ATTN"), ("Triton", "TRITON_ATTN"))
        for runner in (2, 1)
    ]
    invariant = "vLLM V1, FA3, batch-invariant, compiled"
    own.append(Arm(invariant, str(stock), None, 1, "FLASH_ATTN", True, invariant=True))
    own.append(Arm("aligned, steps prepared ahead", str(model), ahead))
    return Arm("aligned", str(model), plain), own


def _rollouts(case: Recipe, model: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """What every configuration measured, the aligned one first.

    As many as the GPU holds start together, and are measured in turn. One that does not start
    compiled is tried with graphs of decode steps alone.
    """
    stock = folder.parent / "model"
    aligned, own = arms(case, model, stock)
    _write_model(model, stock)
    with contextlib.ExitStack() as processes:
        turns = [_Turn(case, arm, folder, processes) for arm in (aligned, *own)]
        for turn in turns[: _together(stock)]:
            turn.start()
        for turn in turns:
            turn.wait()
        first = turns[0].measure({})
        if "failed" in first:
            raise Refused(
                "SB0512",
                seen=first["failed"],
                required="a running vLLM process",
                hint="samebits explain SB0512",
            )
        yield first
        if first["mismatches"]:  # the gate is red: nothing is to be timed
            return
        best: dict[str, float] = {}
        for turn in turns[1:]:
            found = turn.measure(best)
            yield found
            if turn.arm.aligned:
                continue
            if "failed" in found:
                name = turn.arm.name.replace("compiled", "decode graphs")
                plain = replace(turn.arm, name=name, compiled=False)
                found = _Turn(case, plain, folder, processes).measure(best)
                yield found
            if "failed" not in found:
                best = {m: min(median(found, m), best.get(m, np.inf)) for m in MODES}


def _together(model: Path) -> int:
    """How many engines of a model the free memory of the GPU holds; 1 at least."""
    import torch
    from transformers import AutoConfig

    free, _ = torch.cuda.mem_get_info()
    weights = (model / "model.safetensors").stat().st_size
    each = weights + engine_arm.cache_bytes(AutoConfig.from_pretrained(model)) + _OTHER
    return max(1, int(free * 0.9) // each)


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
    def _path(self) -> Path:
        return self._folder / f"{self._stem}.json"

    def start(self) -> None:
        """Start the process, unless the answer is at hand."""
        if self._process is None and not self._path.exists():
            sys.stderr.write(f"bench: {self.arm.name} ...\n")
            environment = _environment(self._case, self.arm)
            self._process = ArmProcess(self.arm, environment, self._folder, self._stem)
            self._processes.callback(self._process.stop)

    def wait(self) -> None:
        """Until the engine runs, or has failed; nothing where none was started."""
        if self._process is not None:
            self._process.started()

    def measure(self, best: Mapping[str, float]) -> dict[str, Any]:
        """{name, seconds, ...} or {name, failed}."""
        self.start()

        def measured() -> dict[str, Any]:
            assert self._process is not None
            return self._process.measure(best)

        return _kept(self._path, measured, aligned=self.arm.aligned)


def rollout_rows(case: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours against the fastest of vLLM's own, with the same seeds and with none.

    Microseconds for each sampled token of all requests. `others` are the configurations that were
    slower, and those that were not measured with the reason. `differ`: of how many decoded tokens
    a prefill of the same tokens has other bits, by the gate's small run.
    """
    ours, *own = found
    failed = [
        {"name": arm["name"], "not_measured": arm["failed"]} for arm in own if "failed" in arm
    ]
    ran = [arm for arm in own if "failed" not in arm and "unseeded" in arm["seconds"]]
    also = [arm for arm in own if "failed" not in arm and arm not in ran]  # aligned too
    table = []
    for mode in MODES if ran else ():
        best, *slower = sorted(ran, key=functools.partial(median, mode=mode))
        seeds = "the same seeds" if mode == "seeded" else "no seeds"
        work = f"rollout, {REQUESTS} requests of {engine_arm.PROMPT} + {RESPONSE} tokens, {case}"
        table.append(
            {
                "work": work.replace(", ", f" against {seeds}, ", 1),
                "ours": _per_token(ours, "seeded"),
                "against": _beside(best, mode),
                "ratio": round(median(ours, "seeded") / median(best, mode), 3),
                "unit": "us/token",
                "target": THROUGHPUT,
                "others": [
                    *(_beside(arm, mode) for arm in slower),
                    *(_beside(arm, "seeded") for arm in also),
                    *failed,
                ],
            }
        )
    return table


def _beside(arm: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """One of vLLM's own configurations in a row."""
    differ = f"{arm['mismatches']} of {arm['gated']}"
    return {"name": arm["name"], "time": _per_token(arm, mode), "differ": differ}


def _per_token(arm: Mapping[str, Any], mode: str) -> float:
    return round(median(dict(arm), mode) * 1e6 / (REQUESTS * RESPONSE), 2)


# --- trainer --------------------------------------------------------------------------------


def _passes(case: Recipe, model: Path, folder: Path, arithmetic: str) -> dict[str, Any]:
    """Seconds of forward and backward passes, and the mismatches of score and training forward."""

    def measure() -> dict[str, Any]:
        import torch

        sys.stderr.write(f"bench: trainer, {arithmetic} ...\n")
        whole = engine_arm.prompts(case.config["vocab_size"], *PASS, seed=3)
        try:
            with trainer_of(case, model, arithmetic, micro_tokens=PASS[0] * PASS[1]) as trainer:
                scores = trainer.score(whole)
                ones = [torch.ones(len(ids) - 1) for ids in whole]
                batch = TrainBatch(whole, ones, ones, scores.logprobs)
                seconds, trained = trainer.time_passes(batch, loss, engine_arm.REPEATS + 2)
        except (SamebitsError, RuntimeError) as error:
            return {"name": f"trainer, {arithmetic}", "failed": str(error)[-500:]}
        scored, passed = (
            [as_bits(x).tolist() for x in part] for part in (scores.logprobs, trained)
        )
        return {
            "name": f"trainer, {arithmetic}",
            "seconds": seconds,
            "mismatches": engine_arm.differing(scored, passed),
            "gated": sum(map(len, scored)),
            "scored": scored,
        }

    path = folder / f"trainer-{arithmetic}.json"
    return _kept(path, measure, aligned=arithmetic == "aligned")


def trainer_rows(case: str, passes: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Ours against Megatron's local spec, milliseconds of a pass; none where one did not run."""
    if any("failed" in found for found in passes.values()):
        return
    ours, theirs = (statistics.median(passes[a]["seconds"]) for a in ("aligned", "stock"))
    yield {
        "work": f"trainer forward and backward, {PASS[0]} x {PASS[1]} tokens, {case}",
        "ours": round(ours * 1e3, 2),
        "against": {"name": "Megatron's local spec", "time": round(theirs * 1e3, 2)},
        "ratio": round(ours / theirs, 3),
        "unit": "ms",
        "target": STEP,
    }
