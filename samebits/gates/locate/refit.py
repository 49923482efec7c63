"""Arms of a sequence of the RL run: the weights that it was sampled with are made again.

An aligned run repeats to the bit, so the steps before are run again, and both engines then hold the
weights of the step when the sequence is computed. First it is sampled as the run did, beside the
others and with whatever the run left in the prefix cache; then traced, with an empty one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from samebits.engines.rollout import RolloutEngine
from samebits.engines.rollout_wire import Request
from samebits.engines.trainer_process import TrainerProcess
from samebits.errors import Different, Refused
from samebits.gates import rl
from samebits.gates.locate.arms import Arm, Recording, Subject
from samebits.gates.run import Run
from samebits.gates.streams import FirstDifference, compare

AS_RUN = "decode-as-run"
STALE = "red in the run, equal with an empty cache: stale cached state (prefix cache after a refit)"


def stale(found: Mapping[str, Arm]) -> FirstDifference | None:
    """Where the sequence differs as the run sampled it, with tokens that its cache held."""
    if AS_RUN not in found:
        return None
    return compare(found[AS_RUN].stream, found["padded-batch"].stream).first


def arms(run: Run, sequence: int) -> tuple[Subject, dict[str, Arm]]:
    """decode and padded of the sequence alone, decode-batch and padded-batch beside the others; and
    the log-probabilities alone of decode-as-run, where the run's cache held tokens of it."""
    step, index = divmod(sequence, rl.STRIDE)
    if step < 1:
        raise _refused(run, sequence, "steps from 1")
    found: list[tuple[Subject, dict[str, Arm]]] = []
    with tempfile.TemporaryDirectory(prefix="samebits-trace-") as folder:
        live = Path(folder) / "rollout", Path(folder) / "trainer"

        def look(engine: RolloutEngine, trainer: TrainerProcess, requests: list[Request]) -> None:
            if index >= len(requests):
                raise _refused(run, sequence, f"{len(requests)} in step {step}")
            found.append(_arms(run, sequence, engine, trainer, requests, live))

        rl.run_rl(run, steps=step, arithmetic="aligned", look=rl.Look(*live, look))
    return found[0]


def _refused(run: Run, sequence: int, there: str) -> Refused:
    return Refused(
        "SB0911",
        seen=f"sequence {sequence}, and {there}",
        required=f"step * {rl.STRIDE} + sample, of the RL run",
        hint=f"samebits rl {run.recipe.case}",
    )


def _arms(
    run: Run,
    sequence: int,
    engine: RolloutEngine,
    trainer: TrainerProcess,
    requests: Sequence[Request],
    live: tuple[Path, Path],
) -> tuple[Subject, dict[str, Arm]]:
    index = sequence % rl.STRIDE
    request = requests[index]
    sampled = engine.generate(requests)
    whole = [[*r.prompt, *c.tokens] for r, c in zip(requests, sampled, strict=True)]
    subject = Subject(run, sequence, whole[index])
    rollout, scorer = (
        Recording(path, subject.columns(trainer=trains))
        for path, trains in zip(live, (False, True), strict=True)
    )
    found = {}
    if sampled[index].cached_tokens:
        found[AS_RUN] = Arm(subject.decoded(request, sampled[index]), ())
    for name, batch, place in (("decode", [request], 0), ("decode-batch", requests, index)):
        engine.reset_prefix_cache()  # what is cached would not be computed, and not recorded
        with rollout.of(subject.tokens):
            done = engine.generate(batch)[place]
        if name == "decode" and done.cached_tokens:  # alone it can have none but old ones
            raise Different(
                "SB0906",
                seen=f"{done.cached_tokens} cached tokens right after a reset of the prefix cache",
                required="0: cached state belongs to the old weights",
                hint="samebits explain SB0906",
            )
        found[name] = rollout.arm(subject.decoded(request, done))
    for name, sequences, place in (
        ("padded-batch", whole, index),
        ("padded", [subject.tokens], 0),
    ):
        with scorer.of(subject.tokens):
            scores = trainer.score(sequences, layout="padded")
        found[name] = scorer.arm(subject.trained(scores, place))
    return subject, found
