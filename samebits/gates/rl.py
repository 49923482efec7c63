"""A short on-policy RL run on the real engines: rollout, score, loss, step, refit, and again.

Algorithm and metrics are verl's own (GRPO advantages, clipped policy loss, off-policy metrics on
`DataProto`); the loop around them is this file. Every step compares the rollout's log-probabilities
of the response tokens with the trainer's score *and* with the trainer's training forward.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samebits import mismatch, patching
from samebits.contract.model import TRAINER_CASES
from samebits.engines.rollout import RolloutEngine, RolloutSettings
from samebits.engines.rollout_wire import Completion, Request
from samebits.engines.trainer import OptimizerSettings
from samebits.engines.trainer_batch import TrainBatch
from samebits.engines.trainer_process import TrainerProcess
from samebits.errors import Different, Refused
from samebits.gates import agreement, pages, policy, semantic, stages, tasks
from samebits.gates.run import Run, Stage, say
from samebits.gates.streams import Counts, FirstDifference, Stream, compare
from samebits.recipe import Recipe

# One prompt returns in every step: after a refit its cached blocks must be gone.
_REPEATED = 0
STRIDE = 1000
_STEPS_AT_MOST = 4


@dataclass(frozen=True)
class Look:
    """What happens in place of the last step: `at(rollout, trainer, requests of that step)`, while
    both engines hold the weights of that step. They watch the folders `rollout` and `trainer` for
    a recording (`samebits.trace`)."""

    rollout: Path
    trainer: Path
    at: Callable[[RolloutEngine, TrainerProcess, list[Request]], None]


def run_rl(
    run: Run,
    *,
    steps: int,
    arithmetic: str,
    prompts_per_step: int | None = None,
    refitted_tokens: int = 0,
    look: Look | None = None,
) -> Stage:
    """Streams `rollout` (sampled) and `trainer` (scored), and `steps`: one record for each step.

    `prompts_per_step` replaces the recipe's, in a shortened control. Where `steps` steps leave
    fewer than `refitted_tokens` differing tokens behind the first refit, more follow, up to
    _STEPS_AT_MOST times as many: what stock arithmetic samples, and so where a response ends,
    depends on the machine. A sequence is numbered step * STRIDE + sample, steps from 1.
    """
    settings = settings_of(run.recipe)
    if prompts_per_step is not None:
        settings = {**settings, "prompts_per_step": prompts_per_step}
    _use_patched_verl(run)
    spared = _spared(run, arithmetic)
    asked = tasks.of(run.recipe, run.model, _needed(settings), paged=not spared)
    most = steps * _STEPS_AT_MOST if refitted_tokens else steps
    plan = _plan(asked, settings, most)
    pairs = semantic.distinct(
        (request.prompt, request.seed)
        for step in range(1, most + 1)
        for request in _requests(plan[step - 1], settings, step)
    )
    traces = {side: getattr(look, side) if look else None for side in ("rollout", "trainer")}
    rollout_settings = RolloutSettings.of(
        run.recipe,
        run.model,
        arithmetic=arithmetic,
        trace=traces["rollout"],
        prefix_caching=not spared,
    )
    optimizer = OptimizerSettings(lr=float(settings["learning_rate"]), name=run.recipe.optimizer)
    streams = {"rollout": Stream(), "trainer": Stream()}
    records: list[dict[str, Any]] = []
    facts: dict[str, Any] = {"steps": records, "pairs": pairs, "served": {}}
    with (
        RolloutEngine(rollout_settings, wait=False) as engine,  # the trainer starts beside it
        stages.trainer(
            run, arithmetic=arithmetic, optimizer=optimizer, trace=traces["trainer"]
        ) as trainer,
    ):
        if run.recipe.platform != "cpu":
            # A first pass compiles kernels and tests shapes, while vLLM starts.
            trainer.score([list(asked.prompts[_REPEATED].ids)])
        engine.ready()
        if arithmetic == "aligned":
            facts["semantics"] = semantic.ask(engine)
            semantic.check(facts["semantics"], run.recipe)
            _agree(run, engine, trainer)
        dropped: int | None = None  # before the first refit
        for step in range(1, most + 1):
            if look is not None and step == steps:
                look.at(engine, trainer, _requests(plan[step - 1], settings, step))
                return Stage(streams, facts)
            record, train = _step(
                engine, trainer, plan[step - 1], asked.reward, settings, step, streams
            )
            cached = record["repeated_cached_tokens"]
            record["cache_invalidated"] = bool(dropped) and not cached
            # Also where no block was dropped: that is what a reset left out looks like.
            if dropped is not None and cached:
                raise Different(
                    "SB0906",
                    seen=f"{cached} cached tokens after a refit that dropped {dropped} blocks",
                    required="0: cached state belongs to the old weights",
                    hint="samebits explain SB0906",
                )
            records.append(record)
            if refitted_tokens and step >= steps and _refitted(records) >= refitted_tokens:
                # The weights that a control would get now are compared with nothing.
                _report(arithmetic, record)
                break
            record |= train()
            if step < most:  # after the last one the rollout samples nothing
                with _timed(record, "refit"), trainer.export() as manifest:
                    dropped = engine.sync_weights(manifest)["dropped_blocks"]
                record["dropped_blocks"] = dropped
            _report(arithmetic, record)
        if arithmetic == "aligned":
            facts["served"] = _served(run, engine, trainer)
        facts["trainer"] = _memory(arithmetic, trainer)
    return Stage(streams, facts)


def settings_of(recipe: Recipe) -> Mapping[str, Any]:
    """The recipe's `rl` section; SB0905 where it has none."""
    if recipe.rl is None:
        raise Refused(
            "SB0905",
            seen=f"case {recipe.case} has no `rl` section",
            required="a recipe with `rl`",
            hint=f"samebits case show {recipe.case}",
        )
    return recipe.rl


def _spared(run: Run, arithmetic: str) -> bool:
    """Whether no prompt has to fill a page, and none is cached: a control drops no cache, and large
    pages cost it most of its time and memory, in torch's rule of recurrent layers."""
    large = run.recipe.engine["block_size"] >= 2 * pages.PAGE
    return arithmetic == "stock" and run.recipe.gdn_schedule is not None and large


def _refitted(records: Sequence[dict[str, Any]]) -> int:
    """Tokens sampled from refitted weights that differ by finite numbers: every step's but the
    first."""
    late = (record for record in records[1:] if math.isfinite(record["max_abs"]))
    return sum(record["mismatches"] for record in late)


def _use_patched_verl(run: Run) -> None:
    path = str(patching.tree_path("verl", run.recipe.series["verl"]))
    if path not in sys.path:
        sys.path.insert(0, path)


def _needed(settings) -> int:
    """How many prompts the recipe's steps ask for when none but the first returns."""
    return 1 + settings["steps"] * (settings["prompts_per_step"] - 1)


def _plan(asked: tasks.Tasks, settings, steps: int) -> list[list[Any]]:
    """Prompts of every step; the first is the same in all of them."""
    each = settings["prompts_per_step"] - 1
    rest = asked.prompts[1:]
    return [
        [asked.prompts[_REPEATED], *(rest[(step * each + i) % len(rest)] for i in range(each))]
        for step in range(steps)
    ]


def _agree(run: Run, engine: RolloutEngine, trainer) -> None:
    """Both engines hold the case's contract, and their probes gave one set of answers."""
    info = trainer.info()
    agreement.contracts(
        run.contract,
        {"the rollout": engine.contract_digest(), "the trainer": info["contract_digest"]},
    )
    agreement.answers(engine.binding(), info["answers"])


def _served(run: Run, engine: RolloutEngine, trainer) -> dict[str, dict[str, int]]:
    """Rows that each region computed in the run; a bound region without any is refused."""
    counts = {"rollout": engine.served(), "trainer": trainer.info()["served"]}
    agreement.served(run.contract, counts["rollout"], counts["trainer"], TRAINER_CASES)
    return counts


def _step(
    engine, trainer, prompts, reward, settings, step: int, streams
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """What a step compares, and what trains on it and tells of that."""
    samples = settings["samples_per_prompt"]
    requests = _requests(prompts, settings, step)
    record: dict[str, Any] = {"step": step}
    with _timed(record, "rollout"):
        completions = engine.generate(requests)
    whole = [[*r.prompt, *c.tokens] for r, c in zip(requests, completions, strict=True)]
    with _timed(record, "score"):
        scores = trainer.score(whole, layout="padded")
    old = [
        logprobs[len(r.prompt) - 1 :] for r, logprobs in zip(requests, scores.logprobs, strict=True)
    ]
    for index, (request, done, logprobs) in enumerate(zip(requests, completions, old, strict=True)):
        key, start = step * STRIDE + index, len(request.prompt)
        streams["rollout"].add(key, start, done.tokens, done.logprob_bits)
        streams["trainer"].add(key, start, done.tokens, logprobs)
    rewards = [
        reward(prompts[index // samples], done.tokens) for index, done in enumerate(completions)
    ]
    metrics, advantages = _verl(completions, old, rewards, samples)
    batch = _batch(requests, whole, scores.logprobs, advantages)
    found = mismatch.measure(
        np.concatenate([c.logprob_bits for c in completions]),
        np.concatenate([mismatch.as_bits(o) for o in old]),
    )

    def train() -> dict[str, Any]:
        with _timed(record, "train"):
            result = trainer.train_step(batch, policy.loss)
        trained = np.concatenate([mismatch.as_bits(p) for p in result.logprobs])
        scored = np.concatenate([mismatch.as_bits(p) for p in scores.logprobs])
        return {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "train_forward_mismatches": mismatch.measure(scored, trained).mismatches,
        }

    record |= {
        **asdict(found),
        "reward": float(np.mean(rewards)),
        "repeated_cached_tokens": completions[_REPEATED].cached_tokens,
        "verl": {name: float(value) for name, value in metrics.items()},
    }
    return record, train


@contextlib.contextmanager
def _timed(record: dict[str, Any], part: str) -> Iterator[None]:
    """Put the seconds of a block into a step's record."""
    begun = time.monotonic()
    yield
    record.setdefault("seconds", {})[part] = round(time.monotonic() - begun, 1)


def _memory(arm: str, trainer: TrainerProcess) -> dict[str, int]:
    """Most bytes that the trainer held: tensors on a GPU, and its process on the host."""
    info = trainer.info()
    found = {name: info[name] for name in ("peak_gpu_bytes", "peak_rss_bytes")}
    places = zip(("a GPU", "the host"), found.values(), strict=True)
    sizes = [f"{size / (1 << 30):.1f} GiB of {place}" for place, size in places if size]
    say(f"rl {arm}: the trainer held up to {' and '.join(sizes)}")
    return found


def _requests(prompts, settings, step: int) -> list[Request]:
    return [
        Request(prompt.ids, settings["max_tokens"], seed=_seed(settings, step, p, s))
        for p, prompt in enumerate(prompts)
        for s in range(settings["samples_per_prompt"])
    ]


def _seed(settings, step: int, prompt: int, sample: int) -> int:
    """A distinct seed for each (step, prompt, sample)."""
    return ((settings["seed"] * 100 + step) * 100 + prompt) * 100 + sample


def _padded(rows: Sequence[Any]):
    import torch

    return torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(np.asarray(row)) for row in rows], batch_first=True
    )


def _verl(completions: Sequence[Completion], old, rewards, samples: int):
    """verl's metrics and GRPO advantages of one step."""
    import torch
    from verl import DataProto
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
    from verl.utils.debug.metrics import calculate_debug_metrics

    mask = _padded([np.ones(len(c.tokens), np.float32) for c in completions])
    token_rewards = torch.zeros_like(mask)
    for index, (done, reward) in enumerate(zip(completions, rewards, strict=True)):
        token_rewards[index, len(done.tokens) - 1] = reward
    data = DataProto.from_dict(
        tensors={
            "responses": _padded([np.asarray(c.tokens, np.int64) for c in completions]),
            "response_mask": mask,
            "rollout_log_probs": _padded([c.logprob_bits.view(np.float32) for c in completions]),
            "old_log_probs": _padded([o.numpy() for o in old]),
            "token_level_rewards": token_rewards,
        },
        non_tensors={"uid": np.arange(len(completions)) // samples},
    )
    batch = data.batch
    metrics = calculate_debug_metrics(data)
    offpolicy = compute_offpolicy_metrics(batch["old_log_probs"], batch["rollout_log_probs"], mask)
    metrics.update({f"rollout_corr/{name}": value for name, value in offpolicy.items()})
    advantages, _ = compute_grpo_outcome_advantage(
        batch["token_level_rewards"], mask, data.non_tensor_batch["uid"]
    )
    return metrics, [advantages[i, : len(c.tokens)] for i, c in enumerate(completions)]


def _batch(requests, whole, old, advantages) -> TrainBatch:
    """Per-target tensors: prompts carry mask 0."""
    import torch

    mask, spread = [], []
    for request, tokens, advantage in zip(requests, whole, advantages, strict=True):
        start = len(request.prompt) - 1
        m, a = torch.zeros(len(tokens) - 1), torch.zeros(len(tokens) - 1)
        m[start:], a[start:] = 1.0, advantage
        mask.append(m)
        spread.append(a)
    return TrainBatch(sequences=whole, mask=mask, advantages=spread, old_logprobs=list(old))


def _report(arm: str, record: dict[str, Any]) -> None:
    seconds = ", ".join(f"{part} {took:.0f}" for part, took in record["seconds"].items())
    say(
        f"rl {arm} step {record['step']}: {record['mismatches']} of {record['tokens']} tokens "
        f"differ, |dlogp| max {record['max_abs']:.3g} and mean {record['mean_abs']:.3g}, "
        f"K3 KL {record['k3_kl']:.3g}, IS ratio max {record['is_ratio_max']:.6g} and "
        f"median {record['is_ratio_median']:.6g}, reward {record['reward']:.3f}; seconds: {seconds}"
    )


def as_counts(stage: Stage) -> Counts:
    """Comparison of the steps after the first refit (leg E)."""
    return _counts(stage, 2)


def unmoved(stage: Stage) -> list[int]:
    """Steps without a gradient (all rewards alike): their refits show nothing.

    A control has no gradient on record for its last step, on which it does not train.
    """
    return [r["step"] for r in stage.facts["steps"] if r.get("grad_norm") == 0]


def firsts(stage: Stage) -> list[FirstDifference]:
    """The first difference of every step that has one."""
    found = (_counts(stage, r["step"], r["step"] + 1) for r in stage.facts["steps"])
    return [counts.first for counts in found if counts.first is not None]


def _counts(stage: Stage, start: int, stop: float = math.inf) -> Counts:
    """Comparison of the steps [start, stop)."""

    def kept(stream: Stream) -> Stream:
        columns = stream.columns()
        step = columns["sequence"] // STRIDE
        rows = (step >= start) & (step < stop)
        return Stream({name: column[rows] for name, column in columns.items()})

    return compare(kept(stage.streams["rollout"]), kept(stage.streams["trainer"]))
