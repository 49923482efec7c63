"""Stages of a run that never ran: synthetic streams that satisfy every leg of a case."""

from __future__ import annotations

import types

import numpy as np
import pytest

from samebits import recipe as recipes
from samebits.contract import Contract
from samebits.evidence import current
from samebits.gates import capsule, fired, semantic, workload
from samebits.gates.run import Stage
from samebits.gates.streams import Stream

SEQUENCES, LENGTH, PROMPT = 16, 24, 10


class Maker:
    """Streams of one set of sequences; equal seeds give equal bits."""

    def __init__(self):
        draw = np.random.default_rng(1)
        self.sequences = draw.integers(3, 1000, (SEQUENCES, LENGTH)).tolist()

    def stream(self, first=1, *, seed=0, base=0, only=None, flip=None) -> Stream:
        """`flip` (sequence, position) changes one bit of a log-probability."""
        found = Stream()
        for index, tokens in enumerate(self.sequences):
            draw = np.random.default_rng((7, index))
            values = -draw.uniform(0.5, 4.0, LENGTH - 1)
            values += seed * np.random.default_rng((seed, index)).uniform(0, 1e-3, LENGTH - 1)
            digests = np.random.default_rng((seed, index)).integers(1, 1 << 60, (LENGTH - 1, 2))
            patterns = values.astype(np.float32).view(np.uint32)
            if flip is not None and flip[0] == index:
                patterns[flip[1] - 1] ^= 1
            if only is None or index in only:
                rows = digests.astype(np.uint64)[first - 1 :]
                found.add(base + index, first, tokens[first:], patterns[first - 1 :], rows)
        return found


def _meaning(recipe: recipes.Recipe) -> dict:
    """What an engine of the case says of its semantics."""
    return {
        "logprobs_mode": "raw_logprobs",
        "tokenizer": False,
        "vocabulary": recipe.config["vocab_size"],
        "refused": dict.fromkeys(semantic.OUTSIDE, "SB0509"),
    }


def _rollout(make: Maker) -> dict[str, Stage]:
    hazards = ("split_mid_prompt", "mixed_steps", "prefix_hit_requests", "resumed")
    hazards += ("one_token_prompts", "exact_block_prompts", *fired.ALIKE)
    counters: dict = {**dict.fromkeys(hazards, 1), "batch_sizes": {"16": 2}}
    few, control = range(4), workload.CONTROL_BASE
    return {
        "rollout_stress": Stage(
            {"decode": make.stream(PROMPT)},
            {"hazards": counters, "sequences": make.sequences},
        ),
        "rollout_plain": Stage(
            {
                "batch": make.stream(),
                "alone": make.stream(only=few),
                "decode_alone": make.stream(PROMPT, only=few),
                "decode_batch": make.stream(PROMPT),
                "extra": make.stream(base=control, seed=1),
            },
            {
                "batch_hazards": {
                    "batch_sizes": {"16": 9},
                    "batch_sizes_of": {"score": {"16": 1}, "generate": {"16": 8}},
                    "ranks": 1,
                },
                "alone_hazards": {
                    "batch_sizes": {"1": 7},
                    "batch_sizes_of": {"score": {"1": 4}, "generate": {"1": 3}},
                },
            },
        ),
        "stock_rollout": Stage(
            {
                "decode": make.stream(PROMPT, base=control, seed=2),
                "batch": make.stream(base=control, seed=3),
                "alone": make.stream(base=control, seed=4),
            },
            {"sequences": make.sequences},
        ),
    }


@pytest.fixture
def make() -> Maker:
    return Maker()


@pytest.fixture
def stages_of(make):
    """case -> finished stages that make every leg of its recipe EQUAL."""

    def build(recipe: recipes.Recipe) -> dict[str, Stage]:
        control = workload.CONTROL_BASE
        done = _rollout(make)
        done["rollout_stress"].facts["semantics"] = _meaning(recipe)
        info = {"ranks": 1, "digest_columns": recipe.config["vocab_size"]}
        streams = {"padded": make.stream(), "packed": make.stream()}
        done["trainer"] = Stage(streams, {"info": info})
        done["stock_trainer"] = Stage({"padded": make.stream(base=control, seed=5)}, {})
        if "D" in recipe.legs:
            two = {"ranks": 2}
            done["rollout_tp2"] = Stage({"score": make.stream()}, {"hazards": two})
            done["trainer_tp2"] = Stage({"padded": make.stream()}, {"info": {**two}})
            done["planted_ranks"] = Stage({"padded": make.stream(seed=6)}, {})
        if recipe.gdn_schedule is not None:
            fired = {
                "hazards": {"prefix_hit_requests": 1, "resumed_from_state": 1},
                "one_token_slices": 1,
            }
            done["rollout_paged"] = Stage({"decode": make.stream(PROMPT)}, fired)
            done["rollout_slices"] = Stage({"decode": make.stream(PROMPT, only=range(3))}, fired)
            swapped = make.stream(base=control, seed=600)
            done["planted_schedule"] = Stage({"padded": swapped}, {})
        if "O" in recipe.legs:
            done["oracle"] = Stage({"oracle": make.stream(base=control)}, {})
            done["planted_oracle"] = Stage({"padded": make.stream(base=control, seed=500)}, {})
        if recipe.rl:
            for arm, seed in (("aligned", 0), ("stock", 9)):
                done[f"rl_{arm}"] = _rl(make, recipe, seed)
        return done

    def _rl(make: Maker, recipe: recipes.Recipe, seed: int) -> Stage:
        from dataclasses import asdict

        from samebits.gates.streams import compare

        rollout, trainer, steps = Stream(), Stream(), []
        for step in range(1, recipe.rl["steps"] + 1):
            left = make.stream(PROMPT, base=step * 1000)
            right = make.stream(PROMPT, base=step * 1000, seed=seed)
            values = compare(left, right).values
            steps.append(
                {
                    "step": step,
                    **asdict(values),
                    "reward": 0.1 * step,
                    "loss": 0.0,
                    "grad_norm": 1.0,
                    "cache_invalidated": step > 1,
                }
            )
            rollout.extend(left)
            trainer.extend(right)
        each = recipe.rl["prompts_per_step"] * recipe.rl["samples_per_prompt"]
        said = {"pairs": len(steps) * each, "semantics": _meaning(recipe)}
        return Stage({"rollout": rollout, "trainer": trainer}, {"steps": steps, **said})

    return build


@pytest.fixture
def run_of(tmp_path):
    """case -> what judging needs of a run."""

    def build(case: str):
        recipe = recipes.load(case)
        requests = [capsule.Request((i,), i, 2, "x") for i in range(SEQUENCES)]
        capsule.write(requests, tmp_path / "capsule.json")
        contract = Contract.load(recipe.contract_path)
        return types.SimpleNamespace(
            recipe=recipe,
            contract=contract,
            folder=tmp_path,
            flag=" --record",
            options={},
            dependencies=current.dependencies(recipe),
        )

    return build
