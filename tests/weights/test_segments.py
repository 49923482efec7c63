"""Shared memory that a killed engine leaves behind is removed by the next run, and nothing else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from samebits import segments

# Two processes, as an engine and a rank of it: the second creates the segment.
ENGINE = """
import os, time
from multiprocessing import shared_memory
from samebits import segments
segments.own_segments()
if os.fork() == 0:
    made = shared_memory.SharedMemory(create=True, size=4096)
    shared_memory.SharedMemory(name=made.name).close()
    print(made.name, flush=True)
time.sleep(60)
"""


@pytest.fixture
def engine():
    child = subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    path = segments.SHARED_MEMORY / child.stdout.readline().strip()
    yield child, path
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    path.unlink(missing_ok=True)


def test_what_a_killed_engine_left_is_removed_once_it_is_dead(engine):
    child, path = engine
    assert path.name.startswith(f"{segments.ROLLOUT}-{os.getuid()}-{child.pid}-")
    segments.remove_stale(segments.ROLLOUT)
    assert path.exists()
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert path.exists()  # nobody is left who would remove it
    segments.remove_stale(segments.ROLLOUT)
    assert not path.exists()


@pytest.mark.parametrize("name", ["psm_0123abcd", "samebits-rollout-notes", "samebits-rollout-1-2"])
def test_files_of_others_stay(tmp_path, name):
    (tmp_path / name.replace("rollout-1", f"rollout-{os.getuid()}")).write_text("kept")
    segments.remove_stale(segments.ROLLOUT, [tmp_path])
    assert len(list(Path(tmp_path).iterdir())) == 1
