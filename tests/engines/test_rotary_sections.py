"""`--text-only` drops rotary sections: vLLM's own code turns text with them as it does without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from samebits.engines.rollout import RolloutSettings


@pytest.mark.engine
def test_sections_turn_text_as_plain_positions_do_and_an_image_otherwise(tmp_path):
    settings = RolloutSettings(
        model=tmp_path, contract=tmp_path / "none.json", series="qwen3.5-tiny"
    )
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("rotary_sections.py")],
        env=settings.environment() | {"VLLM_PLUGINS": ""},  # vLLM as released, but for its patches
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["running"] and found["rows"] == 0
    assert found["interleaved"]["text"] == found["blocks"]["text"] == 0
    assert min(found["image"], found["interleaved"]["image"], found["blocks"]["image"]) > 100
