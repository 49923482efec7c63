"""Runs in a process with the patched tree: one trainer after another, each with some regions on.

`python trainer_regions.py MODEL CONTRACT SET...` where a SET is a value of SAMEBITS_ARITHMETIC.
Prints JSON {set: {served: regions that computed rows, bits: of the log-probabilities, loss, grad}}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from trainer_support import mean_nll, sequences, train_batch

from samebits.engines.trainer import OptimizerSettings, Trainer
from samebits.ops import registry
from samebits.weights.sources import open_model


def outcome(model: str, contract: str, arithmetic: str) -> dict:
    """Score and one training step by a trainer of this process, which is closed again."""
    os.environ["SAMEBITS_ARITHMETIC"] = arithmetic
    trainer = Trainer(model, contract, optimizer=OptimizerSettings(lr=1e-3))
    trainer.load_weights(open_model(Path(model)))
    tokens = sequences((2, 7, 40))
    registry.reset_served()
    scores = trainer.score(tokens, digests=True)
    served = sorted(region for region, rows in registry.served().items() if rows)
    step = trainer.train_step(train_batch(tokens), mean_nll)
    same = all(torch.equal(a, b) for a, b in zip(step.logprobs, scores.logprobs, strict=True))
    trainer.close()
    return {
        "served": served,
        "bits": torch.cat(scores.logprobs).view(torch.int32).tolist(),
        "step_as_score": same,
        "loss": step.loss,
        "grad_norm": step.grad_norm,
    }


if __name__ == "__main__":
    given, bound, *sets = sys.argv[1:]
    torch.set_num_threads(1)
    print(json.dumps({one: outcome(given, bound, one) for one in sets}))
