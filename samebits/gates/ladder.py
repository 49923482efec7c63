"""`samebits prove CASE --ladder`: aligned regions switched on one by one, in both engines at once.

Rung 0 is stock. Every further rung aligns one more region, until the last one is `aligned` itself.
Each is measured on the same requests, with one rank on each side, in processes of its own:
decode against prefill (leg B) and trainer against prefill (leg C), by bits, and what a token costs.

Regions that cannot be switched alone are one rung: `ops.registry.TOGETHER`, which is one class of
vLLM's and a state in its cache. All others can: what they hand on has one dtype and layout,
whichever side computes it, but for the logits of a stock output layer, which are bf16 and which the
aligned log-softmax widens, as upstream does.

All rungs of a ladder start their engines alike, on a GPU with the CUDA graphs of the recipe: their
costs compare. A cost is wall time, the least of some repeats, with all other engines idle.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from samebits import env, files, runtime
from samebits import recipe as recipes
from samebits.bench.rollout import loss
from samebits.casework import ladder as record
from samebits.casework.ladder import NAME, Ladder, Leg, Rung
from samebits.contract.sources import source_hash
from samebits.engines.rollout import Request, RolloutEngine
from samebits.engines.trainer_batch import TrainBatch
from samebits.engines.trainer_process import TrainerProcess
from samebits.errors import Refused
from samebits.gates import capsule, ladder_engines, prove, workload
from samebits.gates.ladder_engines import Engines, together
from samebits.gates.run import Run, Stage, clock, say
from samebits.gates.streams import Counts, compare
from samebits.ops import registry

STOCK = "stock"
# Name of the rung of `registry.TOGETHER`.
GDN = "gdn"
# They are most of the work: what the others cost shows best beside them. Others in forward order.
_FIRST = ("gemm.column", "gemm.bias", "gemm.row", "gemm.lm_head")
# On a GPU stock's cross entropy works in place on the logits; autograd forbids that on a view which
# our output layer's function returns, so that our log-softmax has to be there first.
_BEFORE_HEAD = "logprob"


@dataclass(frozen=True)
class Size:
    """What every rung of a ladder computes.

    requests, response, prompt   requests; tokens that each decodes; drawn prompts are shorter
    trained                      sequences of the training step
    repeats                      a cost is the least of so many
    """

    requests: int
    response: int
    prompt: int
    trained: int
    repeats: int
    flag: str = " --ladder"

    @classmethod
    def of(cls, platform: str, *, quick: bool) -> Size:
        """Small on a CPU, where a stock product and its gradient are slow."""
        if platform == "cpu":
            size = cls(requests=8, response=16, prompt=32, trained=1, repeats=1)
            few = replace(size, requests=4, response=12)
        else:
            size = cls(requests=64, response=128, prompt=512, trained=16, repeats=2)
            few = replace(size, requests=32, response=48, trained=8)
        return replace(few, flag=" --ladder --quick") if quick else size


def rungs(
    architecture: str, order: Sequence[str] = (), platform: str = "cpu"
) -> list[tuple[str, frozenset[str]]]:
    """(name, regions that are aligned) of every rung, from `stock` up.

    order   rungs that come first; of the others matrix products, and then the rest in forward
            order (`ops.registry`). SB0927 for a name that is no rung of the model, or given twice,
            and on a GPU for `gemm.lm_head` before `logprob`
    """
    known: dict[str, set[str]] = {}
    for region in registry.regions_of(architecture):
        known.setdefault(GDN if region in registry.TOGETHER else region, set()).add(region)
    if set(order) - known.keys() or len(set(order)) != len(order):
        raise Refused(
            "SB0927",
            seen=f"--order {','.join(order)}",
            required=f"some of {', '.join(known)}, each once",
            hint="samebits explain SB0927",
        )
    found: list[tuple[str, frozenset[str]]] = [(STOCK, frozenset())]
    products = [name for name in _FIRST if name in known]
    if platform != "cpu":
        products.insert(products.index("gemm.lm_head"), _BEFORE_HEAD)
    names = [*dict.fromkeys((*order, *products, *known))]
    if platform != "cpu" and names.index("gemm.lm_head") < names.index(_BEFORE_HEAD):
        raise Refused(
            "SB0927",
            seen=f"--order {','.join(order)}",
            required=f"on a GPU {_BEFORE_HEAD} before gemm.lm_head",
            hint="samebits explain SB0927",
        )
    for name in names:
        found.append((name, found[-1][1] | known[name]))
    return found


def climb(
    case: str, *, quick: bool = False, order: Sequence[str] = (), fresh: bool = False
) -> Ladder:
    """Measure every rung of a case; without `quick`, write what came out into its folder.

    A rung that was measured under the same sources is not run again; `fresh` runs all of them.
    """
    recipe = recipes.load(case)
    steps = rungs(recipe.architecture, order, recipe.platform)
    if not quick:
        record.require_page(recipe)  # before hours of work that it could not take
    size = Size.of(recipe.platform, quick=quick)
    prefix = f"ladder-{source_hash([__name__, ladder_engines.__name__])[:8]}-"
    with prove.locked_run(case, size, prefix=prefix) as run:
        if fresh and any(run.folder.iterdir()):
            files.move_aside(run.folder, "done")
            run.folder.mkdir()
        done = _climb(run, size, steps)
        made = record.make(run.recipe, run.contract, env.chip(), size.flag, done)
        path = run.folder / NAME if quick else record.path_of(run.recipe)
        record.write(made, path)
        if not quick:
            record.write_page(run.recipe, made)
    return made


def _climb(run: Run, size: Size, steps: Sequence[tuple[str, frozenset[str]]]) -> list[Rung]:
    requests = workload.control(run.recipe, run.model, size.requests, size.response, size.prompt)
    begun, found = time.monotonic(), list[Rung]()
    missing = [
        _arithmetic(run, regions) for _, regions in steps if not run.has(_file(run, regions))
    ]
    engines = Engines(run, missing, together(run.recipe) if missing else 1)
    with contextlib.closing(engines):
        for index, (name, regions) in enumerate(steps):
            measure = partial(_measure, run, size, requests, regions, engines)
            rung = _rung(name, run.stage(_file(run, regions), measure))
            found.append(rung)
            say(
                f"ladder {index} of {len(steps) - 1}, {'' if index == 0 else '+ '}{name}: "
                f"{rung.counts()}; {rung.costs()} ({clock(time.monotonic() - begun)} so far)"
            )
    return found


def _arithmetic(run: Run, regions: frozenset[str]) -> str:
    """The last rung is what the case proves: the aligned arithmetic itself."""
    if not regions:
        return STOCK
    every = set(registry.regions_of(run.recipe.architecture))
    return "aligned" if regions == every else runtime.only(regions)


def _file(run: Run, regions: frozenset[str]) -> str:
    """Name of a measured set of regions, whatever order led to it."""
    return _arithmetic(run, regions).replace(":", "-").replace(",", "-")


def _rung(name: str, stage: Stage) -> Rung:
    streams = stage.streams
    return Rung(
        name,
        {
            "B": _leg(compare(streams["decode"], streams["prefill"])),
            "C": _leg(compare(streams["trainer"], streams["prefill"])),
        },
        stage.facts["ms_per_token"],
    )


def _leg(counts: Counts) -> Leg:
    assert counts.values is not None
    return Leg(counts.tokens, counts.mismatches, counts.values.max_abs)


# --- one rung -----------------------------------------------------------------------------------


def _measure(
    run: Run,
    size: Size,
    requests: Sequence[capsule.Request],
    regions: frozenset[str],
    engines: Engines,
) -> Stage:
    """The two engines of a rung work one after the other."""
    with engines.of(_arithmetic(run, regions)) as pair:
        streams, facts, whole = _rollout(pair.rollout, size, requests)
        pair.rollout.close()
        scored, more = _trainer(pair.trainer, size, whole)
    _require_served(regions, {"rollout": facts["served"], "trainer": more["served"]})
    costs = {**facts["ms_per_token"], **more["ms_per_token"]}
    return Stage({**streams, "trainer": scored}, {"ms_per_token": costs, "sequences": whole})


def _require_served(regions: frozenset[str], served: Mapping[str, Mapping[str, int]]) -> None:
    """SB0928 unless both engines computed rows of exactly the regions that a rung aligns."""
    for engine, rows in served.items():
        found = {region for region, count in rows.items() if count}
        if found != regions:
            raise Refused(
                "SB0928",
                seen=f"{engine}: rows of {', '.join(sorted(found)) or 'no region'}",
                required=", ".join(sorted(regions)) or "no region",
                hint="samebits explain SB0928",
            )


def _least(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Milliseconds of the fastest of `repeats` calls, and what the first returned."""
    times, first = [], None
    for index in range(repeats):
        started = time.perf_counter()
        value = work()
        times.append((time.perf_counter() - started) * 1e3)
        first = value if index == 0 else first
    return min(times), first


def _rollout(engine: RolloutEngine, size: Size, requests: Sequence[capsule.Request]):
    """Streams of decode and prefill, what they cost, and the sequences.

    A decoded token costs what the requests take beyond their first tokens, which end the prefill.
    """
    asked = workload.to_engine(requests)
    first: list[Request] = [replace(request, max_tokens=1) for request in asked]
    engine.generate(asked[:2])  # loads kernels
    prompts, _ = _least(lambda: engine.generate(first), size.repeats)
    both, done = _least(lambda: engine.generate(asked), size.repeats)
    whole = workload.sequences(requests, done)
    prefill, scores = _least(lambda: engine.score(whole), size.repeats)
    decoded = sum(request.max_tokens - 1 for request in requests)
    costs = {
        # On a busy machine the requests may take longer than they do with their responses.
        "decode": (both - prompts) / decoded if both > prompts else None,
        "prefill": prefill / sum(map(len, whole)),
    }
    streams = {
        "decode": workload.decoded(requests, done),
        "prefill": workload.scored(whole, scores),
    }
    return streams, {"ms_per_token": costs, "served": engine.served()}, whole


def _trainer(trainer: TrainerProcess, size: Size, whole: Sequence[list[int]]):
    """Stream of the score, and what a token of a score and of a training step costs."""
    trainer.score(whole[:1])  # loads kernels
    scoring, scores = _least(lambda: trainer.score(whole), size.repeats)
    served = trainer.info()["served"]
    trainer.train_step(_batch([whole[0][:2]]), loss)  # the same, and the optimizer's state
    batch = _batch(whole[: size.trained])
    stepping, _ = _least(lambda: trainer.train_step(batch, loss), size.repeats)
    costs = {
        "score": scoring / sum(map(len, whole)),
        "step": stepping / sum(map(len, batch.sequences)),
    }
    return workload.trained(whole, scores), {"ms_per_token": costs, "served": served}


def _batch(sequences: Sequence[list[int]]) -> TrainBatch:
    ones = [torch.ones(len(tokens) - 1) for tokens in sequences]
    return TrainBatch(list(sequences), ones, ones, ones)
