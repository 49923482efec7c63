"""The stages of a proving run: each starts the engines it needs and returns their streams."""

from __future__ import annotations

from collections.abc import Sequence

from samebits import patching
from samebits.engines.rollout import RolloutEngine, RolloutSettings
from samebits.engines.trainer_process import TrainerProcess
from samebits.gates import capsule, oracle, semantic, workload
from samebits.gates.run import Run, Stage

# The stress engine: a small step budget splits prompts, few pages force preemption.
STRESS = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "kv_blocks": 34}


def _settings(run: Run, **changes) -> RolloutSettings:
    return RolloutSettings.of(run.recipe, run.model, **changes)


def trainer(run: Run, **changes) -> TrainerProcess:
    """A trainer of the case with its weights loaded."""
    paths = patching.python_paths(run.recipe.series["megatron"])
    process = TrainerProcess(
        run.model, contract=run.recipe.contract_path, python_paths=paths, **changes
    )
    process.load(run.model)
    return process


def rollout_stress(run: Run, requests: Sequence[capsule.Request]) -> Stage:
    """Aligned decode with everything that the scheduler can do to a request."""
    with RolloutEngine(_settings(run, **STRESS)) as engine:
        meaning = semantic.ask(engine)
        semantic.check(meaning, run.recipe)
        engine.row_digests(True)
        completions = engine.generate(workload.to_engine(requests))
        digests = engine.row_digests(False)
        facts = {
            "semantics": meaning,
            "hazards": engine.stats(),
            "served": engine.served(),
            "binding": engine.binding(),
            "contract": engine.contract_digest(),
            "cached_tokens": sum(c.cached_tokens for c in completions),
            "sequences": workload.sequences(requests, completions),
        }
    return Stage({"decode": workload.decoded(requests, completions, digests)}, facts)


def rollout_plain(
    run: Run,
    requests: Sequence[capsule.Request],
    whole: Sequence[Sequence[int]],
    extra: Sequence[Sequence[int]],
    alone: int,
) -> Stage:
    """Aligned prefill without prefix caching: in one batch, alone, and alone in decode.

    `extra` (the control capsule's sequences) is scored too, for the oracle leg.
    """
    budget = max(sum(len(s) for s in whole[:16]), run.recipe.engine["max_model_len"])
    settings = _settings(
        run,
        prefix_caching=False,
        max_num_batched_tokens=budget,
        max_num_seqs=16,
        kv_blocks=max(48, 2 * budget // run.recipe.engine["block_size"]),
    )
    with RolloutEngine(settings) as engine:
        engine.row_digests(True)
        batch = engine.score(whole)
        digests = engine.row_digests(True)
        # All of these decode side by side, whatever order they arrive in: a batch of 16.
        together = engine.generate(workload.to_engine(requests[:16]))
        batch_hazards = engine.stats(reset=True)
        few = sorted(range(len(whole)), key=lambda i: len(whole[i]))[:alone]
        single = [engine.score([whole[i]])[0] for i in few]
        single_digests = engine.row_digests(False)
        again = [engine.generate(workload.to_engine([requests[i]]))[0] for i in few]
        alone_hazards = engine.stats(reset=True)
        extra_scores = engine.score(extra)
        digest = engine.contract_digest()
    alone_stream, again_stream = workload.Stream(), workload.Stream()
    for i, score, done in zip(few, single, again, strict=True):
        rows = single_digests.get(score.request_id)
        part = workload.scored([whole[i]], [score], {score.request_id: rows or {}}, base=i)
        alone_stream.extend(part)
        again_stream.extend(workload.decoded([requests[i]], [done], base=i))
    return Stage(
        {
            "batch": workload.scored(whole, batch, digests),
            "alone": alone_stream,
            "decode_alone": again_stream,
            "decode_batch": workload.decoded(requests[:16], together),
            "extra": workload.scored(extra, extra_scores, base=workload.CONTROL_BASE),
        },
        {"batch_hazards": batch_hazards, "alone_hazards": alone_hazards, "contract": digest},
    )


def rollout_control(
    run: Run, requests: Sequence[capsule.Request], *, arithmetic: str, fault: str | None = None
) -> Stage:
    """A control arm: its own decode, then its own prefill in a batch and alone."""
    settings = _settings(
        run,
        arithmetic=arithmetic,
        fault=fault,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        prefix_caching=False,
    )
    with RolloutEngine(settings) as engine:
        completions = engine.generate(workload.to_engine(requests))
        whole = workload.sequences(requests, completions)
        engine.row_digests(True)
        batch = engine.score(whole)
        digests = engine.row_digests(False)
        alone = [engine.score([tokens])[0] for tokens in whole]
    base = workload.CONTROL_BASE
    return Stage(
        {
            "decode": workload.decoded(requests, completions, base=base),
            "batch": workload.scored(whole, batch, digests, base=base),
            "alone": workload.scored(whole, alone, base=base),
        },
        {"sequences": whole},
    )


def rollout_score(
    run: Run, whole: Sequence[Sequence[int]], *, base: int, tp: int = 1, fault: str | None = None
) -> Stage:
    """Prefill of given sequences by one layout, or with a planted fault."""
    settings = _settings(run, tensor_parallel_size=tp, fault=fault)
    with RolloutEngine(settings) as engine:
        engine.row_digests(True)
        scores = engine.score(whole)
        digests = engine.row_digests(False)
        facts = {"hazards": engine.stats(), "contract": engine.contract_digest()}
    return Stage({"score": workload.scored(whole, scores, digests, base=base)}, facts)


def trainer_score(
    run: Run,
    whole: Sequence[Sequence[int]],
    *,
    layouts: Sequence[str] = ("padded",),
    base: int = 0,
    tp: int = 1,
    arithmetic: str = "aligned",
    fault: str | None = None,
) -> Stage:
    """The trainer's score of given sequences, padded and packed."""
    streams = {}
    with trainer(run, tp=tp, arithmetic=arithmetic, fault=fault) as process:
        for layout in layouts:
            scores = process.score(whole, layout=layout, digests=True)
            streams[layout] = workload.trained(whole, scores, base=base)
        facts = {"info": process.info()}
    return Stage(streams, facts)


def fp32_oracle(run: Run, whole: Sequence[Sequence[int]]) -> Stage:
    """Leg O's reference for the control capsule's sequences."""
    stream = oracle.score(run.model, whole)
    return Stage({"oracle": stream.shifted(workload.CONTROL_BASE)}, {})
