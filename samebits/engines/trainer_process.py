"""A Megatron trainer in processes of its own, one per tensor-parallel rank.

    with TrainerProcess(folder, contract=path, tp=2, python_paths=paths) as trainer:
        trainer.load(folder)
        scores = trainer.score(sequences, layout="packed", digests=True)
        result = trainer.train_step(batch, loss_fn)
        with trainer.export() as manifest:
            ...                                  # the receiver reads shared memory here

Ranks talk to each other over gloo and to the coordinator over a pipe. An exception of a rank is
raised here with its id; a rank that ends or does not answer is SB0609 and takes the group with it.
A rank that computes is waited for: of a slow chip, or of cores that others use, as long as it takes
within `PATIENCE`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from samebits.engines import trainer_wire as wire
from samebits.engines.trainer import LossFunction, OptimizerSettings, Scores, StepResult
from samebits.engines.trainer_batch import TrainBatch
from samebits.errors import Refused
from samebits.weights.transport import Manifest

# After one rank has failed, the others may be waiting for it in a collective: seconds until they
# are ended. A refusal that all ranks share arrives well within it.
GRACE = 10.0
# A call may take so many times its timeout while its ranks compute on a CPU. One that spins and
# never ends computes too, so there is an end. Who waits for a GPU spins: its time says nothing.
PATIENCE = {"cpu": 6, "sm90": 1}
# Seconds of CPU time within a timeout from which on a rank computes: one core among three hundred.
_COMPUTES = 1 / 300
# Megatron warns about the last; none of them moves a bit of a forward pass.
_QUIET = {
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
# Megatron takes a GPU wherever it sees one. With this setting cuBLAS repeats its gradients.
_OF_PLATFORM = {
    "cpu": {"CUDA_VISIBLE_DEVICES": "-1"},
    "sm90": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
}


class TrainerProcess:
    """All methods are collective over the ranks and answer with rank 0's result."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        contract: str | Path | None,
        python_paths: Sequence[str | Path] = (),
        platform: str = "cpu",
        tp: int = 1,
        arithmetic: str = "aligned",
        fault: str | None = None,
        trace: Path | None = None,
        seed: int = 1234,
        optimizer: OptimizerSettings | None = None,
        gradients: bool = False,
        micro_tokens: int = 512,
        parallel: dict[str, int] | None = None,
        threads: int | None = None,
        timeout: float = 600.0,
    ):
        """Start `tp` ranks and build the model; arguments as of `Trainer`.

        platform      `cpu` or `sm90`, as `runtime.platform`
        trace         folder to record operators in while it exists (`samebits.trace`)
        python_paths  go first on the ranks' PYTHONPATH (`samebits.patching.python_paths(model)`)
        threads       per rank; default: this process's CPUs divided by `tp`
        timeout       seconds that one call may take while its ranks use no CPU time; PATIENCE
                      times as many while they do
        """
        self.tp, self.timeout, self._patience = tp, timeout, PATIENCE[platform]
        self._ranks: list[tuple[subprocess.Popen, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="samebits-trainer-")
        environment = _environment(python_paths, contract, arithmetic, fault, trace, platform)
        threads = threads or max(1, len(os.sched_getaffinity(0)) // max(1, tp))
        try:
            for _ in range(max(1, tp)):
                self._ranks.append(_start_rank(environment))
            options = {
                "model_dir": str(model_dir),
                "contract": None if contract is None else str(contract),
                "tp_size": tp,
                "rendezvous": f"file://{self._folder.name}/ranks",
                "seed": seed,
                "optimizer": optimizer,
                "gradients": gradients,
                "micro_tokens": micro_tokens,
                "parallel": parallel,
                "threads": threads,
            }
            self.started = self._call(
                "start", [{**options, "tp_rank": rank} for rank in range(len(self._ranks))]
            )
        except BaseException:
            self._end()
            raise

    # -- calls -----------------------------------------------------------------------------------

    def load(self, folder: str | Path) -> None:
        """Load the weights of a prepared model folder (`samebits.weights.sources`)."""
        self._call("load", {"folder": str(folder)})

    def score(
        self, sequences: Sequence[Sequence[int]], layout: str = "padded", digests: bool = False
    ) -> Scores:
        """`Trainer.score`."""
        arguments = {"sequences": sequences, "layout": layout, "digests": digests}
        return self._call("score", arguments)

    def train_step(
        self, batch: TrainBatch, loss_fn: LossFunction, layout: str = "padded"
    ) -> StepResult:
        """`Trainer.train_step`; `loss_fn` must be importable by name in another process."""
        return self._call("train_step", {"batch": batch, "loss_fn": loss_fn, "layout": layout})

    def time_passes(
        self, batch: TrainBatch, loss_fn: LossFunction, repeats: int, layout: str = "padded"
    ) -> tuple[list[float], list[torch.Tensor]]:
        """`Trainer.time_passes`."""
        arguments = {"batch": batch, "loss_fn": loss_fn, "repeats": repeats, "layout": layout}
        return self._call("time_passes", arguments)

    def gradients(self) -> dict[str, torch.Tensor]:
        """`Trainer.gradients` of the last step, by published name."""
        return self._call("gradients", {})

    @contextlib.contextmanager
    def export(self) -> Iterator[Manifest]:
        """The present weights in shared memory, whole tensors under published names; removed when
        the block ends."""
        manifest = Manifest.from_json(self._call("export", {}))
        try:
            yield manifest
        finally:
            if self._ranks:
                self._call("release", {})

    def info(self) -> dict[str, Any]:
        """Contract digest, probe answers, served counts, step and peak memory of rank 0, and how
        many `ranks` served rows, with how many `digest_columns` (`Trainer.extent`)."""
        return self._call("info", {})

    def reset_served(self) -> None:
        """Set the served counts of all ranks to zero."""
        self._call("reset_served", {})

    def close(self) -> None:
        """Stop all ranks; safe to call twice."""
        if self._ranks:
            with contextlib.suppress(Refused):
                self._call("stop", {}, timeout=GRACE)
        self._end()

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # -- plumbing --------------------------------------------------------------------------------

    def _call(self, method: str, arguments, timeout: float | None = None) -> Any:
        if not self._ranks:
            raise _gone("the trainer is closed", "a running trainer")
        each = arguments if isinstance(arguments, list) else [arguments] * len(self._ranks)
        for (_, pipe), given in zip(self._ranks, each, strict=True):
            with contextlib.suppress(BrokenPipeError):  # a dead rank is reported while receiving
                pipe.send_bytes(wire.dumps((method, given)))
        answers = self._receive(method, timeout or self.timeout)
        errors = [value for kind, value in answers if kind == "error"]
        if errors:
            raise errors[0]
        return answers[0][1]

    def _receive(self, method: str, timeout: float) -> list[tuple[str, Any]]:
        pending = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        answers: dict[int, tuple[str, Any]] = {}
        begun = time.monotonic()
        deadline, before = begun + timeout, 0.0
        used = self._cpu_seconds()
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                before, used = used, self._cpu_seconds()
                computes = used - before > _COMPUTES * timeout
                ending = method == "stop" or any(kind == "error" for kind, _ in answers.values())
                late = time.monotonic() - begun >= self._patience * timeout
                if ending or late or not computes:
                    break
                deadline = time.monotonic() + timeout
                continue
            for pipe in ready:
                assert isinstance(pipe, Connection)  # `wait` is typed for sockets too
                rank = pending.pop(pipe)
                try:
                    answers[rank] = wire.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    answers[rank] = ("error", self._ended(rank, method))
                if answers[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE)
        failed = [value for kind, value in answers.values() if kind == "error"]
        lost = [rank for rank, (process, _) in enumerate(self._ranks) if process.poll() is not None]
        if pending or (lost and method != "stop"):
            ranks = sorted(pending.values())
            self._end()
            if failed:
                raise failed[0]
            waited = time.monotonic() - begun
            raise _gone(
                f"no answer to {method} from ranks {ranks} in {waited:.0f} s: too slow, or dead; "
                f"{used - before:.1f} s of CPU time in the last {timeout:.0f}",
                f"one within {self._patience * timeout:.0f} s, and CPU time in every {timeout:.0f}",
            )
        return [answers[rank] for rank in sorted(answers)]

    def _cpu_seconds(self) -> float:
        """CPU time of all ranks so far, in seconds; one that has ended counts nothing."""
        ticks = 0
        for process, _ in self._ranks:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])  # utime, stime
        return ticks / os.sysconf("SC_CLK_TCK")

    def _ended(self, rank: int, method: str) -> Refused:
        process = self._ranks[rank][0]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return _gone(f"rank {rank} ended with {process.returncode} in {method}", "a running rank")

    def _end(self) -> None:
        """End the ranks that this object started, and nothing else."""
        for process, pipe in self._ranks:
            pipe.close()
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._ranks = []
        self._folder.cleanup()


def _environment(
    python_paths,
    contract,
    arithmetic: str,
    fault: str | None,
    trace: Path | None,
    platform: str = "cpu",
) -> dict[str, str]:
    environment = {
        **os.environ,
        **_QUIET,
        "SAMEBITS_ARITHMETIC": arithmetic,
        "SAMEBITS_PLATFORM": platform,
        **_OF_PLATFORM[platform],
    }
    for name in ("SAMEBITS_CONTRACT", "SAMEBITS_FAULT", "SAMEBITS_TRACE"):
        environment.pop(name, None)
    if contract is not None:
        environment["SAMEBITS_CONTRACT"] = str(Path(contract).resolve())
    if fault is not None:
        environment["SAMEBITS_FAULT"] = fault
    if trace is not None:
        environment["SAMEBITS_TRACE"] = str(trace)
    paths = [str(p) for p in python_paths] + [os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    return environment


def _start_rank(environment: dict[str, str]) -> tuple[subprocess.Popen, Connection]:
    ours, theirs = Pipe()
    with theirs:
        command = [sys.executable, "-m", "samebits.engines.trainer_worker", str(theirs.fileno())]
        # Megatron prints on stdout; a command's stdout holds its data only.
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,
        )
    return process, ours


def _gone(seen: str, required: str) -> Refused:
    return Refused("SB0609", seen=seen, required=required, hint="samebits explain SB0609")
