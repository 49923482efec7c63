"""One rank of `TrainerProcess`: `python -m samebits.engines.trainer_worker FD`.

Reads (method, arguments) from the inherited pipe FD and answers ("ok", value) or ("error",
exception). Ends when the pipe closes, so it does not outlive its coordinator.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from samebits import faults, runtime, trace
from samebits.engines import trainer_wire as wire
from samebits.engines.trainer import Trainer
from samebits.errors import SamebitsError
from samebits.ops import registry


class Worker:
    """The methods that a coordinator may call; every rank runs the same one at the same time."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._segment = contextlib.ExitStack()

    @property
    def trainer(self) -> Trainer:
        """The trainer of this rank; `start` makes it."""
        if self._trainer is None:
            raise RuntimeError("the first call must be `start`")
        return self._trainer

    def start(self, threads: int, **options) -> dict:
        """Make the trainer of this rank with `options` of `Trainer`; returns `info`."""
        torch.set_num_threads(threads)
        if runtime.aligned():
            faults.install()
            trace.install("trainer")
        self._trainer = Trainer(**options)
        return self.info()

    def info(self) -> dict:
        """What this rank is bound to, and what it has served since `reset_served`; collective.

        `ranks` and `digest_columns` are those of `Trainer.extent`; with stock arithmetic, which
        serves nothing that is counted, no rank has served.
        """
        binding, served = self.trainer.binding, registry.served()
        on_gpu = self.trainer.device.type == "cuda"
        return {
            "contract_digest": self.trainer.contract_digest,
            "arithmetic": runtime.arithmetic(),
            "fault": runtime.fault(),
            "platform_status": binding.status if binding else None,
            "answers": dict(binding.answers) if binding else {},
            "served": served,
            **self.trainer.extent(any(served.values())),
            "step": self.trainer.step,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "peak_gpu_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        }

    def reset_served(self) -> None:
        """Start counting served operator calls anew."""
        registry.reset_served()

    def load(self, folder: str) -> None:
        """Load the weights of a model folder."""
        from samebits.weights.sources import open_model

        self.trainer.load_weights(open_model(Path(folder), self.trainer.device))

    def score(self, sequences, layout, digests):
        """See `Trainer.score`."""
        return self.trainer.score(sequences, layout, digests)

    def train_step(self, batch, loss_fn, layout):
        """See `Trainer.train_step`."""
        return self.trainer.train_step(batch, loss_fn, layout)

    def time_passes(self, batch, loss_fn, repeats, layout):
        """See `Trainer.time_passes`."""
        return self.trainer.time_passes(batch, loss_fn, repeats, layout)

    def gradients(self) -> dict[str, torch.Tensor] | None:
        """Whole logical gradients by tensor name, on rank 0; None on the others."""
        whole = dict(self.trainer.gradients())
        return whole if self.trainer.tp_rank == 0 else None

    def export(self) -> str | None:
        """Put the weights into shared memory; rank 0 answers with the manifest as JSON.

        SB0710 where what would be sent is not what the model computes with.
        """
        from samebits.weights.transport import send

        self._give_back()
        live = self.trainer.live_checksums()
        tensors = self.trainer.export_weights()
        if self.trainer.tp_rank != 0:
            for _ in tensors:
                pass
            return None
        self.release()
        manifest = self._segment.enter_context(
            send(
                tensors,
                step=self.trainer.step,
                contract_digest=self.trainer.contract_digest,
                size=self.trainer.export_bytes(),
                live=live,
            )
        )
        self._give_back()
        return manifest.to_json()

    def _give_back(self) -> None:
        """Memory that no tensor has: a receiver on the same chip holds the weights twice."""
        if self.trainer.device.type == "cuda":
            torch.cuda.empty_cache()

    def release(self) -> None:
        """Remove the segment that `export` left behind."""
        self._segment.close()

    def stop(self) -> None:
        """Release shared memory and close the trainer."""
        self.release()
        if self._trainer is not None:
            self._trainer.close()


def _as_answer(error: BaseException) -> BaseException:
    """An exception that survives the pipe: ours with its id, any other as text."""
    if isinstance(error, SamebitsError):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))


def main() -> int:
    """Serve calls from the pipe that the first argument names, until it closes; returns 0."""
    pipe = Connection(int(sys.argv[1]))
    worker = Worker()
    while True:
        try:
            method, arguments = wire.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            worker.release()
            return 0
        except Exception as error:  # an argument that this process cannot import
            pipe.send_bytes(wire.dumps(("error", _as_answer(error))))
            continue
        try:
            answer = ("ok", getattr(worker, method)(**arguments))
        except Exception as error:
            answer = ("error", _as_answer(error))
        pipe.send_bytes(wire.dumps(answer))
        if method == "stop":
            return 0


if __name__ == "__main__":
    sys.exit(main())
