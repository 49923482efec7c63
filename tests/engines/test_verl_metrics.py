"""verl's debug metrics, patched: mismatched tokens are counted by bit pattern."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from samebits.hooks.verl.metrics import logprob_bit_metrics


def test_equal_bits_give_zero_and_one():
    logp = torch.randn(3, 5)
    found = logprob_bit_metrics(logp, logp.clone(), torch.ones(3, 5, dtype=torch.bool))
    assert found["training/rollout_logp_tokens"] == 15
    assert found["training/rollout_logp_mismatched_tokens"] == 0
    assert found["training/rollout_logp_k3_kl"] == 0.0
    assert found["training/rollout_logp_is_ratio_max"] == 1.0


def test_one_changed_bit_of_a_tiny_probability_is_counted():
    rollout = torch.full((2, 4), -40.0)
    trainer = rollout.clone()
    trainer.view(torch.int32)[1, 2] += 1
    mask = torch.ones(2, 4, dtype=torch.bool)
    assert (
        logprob_bit_metrics(rollout, trainer, mask)["training/rollout_logp_mismatched_tokens"] == 1
    )
    mask[1, 2] = False
    assert (
        logprob_bit_metrics(rollout, trainer, mask)["training/rollout_logp_mismatched_tokens"] == 0
    )


def test_signed_zero_and_nan_are_mismatches():
    rollout = torch.tensor([[0.0, float("nan")]])
    trainer = torch.tensor([[-0.0, float("nan")]])
    found = logprob_bit_metrics(rollout, trainer, torch.ones(1, 2, dtype=torch.bool))
    assert found["training/rollout_logp_mismatched_tokens"] == 2


_PATCHED = """
import torch
from verl import DataProto
from verl.utils.debug.metrics import calculate_debug_metrics
rollout = torch.full((2, 4), -40.0)
actor = rollout.clone()
actor.view(torch.int32)[1, 2] += 1
data = DataProto.from_dict(tensors=dict(rollout_log_probs=rollout, old_log_probs=actor,
    responses=torch.zeros(2, 4, dtype=torch.long), response_mask=torch.ones(2, 4)))
print(calculate_debug_metrics(data)["training/rollout_logp_mismatched_tokens"])
"""


@pytest.mark.engine
def test_patched_metrics_count_bits():
    from samebits.patching import tree_path

    tree = tree_path("verl", "smollm2-135m")
    done = subprocess.run(
        [sys.executable, "-c", _PATCHED],
        env={"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(np.int64(done.stdout.split()[-1])) == 1
