"""The stages of a proving run: each starts the engines it needs and returns their streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from samebits import patching
from samebits.casework import memory
from samebits.engines.rollout import RolloutEngine, RolloutSettings
from samebits.engines.trainer_process import TrainerProcess
from samebits.gates import capsule, oracle, pages, semantic, workload
from samebits.gates.run import Run, Stage
from samebits.recipe import Recipe

# The stress engine: a small step budget splits prompts, few pages force preemption: `stress` takes
# two more than the longest sequence fills, unless the size of the run says how many.
STRESS = {"max_num_batched_tokens": 64, "max_num_seqs": 16}
_SPARE_PAGES = 2
# Setting of the stress engine -> option of a run that replaces it (`gates.sizes.Size`).
_STRESS_OPTIONS = {
    "max_num_batched_tokens": "stress_tokens",
    "max_num_seqs": "stress_seqs",
    "kv_blocks": "stress_blocks",
}
# Tokens of one prompt whose logits a chip holds, beside the model and what vLLM makes of them: it
# takes the rows of a prompt's slice together.
_SLICE = 4096
# Step budget of the engines of negative controls.
_CONTROL_BUDGET = 64
# Tokens of one forward pass of the trainer: decides memory, and how much of a chip is busy.
_MICRO_TOKENS = {"cpu": 512, "sm90": 8192}
# Bytes that the fp32 logits of one may take; a training step holds their gradient beside them.
_LOGITS = 4 << 30
# Bytes that a step's activations and logits may take together, which bounds deep models, and that
# they may where parameters fill the chip.
_PASS_BYTES, _PASS_BYTES_LEFT = 24 << 30, 8 << 30
# Bytes of an RL run's parameters beside which a chip has no room for another stage.
_ALONE = 64 << 30
# Beside fifteen decodes a prompt gets one token of each step.
ONE_TOKEN = {"max_num_batched_tokens": 16, "max_num_seqs": 16, "prefix_caching": False}
# Requests that follow it there.
_FOLLOWERS = 8
# Requests of a control that decode, and are scored alone as well.
_DECODED = 8


def _settings(run: Run, **changes) -> RolloutSettings:
    return RolloutSettings.of(run.recipe, run.model, **changes)


def trainer(run: Run, **changes) -> TrainerProcess:
    """A trainer of the case with its weights loaded."""
    paths = patching.python_paths(run.recipe.series["megatron"])
    process = TrainerProcess(
        run.model,
        contract=run.recipe.contract_path,
        python_paths=paths,
        platform=run.recipe.platform,
        micro_tokens=micro_tokens(
            run.recipe,
            training="optimizer" in changes,
            stock=changes.get("arithmetic") == "stock",
        ),
        **changes,
    )
    process.load(run.model)
    return process


def micro_tokens(recipe: Recipe, *, training: bool = False, stock: bool = False) -> int:
    """Tokens of one forward pass of the trainer (one sequence at least).

    training   an optimizer is there too, and a backward follows
    stock      by Megatron's own modules
    """
    most = min(_MICRO_TOKENS[recipe.platform], _LOGITS // (4 * recipe.config["vocab_size"]))
    room = _PASS_BYTES_LEFT if training and rl_alone(recipe) else _PASS_BYTES
    each = memory.pass_bytes(recipe.config)
    if training:
        each += memory.recurrent_bytes(recipe.config, stock=stock)
    return min(most, room // each)


def rl_alone(recipe: Recipe) -> bool:
    """Whether the RL run of a case leaves no room on the chip for a stage beside it."""
    if recipe.platform == "cpu" or recipe.rl is None:
        return False
    return memory.rl_bytes(recipe.config, recipe.optimizer) > _ALONE


def stress(run: Run) -> dict[str, int]:
    """Settings of the stress engine for the model and the size of a run."""
    engine = run.recipe.engine
    spare = engine["max_model_len"] // engine["block_size"] + _SPARE_PAGES
    dense = {**STRESS, "kv_blocks": spare}
    plain = pages.sliced(run.recipe) if run.recipe.gdn_schedule else dense
    asked = {name: run.options.get(option) for name, option in _STRESS_OPTIONS.items()}
    return {**plain, **{name: value for name, value in asked.items() if value is not None}}


def rollout_stress(run: Run, requests: Sequence[capsule.Request]) -> Stage:
    """Aligned decode with everything that the scheduler can do to a request."""
    with RolloutEngine(_settings(run, **stress(run))) as engine:
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


def rollout_paged(run: Run, requests: Sequence[capsule.Request]) -> Stage:
    """Decode of a model with states from cached pages: the first request leaves its own behind."""
    with RolloutEngine(_settings(run, **pages.paged(run.recipe))) as engine:
        first = engine.generate(workload.to_engine(requests[:1]))
        completions = [*first, *engine.generate(workload.to_engine(requests[1:]))]
        facts = {"hazards": engine.stats(), "contract": engine.contract_digest()}
    return Stage({"decode": workload.decoded(requests, completions)}, facts)


def one_token_company(
    requests: Sequence[capsule.Request],
) -> tuple[int, list[int], list[capsule.Request]]:
    """The request of `rollout_slices` that gets slices of one token, those that follow it, and the
    prompts that decode beside it."""
    (chosen,) = (i for i, r in enumerate(requests) if r.tag == "chunk-plus-one")
    others = [i for i in range(len(requests)) if i != chosen][:_FOLLOWERS]
    length = len(requests[chosen].prompt)
    company = [
        capsule.Request((3 + i,), 12_000 + i, length, "company")
        for i in range(ONE_TOKEN["max_num_seqs"] - 1)
    ]
    return chosen, others, company


def rollout_slices(run: Run, requests: Sequence[capsule.Request]) -> Stage:
    """Decode of a few requests, one of them after a prefill of nothing but slices of one token.

    That one goes beside fifteen prompts of one token, which decode for as long as its prefill
    takes and are not compared; the others follow, in whatever slices are left over for them.
    """
    chosen, others, company = one_token_company(requests)
    with RolloutEngine(_settings(run, **ONE_TOKEN)) as engine:
        *_, done = engine.generate(workload.to_engine([*company, requests[chosen]]))
        fired = engine.stats(reset=True)
        rest = engine.generate(workload.to_engine([requests[i] for i in others]))
        facts = {
            "one_token_slices": _one_token_slices(fired),
            "hazards": fired,
            "contract": engine.contract_digest(),
        }
    decoded = workload.Stream()
    for index, completion in zip([chosen, *others], [done, *rest], strict=True):
        decoded.extend(workload.decoded([requests[index]], [completion], base=index))
    return Stage({"decode": decoded}, facts)


def _one_token_slices(fired: Mapping[str, int]) -> int:
    """At least so many pieces of longer prompts had one token; exact when all had.

    Pieces p of t tokens hold 2p - t of one token or more, since every other has two at least.
    A decode is one token, unless a preempted request is computed again.
    """
    if fired.get("preempted", 0):
        return 0
    prefilled = fired["tokens"] - fired["decode_rows"]
    return max(0, 2 * fired["prefill_pieces"] - prefilled - fired["one_token_prompts"])


def plain(run: Run, whole: Sequence[Sequence[int]], **changes) -> RolloutSettings:
    """Settings of an engine without prefix cache that takes 16 of the sequences in one step, and
    one that is longer than `_SLICE` in several."""
    longest, page = run.recipe.engine["max_model_len"], run.recipe.engine["block_size"]
    budget = max(sum(len(s) for s in whole[:16]), min(longest, 2 * _SLICE))
    blocks = max(48, 2 * max(budget, longest) // page)
    if run.recipe.gdn_schedule is not None:
        # A state is a page of its own for every layer with one, over those with full attention.
        blocks += 32 * pages.states(run.recipe)
    return _settings(
        run,
        prefix_caching=False,
        max_num_batched_tokens=budget,
        slice_tokens=min(longest, _SLICE),
        max_num_seqs=16,
        kv_blocks=blocks,
        **changes,
    )


def rollout_plain(
    run: Run,
    requests: Sequence[capsule.Request],
    whole: Sequence[Sequence[int]],
    extra: Sequence[Sequence[int]],
    alone: int,
) -> Stage:
    """Aligned prefill without prefix caching: in one batch, alone, and alone in decode.

    alone   so many of the shortest sequences; the option `alone_decoded` says how many of them
            decode alone as well (default: all), which takes a step of the engine for each token
    `extra` (the control capsule's sequences) is scored too, for the oracle leg.
    """
    settings = plain(run, whole)
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
        fewer = few[: run.options.get("alone_decoded", alone)]
        again = [engine.generate(workload.to_engine([requests[i]]))[0] for i in fewer]
        alone_hazards = engine.stats(reset=True)
        extra_scores = engine.score(extra)
        digest = engine.contract_digest()
    alone_stream, again_stream = workload.Stream(), workload.Stream()
    for i, score in zip(few, single, strict=True):
        rows = single_digests.get(score.request_id)
        part = workload.scored([whole[i]], [score], {score.request_id: rows or {}}, base=i)
        alone_stream.extend(part)
    for i, done in zip(fewer, again, strict=True):
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


def _spread(requests: Sequence[capsule.Request]) -> list[capsule.Request]:
    """As many requests as a control decodes, real prompts and drawn ones of all lengths."""
    step = max(1, len(requests) // _DECODED)
    return list(requests[::step][:_DECODED])


def rollout_control(
    run: Run, requests: Sequence[capsule.Request], *, arithmetic: str, fault: str | None = None
) -> Stage:
    """A control arm: its own decode, then its own prefill in a batch and alone.

    All but a few requests are prefilled in a batch only: they are there for their number.
    """
    settings = _settings(
        run,
        arithmetic=arithmetic,
        fault=fault,
        max_num_batched_tokens=run.options.get("control_tokens", _CONTROL_BUDGET),
        max_num_seqs=16,
        prefix_caching=False,
    )
    with RolloutEngine(settings) as engine:
        few = _spread(requests)
        completions = engine.generate(workload.to_engine(few))
        whole = workload.sequences(few, completions)
        whole += [list(request.prompt) for request in requests if request not in few]
        engine.row_digests(True)
        batch = engine.score(whole)
        digests = engine.row_digests(False)
        alone = [engine.score([tokens])[0] for tokens in whole[:_DECODED]]
    base = workload.CONTROL_BASE
    return Stage(
        {
            "decode": workload.decoded(few, completions, base=base),
            "batch": workload.scored(whole, batch, digests, base=base),
            "alone": workload.scored(whole[:_DECODED], alone, base=base),
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
    device = "cpu" if run.recipe.platform == "cpu" else "cuda"
    stream = oracle.score(run.model, whole, device)
    return Stage({"oracle": stream.shifted(workload.CONTROL_BASE)}, {})
