"""vLLM's own hybrid model under the name that a benchmark asks for. No engine starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from samebits import patching


@pytest.mark.engine
def test_a_process_without_a_plugin_knows_vllms_text_only_model():
    tree = str(patching.tree_path("vllm", "qwen3.5-tiny"))
    own = {"PYTHONPATH": tree, "VLLM_PLUGINS": "", "CUDA_VISIBLE_DEVICES": "-1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SAMEBITS_")}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("named_hybrid.py"))],
        env=kept | own,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "same": True,
        "hybrid": True,
        "forward": "vllm.model_executor.models.qwen3_5",  # nothing of it is ours
        "states": 2,  # the window of the convolution, and a state
        "pictures": False,
    }
