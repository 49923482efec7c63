"""Programs of this folder that run kernels under Triton's interpreter.

In a process of their own, because TRITON_INTERPRET counts when a kernel is defined.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(program: str) -> Any:
    """What `program` prints as JSON; it has to end well."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(program)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
