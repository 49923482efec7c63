"""Compiled kernels follow their sources, also through functions inlined from another file."""

import shutil
import subprocess
import sys
from pathlib import Path

import samebits

_PROBE = """
import torch
from samebits.ops import silu_mul
x = torch.linspace(-4, 4, 64).to(torch.bfloat16)
print(silu_mul.silu_mul(x).view(torch.int16).tolist())
"""


def test_a_changed_inlined_function_recompiles_its_callers(tmp_path):
    package = tmp_path / "samebits"
    shutil.copytree(
        Path(samebits.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )

    def probe() -> str:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    before = probe()
    assert probe() == before
    scalar = package / "ops" / "scalar.py"
    text = scalar.read_text()
    assert "def exp32(" in text
    changed = text.replace("def exp32(", "def _exp32(", 1)
    scalar.write_text(
        changed + "\n\n@kernel\ndef exp32(x):\n    return _exp32(x) * np.float32(1.5)\n"
    )
    assert probe() != before
