"""The stages that a recipe's legs need, each with those whose results it reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from samebits.evidence.verdict import CONTROL_TOKENS, diverged
from samebits.gates import capsule, forecast, lanes, rl, semantic, stages, workload
from samebits.gates.legs import control_of, oracle_fault
from samebits.gates.run import Run, Stage
from samebits.gates.sizes import Size
from samebits.gates.streams import compare

# Ways in which a control arm computes what it prefills in a batch again.
_SELF_CONTROLS = ("alone", "decode")


def tasks(run: Run, size: Size, done: Mapping[str, Stage]) -> list[lanes.Task]:
    """What a recipe's legs need; `done` fills up as stages end."""
    return _refit_tasks(run, size) if run.recipe.refits_only else _all_tasks(run, size, done)


def _rl_task(run: Run, size: Size, arithmetic: str, *after: str) -> lanes.Task:
    """An arm of the RL run. One waits for the other: two optimizers at a time would double the
    memory of a run."""
    sizes = {"stock": (size.stock_rl_steps, size.stock_rl_prompts), "aligned": (size.rl_steps,)}
    work = functools.partial(_rl, run, arithmetic, *sizes[arithmetic])
    name = f"rl_{arithmetic}"
    alone = stages.rl_alone(run.recipe)
    return lanes.Task(name, functools.partial(run.stage, name, work), after, alone)


def _refit_tasks(run: Run, size: Size) -> list[lanes.Task]:
    """The stages of a case that claims leg E alone; the claim comes first."""
    return [_rl_task(run, size, "aligned"), _rl_task(run, size, "stock", "rl_aligned")]


def _all_tasks(run: Run, size: Size, done: Mapping[str, Stage]) -> list[lanes.Task]:
    """All stages, once the capsules of a run are written and their hazards forecast."""
    budget = stages.stress(run)["max_num_batched_tokens"]
    requests = workload.main(run.recipe, run.model, size.requests, size.response, budget)
    if size.long_prompt is not None:
        requests.append(workload.long(run.recipe, size.long_prompt, size.response))
    capsule.write(requests, run.folder / "capsule.json")
    controls = workload.control(
        run.recipe, run.model, size.control_requests, size.control_response, size.control_prompt
    )
    for capsule_requests in (requests, controls):
        semantic.distinct((request.prompt, request.seed) for request in capsule_requests)
    forecast.check(run, requests)
    return _tasks(run, size, requests, controls, done)


def _tasks(
    run: Run,
    size: Size,
    requests: Sequence[capsule.Request],
    controls: Sequence[capsule.Request],
    done: Mapping[str, Stage],
) -> list[lanes.Task]:
    """All stages of a run, each with those whose results it reads from `done`."""
    legs, base = run.recipe.legs, workload.CONTROL_BASE
    works: list[lanes.Task] = []

    def add(name: str, work: Callable[[], Stage], *after: str, alone: bool = False) -> None:
        works.append(lanes.Task(name, lambda: run.stage(name, work), after, alone))

    def whole() -> Sequence[Sequence[int]]:
        return done["rollout_stress"].facts["sequences"]

    def own() -> Sequence[Sequence[int]]:
        return done["stock_rollout"].facts["sequences"]

    alone = stages.rl_alone(run.recipe)
    if run.recipe.rl is not None and alone:
        works.append(_rl_task(run, size, "stock"))  # first: it needs most memory
    add("rollout_stress", lambda: stages.rollout_stress(run, requests))
    if run.recipe.rl is not None and not alone:
        works.append(_rl_task(run, size, "stock"))  # early: it keeps one core busy for longest
    add("stock_rollout", lambda: stages.rollout_control(run, controls, arithmetic="stock"))
    add(
        "rollout_plain",
        lambda: stages.rollout_plain(run, requests, whole(), own(), size.alone),
        "rollout_stress",
        "stock_rollout",
    )
    add(
        "trainer",
        lambda: stages.trainer_score(run, whole(), layouts=("padded", "packed")),
        "rollout_stress",
    )
    if run.recipe.gdn_schedule is not None:
        _gdn_works(run, requests, own, add)
    if run.recipe.rl is not None:
        works.append(_rl_task(run, size, "aligned", "trainer", "rl_stock"))
    add(
        "stock_trainer",
        lambda: stages.trainer_score(run, own(), base=base, arithmetic="stock"),
        "stock_rollout",
    )
    planted = lanes.Task(
        "planted_rollout",
        lambda: _planted(run, controls, done["stock_rollout"]),
        ("stock_rollout",),
    )
    works.append(planted)
    if "O" in legs:
        add("oracle", lambda: stages.fp32_oracle(run, own()), "stock_rollout")
        add(
            "planted_oracle",
            lambda: stages.trainer_score(run, own(), base=base, fault=oracle_fault(run.recipe)),
            "stock_rollout",
        )
    if "D" in legs:
        _layout_works(run, whole, add)
    return works


def _gdn_works(
    run: Run,
    requests: Sequence[capsule.Request],
    own: Callable[[], Sequence[Sequence[int]]],
    add,
) -> None:
    """Other ways to cut a prompt than that of the stress engine, and the schedule not named."""
    add("rollout_paged", lambda: stages.rollout_paged(run, requests), "rollout_stress")
    add("rollout_slices", lambda: stages.rollout_slices(run, requests), "rollout_stress")
    add(
        "planted_schedule",
        lambda: stages.trainer_score(
            run, own(), base=workload.CONTROL_BASE, fault="other_gdn_schedule"
        ),
        "stock_rollout",
    )


def _layout_works(run: Run, whole: Callable[[], Sequence[Sequence[int]]], add) -> None:
    """Ranks of one engine wait for each other, so such an engine keeps all CPUs."""
    for tp in run.recipe.rollout_tp:
        if tp > 1:
            add(
                f"rollout_tp{tp}",
                lambda tp=tp: stages.rollout_score(run, whole(), base=0, tp=tp),
                "rollout_stress",
                alone=True,
            )
    for tp in run.recipe.trainer_tp:
        if tp > 1:
            add(
                f"trainer_tp{tp}",
                lambda tp=tp: stages.trainer_score(run, whole(), tp=tp),
                "rollout_stress",
                alone=True,
            )
    largest = max(run.recipe.trainer_tp)
    add(
        "planted_ranks",
        lambda: stages.trainer_score(run, whole(), tp=largest, fault="rank_order_sum"),
        "rollout_stress",
        alone=True,
    )


def _rl(run: Run, arithmetic: str, steps: int | None, prompts_per_step: int | None = None) -> Stage:
    return rl.run_rl(
        run,
        steps=steps or rl.settings_of(run.recipe)["steps"],
        arithmetic=arithmetic,
        prompts_per_step=prompts_per_step,
        refitted_tokens=CONTROL_TOKENS if arithmetic == "stock" else 0,
    )


def _planted(run: Run, controls: Sequence[capsule.Request], stock: Stage) -> Stage | None:
    """A planted fault for legs A and B, where stock happens to agree with itself."""
    streams = stock.streams
    pairs = (compare(streams[arm], streams["batch"]) for arm in _SELF_CONTROLS)
    if all(diverged(control_of("stock", counts)) for counts in pairs):
        return None
    fault = "k_cut_by_rows"
    return run.stage(
        "planted_rollout",
        lambda: stages.rollout_control(run, controls, arithmetic="aligned", fault=fault),
    )
