"""Drives vLLM's V1 engine, patched, in processes of its own.

    with RolloutEngine(RolloutSettings.of(recipe)) as engine:
        completions = engine.generate([Request(prompt=(1, 2, 3), max_tokens=8, seed=0)])

The caller's process imports no vLLM and its environment is not touched. The front-end process runs
`vllm.LLM`; vLLM starts the engine core, and workers where there is more than one rank, from it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits import bits, patching, segments
from samebits.engines import rollout_wire as wire
from samebits.engines.rollout_wire import Completion, Request, Score
from samebits.errors import Different, Refused

if TYPE_CHECKING:
    from samebits.recipe import Recipe
    from samebits.weights.transport import Manifest

__all__ = ["Completion", "Request", "RolloutEngine", "RolloutSettings", "Score"]

_START_SECONDS = 600
_STOP_SECONDS = 30
_LOG_LINES = 30

# Variables of the caller that would reach into the engine.
_PRIVATE = ("VLLM_", "SAMEBITS_", "OMP_", "KMP_", "GOMP_", "MKL_", "TORCH", "PYTORCH_", "NUMBA_")
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD")


@dataclass(frozen=True)
class RolloutSettings:
    """How to start an engine. `model` is a folder of `weights.sources`, `contract` a file.

    platform     `cpu` or `sm90`, as `runtime.platform`
    kv_blocks    pages of the KV cache; few of them force preemption
    slice_tokens tokens of one prompt in a step at most; 0: as many as the step has
    cuda_graphs  replay captured decode steps (on a GPU); else every step is eager
    ahead        on a GPU, prepare a step while the one before runs (vLLM's async_scheduling)
    arithmetic   `aligned`, or for negative controls `stock` or `runtime.only(regions)`
    fault        name of a planted fault (negative controls only)
    trace        folder to record operators in while it exists (`samebits.trace`)
    series       patch series of vLLM to run with
    """

    model: Path
    contract: Path
    series: str
    platform: str = "cpu"
    tensor_parallel_size: int = 1
    max_model_len: int = 512
    max_num_batched_tokens: int = 256
    slice_tokens: int = 0
    max_num_seqs: int = 16
    kv_blocks: int = 256
    block_size: int = 16
    prefix_caching: bool = True
    cuda_graphs: int = 0
    ahead: bool = False
    seed: int = 0
    arithmetic: str = "aligned"
    fault: str | None = None
    trace: Path | None = None
    load_format: str = "samebits"
    log_level: str = "ERROR"

    @classmethod
    def of(cls, recipe: Recipe, model: Path, **changes: Any) -> RolloutSettings:
        """Settings of a model case, some of them changed."""
        values = {
            "series": recipe.series["vllm"],
            "contract": recipe.contract_path,
            "platform": recipe.platform,
        }
        # A recording sees no operator of a replay: what it traces runs step by step.
        eager = {"cuda_graphs": 0} if changes.get("trace") else {}
        return cls(model=model, **{**values, **recipe.engine, **eager, **changes})

    def environment(self) -> dict[str, str]:
        """Variables of the engine's processes: the caller's, without any that could reach in."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_PRIVATE) and name not in _DROPPED
        }
        threads = max(1, len(os.sched_getaffinity(0)) // self.tensor_parallel_size)
        own = {
            "PYTHONPATH": str(patching.tree_path("vllm", self.series)),
            "SAMEBITS_CONTRACT": str(Path(self.contract).resolve()),
            "SAMEBITS_PLATFORM": self.platform,
            "SAMEBITS_ARITHMETIC": self.arithmetic,
            "VLLM_PLUGINS": "samebits",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            # A forked process cannot use a GPU that its parent has asked about.
            "VLLM_WORKER_MULTIPROC_METHOD": "fork" if self.platform == "cpu" else "spawn",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOGGING_LEVEL": self.log_level,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.platform == "cpu":
            # Else vLLM takes a GPU that it sees. Empty, it would expect one to appear.
            own["CUDA_VISIBLE_DEVICES"] = "-1"
        if self.fault:
            own["SAMEBITS_FAULT"] = self.fault
        if self.trace:
            own["SAMEBITS_TRACE"] = str(self.trace)
        return kept | own


class RolloutEngine:
    """A running engine. Not thread-safe: one call at a time.

    Every method raises the `SamebitsError` that the engine raised, wherever it was raised, and
    Refused SB0512 when a process of the engine ended.
    """

    def __init__(self, settings: RolloutSettings, *, wait: bool = True) -> None:
        """Start the engine; without `wait` it goes on starting, and `ready` has to come before any
        other call."""
        self.settings = settings
        self._sizes: dict[str, Counter[str]] = {"generate": Counter(), "score": Counter()}
        self._log = tempfile.TemporaryFile("w+b", prefix="samebits-rollout-")  # noqa: SIM115
        segments.remove_stale(segments.ROLLOUT)  # of runs that were killed
        self._began, self._started = time.monotonic(), False
        self._say(f"starting vLLM ({settings.arithmetic}, {settings.tensor_parallel_size} rank(s))")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "samebits.engines.rollout_server", str(theirs.fileno())],
                env=settings.environment(),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # one group to end, and no Ctrl-C from the terminal
            )
        self._pipe = Connection(ours.detach())
        try:
            self._send("start", {**asdict(settings), "model": str(settings.model)})
            if wait:
                self.ready()
        except BaseException:
            self._end()
            raise

    def ready(self) -> None:
        """Wait until the engine has started."""
        self._answer(_START_SECONDS)
        self._started = True
        self._say(f"vLLM ready after {time.monotonic() - self._began:.1f} s")

    # --- calls ----------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample every request at temperature 1, all submitted at once, in the given order."""
        return self._counted("generate", list(requests))

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Score]:
        """Log-probabilities of given tokens, computed as prompts (the prefill path)."""
        return self._counted("score", [list(tokens) for tokens in sequences])

    def _counted(self, name: str, arguments: list[Any]) -> Any:
        """A call, and the sizes of the batches that it took."""
        before = Counter(self._hazards()["batch_sizes"])
        answer = self._call(name, arguments)
        self._sizes[name] += Counter(self._hazards()["batch_sizes"]) - before
        return answer

    def sync_weights(self, manifest: Manifest) -> dict[str, Any]:
        """Load a transfer of `weights.transport.send`, drop cached state, and check what is live.

        The engine verifies contract digest, step, names and checksums before it copies anything.
        Afterwards the checksums of the live parameters, summed over ranks, are compared with the
        manifest's (Refused SB0705), and the prefix cache is reset (Refused SB0515 when vLLM
        declines; Different SB0906 when blocks are cached afterwards), so that no completion after
        this reports cached tokens of older weights.
        Returns {tensors, checksums, dropped_blocks}: the last as of `reset_prefix_cache`.
        """
        counts = self._rpc("samebits_load_weights", manifest.to_json(), manifest.step)
        dropped = self.reset_prefix_cache()
        if kept := self.reset_prefix_cache():  # dropped by the second is what the first one left
            raise Different(
                "SB0906",
                seen=f"{kept} cached blocks after a reset that dropped {dropped}",
                required="0: cached state belongs to the old weights",
                hint="samebits explain SB0906",
            )
        live = self.weight_checksums()
        for name, expected in manifest.checksums().items():
            if live.get(name) != expected:
                raise Refused(
                    "SB0705",
                    seen=f"live `{name}` with checksum {bits.hex_digest(live.get(name, 0))}",
                    required=f"checksum {bits.hex_digest(expected)} (step {manifest.step})",
                    hint="samebits explain SB0705",
                )
        return {"tensors": counts[0], "checksums": live, "dropped_blocks": dropped}

    def reset_prefix_cache(self) -> int:
        """Forget every cached block; returns how many held a prefix (SB0515: vLLM declined)."""
        return self._call("reset_prefix_cache")

    def weight_checksums(self) -> dict[str, int]:
        """Logical tensor -> checksum of the live parameters, summed over ranks."""
        total: dict[str, int] = {}
        for part in self._rpc("samebits_weight_checksums"):
            for name, value in part.items():
                total[name] = bits.add_digests(total.get(name, 0), int(value, 16))
        return total

    def contract_digest(self) -> str:
        """Digest of the contract bytes that every rank loaded (Refused SB0514 when they differ)."""
        return self._same("samebits_contract_digest")

    def binding(self) -> dict[str, Any]:
        """Outcome of the known-answer probes at start, the same on every rank."""
        return self._same("samebits_binding")

    def semantics(self, outside: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Settings that decide what a log-probability means, as the running engine has them.

        outside   name -> changes to the settings of a sampled request; each is submitted
        Returns {logprobs_mode, tokenizer, vocabulary, refused: name -> error id, or None}.
        """
        return self._call("semantics", dict(outside))

    def served(self, reset: bool = False) -> dict[str, int]:
        """Rows that each region computed, on rank 0 (every rank computes every row)."""
        return self._rpc("samebits_served", reset)[0]

    def stats(self, reset: bool = False) -> dict[str, Any]:
        """Hazards that fired, counted from the scheduler's outputs (`hooks.vllm.hazards`).

        With them `batch_sizes_of`: the same batch sizes, for `generate` and `score` apart; and
        `ranks`: workers that computed rows of bound regions (none with stock arithmetic). SB0518
        where these are not as many as vLLM's tensor-parallel size.
        """
        served = self._rpc("samebits_served", False)
        ranks = sum(any(rows.values()) for rows in served)
        size = self._call("tensor_parallel_size")
        if ranks not in (0, size) or len(served) != size:
            raise Refused(
                "SB0518",
                seen=f"{ranks} of {len(served)} workers computed rows",
                required=f"{size}, vLLM's tensor-parallel size",
                hint="samebits explain SB0518",
            )
        sizes = {name: dict(found) for name, found in self._sizes.items()}
        report = self._hazards(reset)
        if reset:
            self._sizes = {name: Counter() for name in self._sizes}
        return {**report, "batch_sizes_of": sizes, "ranks": ranks}

    def _hazards(self, reset: bool = False) -> dict[str, Any]:
        return self._rpc("samebits_hazards", reset)[0]

    def row_digests(self, on: bool) -> dict[str, dict[int, int]]:
        """Switch digests of whole logit rows on or off; returns and clears what was recorded.

        Request id -> {index of the token that the row predicts -> 128-bit digest}.
        """
        rows = self._rpc("samebits_row_digests", on)[0]
        return {
            # Inside the engine core, vLLM adds a random suffix to the id of a request.
            internal.rpartition("-")[0]: {int(i): int(digest, 16) for i, digest in found.items()}
            for internal, found in rows.items()
        }

    def close(self) -> None:
        """Stop all processes of the engine; safe to call twice. One that starts is ended."""
        if self._started and self._process.poll() is None:
            with contextlib.suppress(OSError, EOFError):
                self._pipe.send(("stop",))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        self._end()

    def __enter__(self) -> RolloutEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- plumbing -------------------------------------------------------------------------------

    def _same(self, method: str) -> Any:
        found = self._rpc(method)
        if any(other != found[0] for other in found):
            raise Refused(
                "SB0514",
                seen=f"{method} gives {len({str(f) for f in found})} answers",
                required="one answer on every rank",
                hint="samebits explain SB0514",
            )
        return found[0]

    def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call every worker; returns one value per rank."""
        return self._call("rpc", method, arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        self._send(name, *arguments)
        return self._answer()

    def _send(self, name: str, *arguments: Any) -> None:
        try:
            self._pipe.send((name, *arguments))
        except OSError:
            raise self._ended() from None

    def _answer(self, limit: float | None = None) -> Any:
        """What the engine answers to the call before; `limit` in seconds."""
        try:
            if not self._pipe.poll(limit):
                raise EOFError
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if kind == "ok":
            return value
        if kind == "refused":
            raise wire.decode(value)
        raise wire.find(self._output()) or self._ended(value)

    def _output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _ended(self, problem: str = "") -> Exception:
        """Why the engine is gone: the error that a process of it reported, or its last lines."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        output = self._output()
        lines = [line for line in output.splitlines() if line.strip()][-_LOG_LINES:]
        status = self._process.poll()
        return wire.find(output) or Refused(
            "SB0512",
            seen="\n            ".join([problem.strip() or f"exit status {status}", *lines]),
            required="a running vLLM process",
            hint="samebits explain SB0512",
        )

    def _end(self) -> None:
        """End what is left of the process group that this engine started."""
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        segments.remove_stale(segments.ROLLOUT)  # killed ranks remove nothing themselves
        self._log.close()

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write(f"rollout: {text}\n")  # one call: two engines may start side by side
        sys.stderr.flush()
