#!/usr/bin/env python3
"""Every part of a proving run once, at another depth, with the seconds that each took.

    scripts/smoke.py CASE --layers 2

Writes a case of so many layers beside the runs (`build/smoke/CASE-2-layers`), builds its contract,
and loads both engines; then generate, prefill, score, one optimizer step, one refit, and generate
and score again. Records nothing. The folder is a case that other commands take by its path.

Exit codes: 0 every bit is equal, 1 a token differs, 2 refused.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samebits import recipe
from samebits.bench.rollout import loss
from samebits.contract import build
from samebits.engines.rollout import Completion, RolloutEngine, RolloutSettings
from samebits.engines.trainer import OptimizerSettings
from samebits.engines.trainer_batch import TrainBatch
from samebits.errors import SamebitsError
from samebits.gates import stages, workload
from samebits.gates.prove import open_run
from samebits.gates.sizes import Size
from samebits.mismatch import as_bits
from samebits.patching.workspace import Workspace

REQUESTS, RESPONSE, PROMPT = 16, 32, 200


def at_depth(case: str, layers: int) -> Path:
    """The folder of `case` with another number of layers, written anew."""
    of = recipe.load(case)
    name = f"{of.case}-{layers}-layers"
    folder = Workspace.find().build / "smoke" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = re.sub(r"(?m)^case: .*$", f"case: {name}", of.path.read_text())
    text = re.sub(r"(?m)^(\s+num_hidden_layers: )\d+", rf"\g<1>{layers}", text)
    (folder / "recipe.yaml").write_text(text)
    published = of.folder / recipe.PUBLISHED
    if published.is_file():
        shutil.copyfile(published, folder / recipe.PUBLISHED)
    return folder


class Clock:
    """Says what each part took."""

    def __init__(self) -> None:
        self.started = time.monotonic()

    def __call__(self, what: str, call: Callable[[], Any]) -> Any:
        begun = time.monotonic()
        value = call()
        now = time.monotonic()
        print(f"{what:32} {now - begun:7.1f} s  (at {now - self.started:5.1f})", flush=True)
        return value


def differing(what: str, left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> int:
    """Say and return how many tokens differ."""
    counts = [int((a != b).sum()) for a, b in zip(left, right, strict=True)]
    print(f"{what}: {sum(counts)} of {sum(map(len, left))} tokens differ", flush=True)
    return sum(counts)


def run(folder: Path) -> int:
    """The number of tokens that differ."""
    clock = Clock()
    case = recipe.load(folder)
    contract = clock("contract, probes", lambda: build.build(case))
    build.write(contract, case.contract_path)
    opened = open_run(str(folder), Size())
    requests = workload.control(case, opened.model, REQUESTS, RESPONSE, PROMPT)
    adam = OptimizerSettings(lr=1e-5)
    settings = RolloutSettings.of(case, opened.model)
    engine = clock("rollout: start, load, graphs", lambda: RolloutEngine(settings))
    with engine:
        trainer = clock(
            "trainer: start, load, optimizer", lambda: stages.trainer(opened, optimizer=adam)
        )
        with trainer:
            wrong = 0
            for part in ("", ", after the refit"):
                ask = workload.to_engine(requests)
                done: list[Completion] = clock(f"generate{part}", lambda a=ask: engine.generate(a))
                whole = workload.sequences(requests, done)
                prefilled = clock(f"prefill{part}", lambda w=whole: engine.score(w))
                scores = clock(f"trainer: score{part}", lambda w=whole: trainer.score(w))
                scored = [as_bits(x) for x in scores.logprobs]
                wrong += differing("trainer/prefill", scored, [p.logprob_bits for p in prefilled])
                ends = [s[-RESPONSE:] for s in scored]
                wrong += differing("trainer/decode", ends, [c.logprob_bits for c in done])
                if part:
                    break
                ones = [torch.ones(len(s) - 1) for s in whole]
                batch = TrainBatch(whole, ones, ones, scores.logprobs)
                step = clock("trainer: step", lambda b=batch: trainer.train_step(b, loss))
                print(f"loss {step.loss:.4f}, gradient norm {step.grad_norm:.4f}")
                with clock("refit: export", lambda: _entered(trainer.export())) as manifest:
                    clock("refit: load, checksums", lambda m=manifest: engine.sync_weights(m))
            info = trainer.info()
            print(f"trainer: {info['peak_gpu_bytes'] / 2**30:.1f} GiB of GPU memory at most")
    return wrong


class _entered:
    """A context manager whose block has begun already, so that entering it can be timed."""

    def __init__(self, manager: Any) -> None:
        self._manager, self._value = manager, manager.__enter__()

    def __enter__(self) -> Any:
        return self._value

    def __exit__(self, *error: Any) -> None:
        self._manager.__exit__(*error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    try:
        return int(run(at_depth(options.case, options.layers)) > 0)
    except SamebitsError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
