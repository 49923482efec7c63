"""Ways to compute one sequence of a run, with every aligned call on its rows recorded.

An arm is named as the comparisons of the evidence need it:

    prefill, decode                rollout, the sequence alone
    prefill-tpN                    rollout on N ranks, alone
    prefill-batch, decode-batch    rollout, sixteen sequences in a step
    decode-mixed, decode-paged, decode-one-token
                                   rollout, the engines of legs A and B that split and preempt
    padded, packed, padded-tpN     trainer, alone
    padded-batch, packed-batch     trainer, all sequences in its micro-batches
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits import trace
from samebits.engines.rollout import RolloutEngine, RolloutSettings
from samebits.engines.trainer import Scores
from samebits.errors import SamebitsError
from samebits.gates import capsule, pages, stages, workload
from samebits.gates.run import Run
from samebits.gates.streams import Stream
from samebits.trace import Call, Columns, Operator, Scored


@dataclass(frozen=True)
class Arm:
    """One way to compute a sequence: its log-probabilities, its calls in order, the torch operators
    of the passes that held it, and the calls that made log-probabilities there."""

    stream: Stream
    calls: Sequence[Call]
    operators: Sequence[Operator] = ()
    scored: Sequence[Scored] = ()


@dataclass(frozen=True)
class Subject:
    """The sequence `number` of a run: tokens of its prompt and response, and its company.

    requests, whole   all requests of the run, and their sequences; none for one of the RL run
    """

    run: Run
    number: int
    tokens: Sequence[int]
    requests: Sequence[capsule.Request] = ()
    whole: Sequence[Sequence[int]] = ()

    @property
    def request(self) -> capsule.Request:
        """The request that the sequence answers."""
        return self.requests[self.number]

    def columns(self, *, trainer: bool) -> Columns:
        """How an engine of the run fuses its products."""
        return Columns(self.run.recipe.config, trainer=trainer)

    def decoded(self, request, completion) -> Stream:
        """Stream of the sequence, of a completion of its request."""
        return workload.decoded([request], [completion], base=self.number)

    def scored(self, score) -> Stream:
        """Stream of the sequence, of its score by the rollout."""
        return workload.scored([self.tokens], [score], base=self.number)

    def trained(self, scores: Scores, index: int = 0) -> Stream:
        """Stream of the sequence, of its score by the trainer: that of sequence `index`."""
        mine = Scores(scores.logprobs[index : index + 1], None)
        return workload.trained([self.tokens], mine, base=self.number)


class Recording:
    """A folder that an engine watches, and what was recorded in it at last."""

    def __init__(self, live: Path, columns: Columns) -> None:
        self.live, self._columns, self._count = live, columns, 0

    @contextlib.contextmanager
    def of(self, tokens: Sequence[int]) -> Iterator[None]:
        """Record `tokens` in this block; `arm` reads it afterwards."""
        trace.start(self.live, tokens)
        yield
        self._count += 1
        self.live.rename(self._kept())

    def arm(self, stream: Stream) -> Arm:
        """The arm that gave `stream`, from the latest recording."""
        kept = self._kept()
        calls = trace.load(kept, self._columns)
        return Arm(stream, calls, trace.load_operators(kept), trace.load_scored(kept))

    def _kept(self) -> Path:
        return self.live.with_name(f"{self.live.name}-{self._count}")


@contextlib.contextmanager
def _rollout(
    subject: Subject, settings: Callable[..., RolloutSettings]
) -> Iterator[tuple[RolloutEngine, Recording]]:
    """An engine with `settings(trace=..)`, and its recording."""
    with tempfile.TemporaryDirectory(prefix="samebits-trace-") as folder:
        recording = Recording(Path(folder) / "rollout", subject.columns(trainer=False))
        with RolloutEngine(settings(trace=recording.live)) as engine:
            yield engine, recording


def _settings(subject: Subject, **changes) -> Callable[..., RolloutSettings]:
    return lambda trace: RolloutSettings.of(
        subject.run.recipe, subject.run.model, trace=trace, **changes
    )


# --- rollout --------------------------------------------------------------------------------------


def _alone(subject: Subject) -> dict[str, Arm]:
    budget = max(len(subject.tokens), subject.run.recipe.engine["max_model_len"])
    settings = _settings(subject, prefix_caching=False, max_num_batched_tokens=budget)
    with _rollout(subject, settings) as (engine, recording):
        with recording.of(subject.tokens):
            (score,) = engine.score([subject.tokens])
        prefill = recording.arm(subject.scored(score))
        with recording.of(subject.tokens):
            (done,) = engine.generate(workload.to_engine([subject.request]))
        decode = recording.arm(subject.decoded(subject.request, done))
    return {"prefill": prefill, "decode": decode}


def _ranks(subject: Subject, tp: int) -> dict[str, Arm]:
    with _rollout(subject, _settings(subject, tensor_parallel_size=tp)) as (engine, recording):
        with recording.of(subject.tokens):
            (score,) = engine.score([subject.tokens])
        return {f"prefill-tp{tp}": recording.arm(subject.scored(score))}


def _batch(subject: Subject) -> dict[str, Arm]:
    number, requests = subject.number, subject.requests

    def settings(trace: Path) -> RolloutSettings:
        return stages.plain(subject.run, subject.whole, trace=trace)

    with _rollout(subject, settings) as (engine, recording):
        with recording.of(subject.tokens):
            scores = engine.score(subject.whole)
        found = {"prefill-batch": recording.arm(subject.scored(scores[number]))}
        if number < 16:
            with recording.of(subject.tokens):
                done = engine.generate(workload.to_engine(requests[:16]))
            stream = subject.decoded(subject.request, done[number])
            found["decode-batch"] = recording.arm(stream)
    return found


def _mixed(subject: Subject) -> dict[str, Arm]:
    settings = _settings(subject, **stages.stress(subject.run))
    return {"decode-mixed": _decoded(subject, settings, [range(len(subject.requests))])}


def _paged(subject: Subject) -> dict[str, Arm]:
    rest = range(1, len(subject.requests))
    settings = _settings(subject, **pages.paged(subject.run.recipe))
    return {"decode-paged": _decoded(subject, settings, [range(1), rest])}


def _one_token(subject: Subject) -> dict[str, Arm]:
    chosen, others, company = stages.one_token_company(subject.requests)
    settings = _settings(subject, **stages.ONE_TOKEN)
    arm = _decoded(subject, settings, [[chosen], others], company=company)
    return {"decode-one-token": arm}


def _decoded(
    subject: Subject,
    settings: Callable[..., RolloutSettings],
    batches: Sequence[Sequence[int]],
    company: Sequence[capsule.Request] = (),
) -> Arm:
    """Decode requests batch by batch; `company` goes before those of the first batch."""
    stream = Stream()
    with _rollout(subject, settings) as (engine, recording):
        with recording.of(subject.tokens):
            for batch in batches:
                requests = [*company, *(subject.requests[i] for i in batch)]
                done = engine.generate(workload.to_engine(requests))[len(company) :]
                company = ()
                if subject.number in batch:
                    index = list(batch).index(subject.number)
                    stream.extend(subject.decoded(subject.request, done[index]))
        return recording.arm(stream)


# --- trainer --------------------------------------------------------------------------------------


def _trainer(subject: Subject, tp: int = 1) -> dict[str, Arm]:
    suffix, alone = "" if tp == 1 else f"-tp{tp}", subject.tokens
    with _scoring(subject, tp) as score:
        found = {f"padded{suffix}": score([alone], 0, "padded")}
        if tp == 1:
            found["packed"] = score([alone], 0, "packed")
    return found


def _trainer_batch(subject: Subject) -> dict[str, Arm]:
    with _scoring(subject) as score:
        return {
            f"{layout}-batch": score(subject.whole, subject.number, layout)
            for layout in ("padded", "packed")
        }


@contextlib.contextmanager
def _scoring(subject: Subject, tp: int = 1) -> Iterator[Callable[..., Arm]]:
    """A trainer, as a function of sequences, which of them is the subject's, and a layout."""
    with tempfile.TemporaryDirectory(prefix="samebits-trace-") as folder:
        recording = Recording(Path(folder) / "trainer", subject.columns(trainer=True))
        with stages.trainer(subject.run, tp=tp, trace=recording.live) as process:

            def score(whole: Sequence[Sequence[int]], index: int, layout: str) -> Arm:
                with recording.of(subject.tokens):
                    scores = process.score(whole, layout=layout)
                return recording.arm(subject.trained(scores, index))

            yield score


# --- all ------------------------------------------------------------------------------------------

_MAKERS: Mapping[str, Callable[[Subject], dict[str, Arm]]] = {
    "prefill": _alone,
    "decode": _alone,
    "prefill-batch": _batch,
    "decode-batch": _batch,
    "decode-mixed": _mixed,
    "decode-paged": _paged,
    "decode-one-token": _one_token,
    "padded": _trainer,
    "packed": _trainer,
    "padded-batch": _trainer_batch,
    "packed-batch": _trainer_batch,
}
_OF_RANKS: Mapping[str, Callable[[Subject, int], dict[str, Arm]]] = {
    "prefill": _ranks,
    "padded": _trainer,
}


class Arms:
    """Arms of a subject by name, computed when they are asked for."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._found: dict[str, Arm | Exception] = {}

    def __getitem__(self, name: str) -> Arm:
        """The arm, or the error of its engine; ValueError where its calls cannot be read."""
        if name not in self._found:
            self._found |= self._computed(name)
        found = self._found[name]
        if isinstance(found, Exception):
            raise found
        return found

    def _computed(self, name: str) -> Mapping[str, Arm | Exception]:
        absent = ValueError(f"sequence {self.subject.number} is not part of {name}")
        try:
            if name in _MAKERS:
                return {name: absent, **_MAKERS[name](self.subject)}
            kind, ranks = name.split("-tp")
            return _OF_RANKS[kind](self.subject, int(ranks))
        except (SamebitsError, ValueError) as error:  # once is enough for all that ask
            return {name: error}
