"""A case that claims leg E alone: what runs, what it says of itself, and what verify demands."""

import copy
import dataclasses
import types

import pytest

from samebits import recipe as recipes
from samebits.errors import Refused
from samebits.evidence import required
from samebits.evidence.verdict import judge
from samebits.gates import prove, rl
from samebits.gates.run import Run, Stage


def _only_e(recipe: recipes.Recipe, **changes) -> recipes.Recipe:
    data = {**recipe.data, "legs": {"E": {**recipe.data["legs"]["E"], "tokens": 32}}, **changes}
    return dataclasses.replace(recipe, data=data)


@pytest.fixture
def finished(run_of, stages_of):
    """A run of the case, and the two stages that it has."""
    run = run_of("qwen3.5-tiny")
    run.recipe = _only_e(run.recipe)
    done = stages_of(run.recipe)
    (run.folder / "capsule.json").unlink()
    return run, {name: done[name] for name in ("rl_stock", "rl_aligned")}


def _state(run, done):
    return prove.state(run, done, quick=False, started="2025-01-01T00:00:00+00:00")


def test_it_is_equal_and_says_what_verify_demands(finished):
    run, done = finished
    predicate = _state(run, done).predicate
    assert judge(predicate).verdict == "EQUAL"
    assert [r["name"] for r in predicate["comparisons"]] == ["rollout/trainer-after-refits"]
    assert predicate["parameters"]["seeds"] == {"rl": run.recipe.rl["seed"]}
    sizes = (run.recipe.rl[n] for n in ("steps", "prompts_per_step", "samples_per_prompt"))
    steps, prompts, samples = sizes
    pairs = predicate["parameters"]["switches"]["distinct_prompt_seed_pairs"]
    assert pairs == str(steps * prompts * samples)
    assert list(required._problems(predicate, run.recipe)) == []


def test_other_requests_seeds_or_legs_are_refused(finished, run_of, stages_of):
    run, done = finished
    predicate = copy.deepcopy(dict(_state(run, done).predicate))
    predicate["parameters"]["switches"]["distinct_prompt_seed_pairs"] = "16"
    predicate["parameters"]["seeds"] |= {"capsule": 11}
    whole = run_of("qwen3.5-tiny")
    rows = _state(whole, stages_of(whole.recipe)).predicate["comparisons"]
    predicate["comparisons"].append(next(r for r in rows if r["leg"] == "A"))
    found = list(required._problems(predicate, run.recipe))
    assert any("16 distinct pairs of prompt and seed, for" in text for text in found)
    assert any(text.startswith("seeds") for text in found)
    assert "leg A, which the recipe does not ask for" in found


def test_a_control_that_agrees_is_not_observed(finished):
    run, done = finished
    reasons = judge(_state(run, {**done, "rl_stock": done["rl_aligned"]}).predicate).reasons
    assert any("control stock did not diverge" in reason for reason in reasons)


@pytest.fixture
def begun(finished, monkeypatch):
    """A run that has no stage yet, and the arms that ran in it with their sizes."""
    plain, done = finished
    run = Run.__new__(Run)
    run.recipe, run.folder, run.flag = plain.recipe, plain.folder, ""
    arms: list[tuple[str, int, int | None]] = []

    def run_rl(_run, *, steps, arithmetic, prompts_per_step, refitted_tokens):
        assert bool(refitted_tokens) == (arithmetic == "stock")
        arms.append((arithmetic, steps, prompts_per_step))
        return Stage(done[f"rl_{arithmetic}"].streams, done[f"rl_{arithmetic}"].facts)

    monkeypatch.setattr(rl, "run_rl", run_rl)
    return types.SimpleNamespace(run=run, arms=arms)


def test_its_two_arms_are_all_that_runs(begun):
    size = dataclasses.replace(prove.Size.full(), stock_rl_steps=2, stock_rl_prompts=1)
    found = prove._stages(begun.run, size)
    assert [*found] == ["rl_aligned", "rl_stock"]
    assert begun.arms == [("aligned", begun.run.recipe.rl["steps"], None), ("stock", 2, 1)]
    assert not (begun.run.folder / "capsule.json").exists()
    prove._stages(begun.run, prove.Size.quick())
    assert len(begun.arms) == 2  # finished stages are reused


def test_without_steps_there_is_nothing_to_run(begun):
    recipe = begun.run.recipe
    data = {name: part for name, part in recipe.data.items() if name != "rl"}
    begun.run.recipe = dataclasses.replace(recipe, data=data)
    with pytest.raises(Refused, match="SB0905"):
        prove._stages(begun.run, prove.Size.full())
    assert begun.arms == []
