"""Whole engines on a CPU: milliseconds per token, aligned against each engine's own modules.

The case is `smollm2-135m` unless another is named. The gate: what the aligned engine decodes equals
its own prefill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samebits import patching, recipe
from samebits.engines.rollout import Request, RolloutEngine, RolloutSettings
from samebits.engines.trainer import OptimizerSettings
from samebits.engines.trainer_batch import TrainBatch
from samebits.engines.trainer_process import TrainerProcess
from samebits.errors import Different

CASE = "smollm2-135m"
PROMPT, RESPONSE, REQUESTS = 48, 16, 16
TRAINED = 4  # sequences of a training step


def rows(name: str = CASE) -> list[dict]:
    """Decode in a batch of 16, prefill, the trainer's score and its whole step of a case."""
    case = recipe.load(name)
    timed = {arm: _arm(case, arm) for arm in ("aligned", "stock")}
    table = []
    for work in timed["aligned"]:
        ours, native = timed["aligned"][work], timed["stock"][work]
        table.append(
            {
                "work": f"{work}, {case.case}",
                "ours": round(ours, 2),
                "against": {"name": "stock modules", "time": round(native, 2)},
                "ratio": round(ours / native, 3),
                "unit": "ms/token",
                "target": 2.0,
            }
        )
    return table


def _requests(start: int, vocabulary: int) -> list[Request]:
    draw = np.random.default_rng(start)
    return [
        Request(
            draw.integers(3, min(49000, vocabulary), PROMPT).tolist(),
            RESPONSE,
            start + i,
            ignore_eos=True,
        )
        for i in range(REQUESTS)
    ]


def _per_token(call: Callable[[], object], tokens: int) -> tuple[float, Any]:
    started = time.perf_counter()
    value = call()
    return (time.perf_counter() - started) * 1e3 / tokens, value


def _arm(case: recipe.Recipe, arithmetic: str) -> dict[str, float]:
    from samebits.weights import sources

    vocabulary = case.config["vocab_size"]
    model = sources.prepare(case)
    found: dict[str, float] = {}
    settings = RolloutSettings.of(case, model, arithmetic=arithmetic, prefix_caching=False)
    with RolloutEngine(settings) as engine:
        engine.generate(_requests(1, vocabulary)[:2])  # loads kernels
        asked = _requests(2, vocabulary)
        both, completions = _per_token(lambda: engine.generate(asked), 1)
        whole = [[*r.prompt, *c.tokens] for r, c in zip(asked, completions, strict=True)]
        tokens = sum(len(s) for s in whole)
        found["rollout prefill"], scores = _per_token(lambda: engine.score(whole), tokens)
        prompts = REQUESTS * PROMPT
        found["rollout decode, 16 requests"] = (both - prompts * found["rollout prefill"]) / (
            REQUESTS * RESPONSE
        )
    if arithmetic == "aligned":
        _gate(case.case, completions, scores)
    found |= _trainer(case, model, arithmetic, whole[:TRAINED])
    return found


def _gate(name: str, completions: Sequence, scores: Sequence) -> None:
    """SB0440 unless decode and prefill of the aligned engine have one bit pattern per token."""
    wrong = sum(
        int((c.logprob_bits != s.logprob_bits[PROMPT - 1 :]).sum())
        for c, s in zip(completions, scores, strict=True)
    )
    if wrong:
        raise Different(
            "SB0440",
            seen=f"{wrong} decoded tokens differ from their prefill",
            required="equal bits",
            hint=f"samebits prove {name}",
        )


def loss(logprobs, old, advantages, mask):
    """Mean negated log-probability of the counted tokens; importable by a trainer's process."""
    return -(logprobs * mask).sum() / mask.sum(), {}


def trainer_of(case: recipe.Recipe, model: Path, arithmetic: str, **changes) -> TrainerProcess:
    """A trainer of the case with its weights; `changes` are further arguments of it."""
    trainer = TrainerProcess(
        model,
        contract=case.contract_path,
        python_paths=patching.python_paths(case.series["megatron"]),
        platform=case.platform,
        arithmetic=arithmetic,
        **changes,
    )
    trainer.load(model)
    return trainer


def _trainer(case, model, arithmetic: str, whole: list[list[int]]) -> dict[str, float]:
    import torch

    tokens = sum(len(s) for s in whole)
    still = OptimizerSettings(lr=0.0)  # a step of it moves no weight
    with trainer_of(case, model, arithmetic, optimizer=still) as trainer:
        trainer.score(whole[:1])
        score, scores = _per_token(lambda: trainer.score(whole), tokens)
        ones = [torch.ones(len(s) - 1) for s in whole]
        batch = TrainBatch(whole, ones, ones, scores.logprobs)
        step, _ = _per_token(lambda: trainer.train_step(batch, loss), tokens)
    return {"trainer score": score, "trainer step (forward, backward, Adam)": step}
