"""How long a trainer waits for an answer: as long as its ranks compute, and no longer."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe

import pytest

from samebits.engines import trainer_process
from samebits.engines.trainer_process import TrainerProcess
from samebits.errors import Refused

_SECOND = 1.0
# Answers after some seconds in which it computes, or sleeps.
_RANK = """
import sys, time
from multiprocessing.connection import Connection
from samebits.engines import trainer_wire as wire
pipe, how, seconds = Connection(int(sys.argv[1])), sys.argv[2], float(sys.argv[3])
pipe.recv_bytes()
begun = time.monotonic()
while time.monotonic() - begun < seconds:
    if how == "sleep":
        time.sleep(0.05)
pipe.send_bytes(wire.dumps(("value", "answer")))
"""


@pytest.fixture
def trainer():
    """A trainer whose one rank is a stand-in that answers one call."""
    made = []

    def start(how: str, seconds: float, patience: int) -> TrainerProcess:
        running = TrainerProcess.__new__(TrainerProcess)
        running.tp, running.timeout, running._patience = 1, _SECOND, patience
        running._folder = tempfile.TemporaryDirectory()
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-c", _RANK, str(theirs.fileno()), how, str(seconds)]
            rank = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        running._ranks = [(rank, ours)]
        made.append(running)
        return running

    yield start
    for running in made:
        running._end()


def test_a_rank_that_computes_is_waited_for(trainer):
    assert trainer("compute", 3 * _SECOND, 60)._call("train_step", {}) == "answer"


@pytest.mark.parametrize(("how", "patience"), [("sleep", 60), ("compute", 1)])
def test_one_that_does_not_or_never_ends_is_not(trainer, how, patience):
    running = trainer(how, 60.0, patience)
    # The interpreter's own start computes too.
    begun = time.monotonic()
    with pytest.raises(Refused) as caught:
        running._call("train_step", {})
    assert caught.value.error_id == "SB0609" and "too slow, or dead" in caught.value.seen
    assert "no answer to train_step from ranks [0]" in caught.value.seen
    assert time.monotonic() - begun < 40 and running._ranks == []


def test_who_waits_for_a_gpu_spins_so_that_no_time_of_it_counts():
    assert trainer_process.PATIENCE["sm90"] == 1 < trainer_process.PATIENCE["cpu"]
