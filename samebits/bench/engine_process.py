"""Processes of `engine_arm`: several start at once, and are then timed one after another.

A process compiles and captures for a minute and is timed for seconds. Started together, those of a
benchmark wait for one another's start only; while one is timed, the others wait for a line on their
standard input, and use neither the GPU nor a core.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samebits.bench import engine_arm
from samebits.bench.engine_arm import Arm
from samebits.engines import rollout_wire as wire
from samebits.errors import SamebitsError

SECONDS = 480.0  # that a configuration may take to start, and again to be timed
_LINES = 3  # of a failed configuration's output that are its reason
_POLL = 0.2


class ArmProcess:
    """One configuration's process. Files: `STEM.in`, `.ready`, `.out` and `.log` in `folder`."""

    def __init__(self, arm: Arm, environment: Mapping[str, str], folder: Path, stem: str):
        self.arm = arm
        self._ready, self._out, self._log = (
            folder / f"{stem}.{kind}" for kind in ("ready", "out", "log")
        )
        for old in (self._ready, self._out):
            old.unlink(missing_ok=True)
        given = folder / f"{stem}.in"
        given.write_text(
            json.dumps({**asdict(arm), "out": str(self._out), "ready": str(self._ready)})
        )
        self._deadline = time.monotonic() + SECONDS
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", engine_arm.__name__, str(given)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # one group to end, with vLLM's own processes
            )

    def started(self) -> bool:
        """Wait until the engine runs; False where it ended, or took too long."""
        while not self._ready.exists():
            if self._process.poll() is not None or time.monotonic() > self._deadline:
                return False
            time.sleep(_POLL)
        return True

    def measure(self, best: Mapping[str, float]) -> dict[str, Any]:
        """{name, seconds, ...}, or {name, failed} with the reason. The process has ended then."""
        code: int | None = None
        if self.started():
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self._process.communicate(json.dumps(dict(best)).encode() + b"\n", SECONDS)
        code = self._process.poll()
        self.stop()
        if code == 0 and self._out.exists():
            return {"name": self.arm.name, **json.loads(self._out.read_text())}
        return {
            "name": self.arm.name,
            "failed": reason(self._log.read_text(errors="replace"), code),
        }

    def stop(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


def reason(log: str, code: int | None) -> str:
    """Why a configuration did not run: the error that it reported, or the last that it said."""
    error: SamebitsError | None = wire.find(log)
    if error is not None:
        return f"{error.error_id}: {error.seen}"
    if code is None:
        return f"not done in {SECONDS:.0f} s"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line]
    return " | ".join((named or lines)[-_LINES:])[:500] or f"exit status {code}"
