"""How many steps an arm of the RL run takes. Engines are replaced: only the count matters."""

import contextlib
import math
from types import SimpleNamespace

import pytest

from samebits import recipe as recipes
from samebits.errors import Different
from samebits.gates import rl


class _Engine:
    refits = 0

    def __init__(self, _settings, *, wait):
        assert not wait
        type(self).refits = 0

    def ready(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    dropped = 1

    def sync_weights(self, _manifest):
        type(self).refits += 1
        return {"dropped_blocks": self.dropped}


class _Trainer:
    def info(self):
        return {"peak_gpu_bytes": 0, "peak_rss_bytes": 1 << 30}

    @contextlib.contextmanager
    def export(self):
        yield None


@pytest.fixture
def steps_of(monkeypatch, tmp_path):
    """`steps_of(differing tokens per step, max |dlogp|, **options of run_rl)`: numbers of the
    steps that ran."""
    recipe = recipes.load("qwen3.5-tiny")
    run = SimpleNamespace(recipe=recipe, model=tmp_path)

    @contextlib.contextmanager
    def trainer(*_args, **_options):
        yield _Trainer()

    monkeypatch.setattr(rl, "RolloutEngine", _Engine)
    monkeypatch.setattr(rl.stages, "trainer", trainer)
    monkeypatch.setattr(rl, "_use_patched_verl", lambda _run: None)
    monkeypatch.setattr(rl, "_report", lambda _arm, _record: None)

    def steps(tokens, largest=0.5, *, cached=0, **options):
        def step(_engine, _trainer, prompts, _reward, settings, number, _streams):
            assert len(prompts) == settings["prompts_per_step"]
            counts = {"tokens": 99, "mismatches": tokens, "max_abs": largest}
            record = {"step": number, **counts, "repeated_cached_tokens": cached}
            return record, lambda: {"loss": 0.0, "grad_norm": 1.0}

        monkeypatch.setattr(rl, "_step", step)
        stage = rl.run_rl(run, arithmetic="stock", prompts_per_step=1, **options)
        steps.trained = [r["step"] for r in stage.facts["steps"] if "loss" in r]
        return [record["step"] for record in stage.facts["steps"]]

    return steps


def test_a_control_goes_on_until_enough_tokens_follow_the_first_refit(steps_of):
    assert steps_of(23, steps=2, refitted_tokens=32) == [1, 2, 3]
    assert steps_of(32, steps=2, refitted_tokens=32) == [1, 2]


def test_a_control_does_not_train_on_its_last_step(steps_of):
    """Nothing compares the weights that it would get; the claim trains on every step."""
    assert steps_of(23, steps=2, refitted_tokens=32) == [1, 2, 3]
    assert steps_of.trained == [1, 2]
    assert steps_of(23, steps=3) == [1, 2, 3] == steps_of.trained


def test_nothing_is_sent_after_the_last_step(steps_of):
    """The rollout samples nothing from those weights."""
    assert steps_of(1, steps=3) == [1, 2, 3]
    assert _Engine.refits == 2
    assert steps_of(32, steps=2, refitted_tokens=32) == [1, 2]
    assert _Engine.refits == 1


def test_a_control_ends_where_responses_stay_too_short(steps_of):
    assert steps_of(1, steps=2, refitted_tokens=32) == list(range(1, 9))


def test_a_step_of_nan_does_not_count_for_a_control(steps_of):
    assert steps_of(99, math.nan, steps=2, refitted_tokens=32) == list(range(1, 9))


def test_the_claim_takes_the_steps_of_the_recipe_whatever_they_sample(steps_of):
    assert steps_of(1, steps=3) == [1, 2, 3]


@pytest.mark.parametrize("dropped", [0, 1])
def test_cached_tokens_after_a_refit_are_different_whatever_was_dropped(
    steps_of, monkeypatch, dropped
):
    monkeypatch.setattr(_Engine, "dropped", dropped)
    assert steps_of(1, cached=16, steps=1) == [1]  # before any refit they are what a cache is for
    with pytest.raises(Different, match="SB0906"):
        steps_of(1, cached=16, steps=2)
