"""Descend from a differing log-probability to the first layer, region and element that differ.

One sequence is computed alone by four arms, with every aligned call recorded: the rollout's decode
and prefill, the trainer's padded and packed score. Pairs of arms are then compared call by call.

Hybrid models are compared token by token only: the trainer's layers project q, k, v, gate and decay
at once, the rollout's in parts, so that the calls of the two do not correspond.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from samebits import files, trace
from samebits.engines.rollout import RolloutEngine, RolloutSettings
from samebits.errors import Refused, SamebitsError
from samebits.evidence import DifferenceReport, Side
from samebits.gates import capsule, rl, stages, workload
from samebits.gates.run import Run, say
from samebits.gates.streams import FirstDifference, Stream, compare
from samebits.trace import Call, RegionDifference

WHO = {
    "decode": "rollout, decode",
    "prefill": "rollout, prefill",
    "padded": "trainer, padded",
    "packed": "trainer, packed",
}
# Pairs of arms that hold the claim of a case together.
PAIRS = (("decode", "prefill"), ("padded", "prefill"), ("packed", "prefill"), ("decode", "padded"))
# Comparison of the evidence -> the arms behind it. Others need a batch, ranks or trained weights.
_ARMS = {
    ("B", "decode/prefill"): ("decode", "prefill"),
    ("B", "decode-sliced/prefill"): ("decode", "prefill"),
    ("B", "decode-paged/prefill"): ("decode", "prefill"),
    ("B", "decode-one-token-slices/prefill"): ("decode", "prefill"),
    ("C", "trainer-padded/prefill"): ("padded", "prefill"),
    ("C", "trainer-packed/prefill"): ("packed", "prefill"),
    ("D", "trainer-tp1/rollout-tp1"): ("padded", "prefill"),
    ("F", "decode-rows/trainer-rows"): ("decode", "padded"),
    ("F", "prefill-rows/packed-trainer-rows"): ("prefill", "packed"),
}
_UNTRACED = {
    "A": "not traced: both sides are one engine, and differ by what else is in the batch",
    "B": "not traced: both sides decode, and differ by how the prompt was cut",
    "D": "not traced: ranks hold shards, which have no counterpart on one rank",
    "E": "not traced: the weights of that step are gone",
}
FUSED = (
    "located to the token: recurrent projections are fused differently in the two engines "
    "and are not traced yet"
)


@dataclass(frozen=True)
class Arm:
    """One way to compute a sequence: its log-probabilities, and its calls in order, None where
    they are not traced."""

    stream: Stream
    calls: Sequence[Call] | None


def _traced(run: Run) -> bool:
    return run.recipe.gdn_schedule is None


@contextlib.contextmanager
def _recording(live: Path, kept: Path) -> Iterator[None]:
    """Record in this block: `live` is the folder that the engine watches."""
    live.mkdir()
    yield
    os.replace(live, kept)


def arms(
    run: Run,
    request: capsule.Request,
    tokens: Sequence[int],
    *,
    sequence: int = 0,
    rollout_fault: str | None = None,
    trainer_fault: str | None = None,
) -> dict[str, Arm]:
    """Compute `tokens` (prompt and response of `request`) alone in all arms. Faults: for tests."""
    with tempfile.TemporaryDirectory(prefix="samebits-trace-") as folder:
        root = Path(folder)
        rollout = _rollout(run, root, request, tokens, sequence, rollout_fault)
        return rollout | _trainer(run, root, tokens, sequence, trainer_fault)


def _rollout(run, root: Path, request, tokens, sequence: int, fault) -> dict[str, Arm]:
    live = root / "rollout"
    budget = max(len(tokens), run.recipe.engine["max_model_len"])
    settings = RolloutSettings.of(
        run.recipe,
        run.model,
        prefix_caching=False,
        max_num_batched_tokens=budget,
        fault=fault,
        trace=live if _traced(run) else None,
    )
    with RolloutEngine(settings) as engine:
        with _recording(live, root / "prefill"):
            scores = engine.score([tokens])
        with _recording(live, root / "decode"):
            done = engine.generate(workload.to_engine([request]))
    prefill = decode = None
    if _traced(run):
        # The row of the last token is computed too when a prompt is scored: it predicts a new one.
        prefill = trace.load(root / "prefill", len(tokens), skip_logits=1)
        length = len(request.prompt)
        rows = length + len(done[0].tokens) - 1
        decode = trace.load(root / "decode", rows, first_logits=length - 1)
    return {
        "prefill": Arm(workload.scored([tokens], scores, base=sequence), prefill),
        "decode": Arm(workload.decoded([request], done, base=sequence), decode),
    }


def _trainer(run, root: Path, tokens, sequence: int, fault) -> dict[str, Arm]:
    live, found = root / "trainer", {}
    with stages.trainer(run, fault=fault, trace=live if _traced(run) else None) as process:
        for layout in ("padded", "packed"):
            with _recording(live, root / layout):
                scores = process.score([tokens], layout=layout)
            calls = None
            if _traced(run):
                calls = trace.load(root / layout, len(tokens), qkv=_qkv_order(run.recipe.config))
            found[layout] = Arm(workload.trained([tokens], scores, base=sequence), calls)
    return found


def _qkv_order(config: Mapping) -> np.ndarray:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return trace.qkv_order(heads, kv_heads, size)


@dataclass(frozen=True)
class Located:
    """Outcome for one pair of arms; both fields are None where all was equal."""

    first: FirstDifference | None
    region: RegionDifference | None
    note: str | None = None


def pair(found: Mapping[str, Arm], left: str, right: str, position: int | None = None) -> Located:
    """Compare two arms. Rows up to the one that predicts `position` (default: the first token
    that differs, or the end) are looked at; a response that alone came out otherwise ends them."""
    a, b = found[left], found[right]
    other = _other_token(a.stream, b.stream)
    if other is not None:
        a, b = (Arm(_before(arm.stream, other), arm.calls) for arm in (a, b))
    first = compare(a.stream, b.stream).first
    if a.calls is None or b.calls is None:
        return Located(first, None, FUSED if first else None)
    limit = position or (first.position if first else None)
    if other is not None:
        limit = min(other, limit or other)
    try:
        region = trace.first_difference(a.calls, b.calls, limit)
    except ValueError as error:
        return Located(first, None, f"not traced: {error}")
    return Located(first, region)


def _other_token(a: Stream, b: Stream) -> int | None:
    """First position at which the arms hold different tokens (a sampled response may change)."""
    left, right = a.columns(), b.columns()
    _, i, j = np.intersect1d(left["position"], right["position"], return_indices=True)
    wrong = np.flatnonzero(left["token"][i] != right["token"][j])
    return int(left["position"][i][wrong[0]]) if wrong.size else None


def _before(stream: Stream, position: int) -> Stream:
    columns = stream.columns()
    keep = columns["position"] < position
    return Stream({name: column[keep] for name, column in columns.items()})


# --- reports --------------------------------------------------------------------------------------


def command(run: Run, sequence: int) -> str:
    """The command that computes `sequence` alone, traced."""
    return f"samebits prove {run.recipe.case}{run.flag} --locate {sequence}"


def _with_region(report: dict, located: Located, left: str, right: str) -> DifferenceReport:
    region = located.region
    if region is None:
        if located.note or located.first is None:
            note = located.note or "alone, both sides agree: the difference needs its batch"
        else:
            # Every traced output up to the logits has one bit pattern; the last step does not.
            return DifferenceReport(**report, region="logprob")
        return DifferenceReport(**report, note=note)
    return DifferenceReport(
        **report,
        layer=region.layer,
        region=region.region,
        element=region.element,
        element_left=Side(WHO[left], region.left),
        element_right=Side(WHO[right], region.right),
        differing=region.differing,
        elements=region.elements,
        operands=region.operands,
    )


def sequence_alone(run: Run, sequence: int) -> list[DifferenceReport]:
    """`samebits prove CASE --locate SEQUENCE`: one report for each pair of arms that differs."""
    request, tokens = _request(run, sequence)
    found = arms(run, request, tokens, sequence=sequence)
    reports = []
    for left, right in PAIRS:
        located = pair(found, left, right)
        first, region = located.first, located.region
        if first is None and region is None and located.note is None:
            continue
        if first is None:  # a difference inside that no log-probability shows
            position = (region.element[0] if region else 0) + 1
            first = FirstDifference(sequence, position, tokens[position], "-", "-")
        report = {
            "leg": "locate",
            "comparison": f"{left}/{right}",
            "sequence": sequence,
            "position": first.position,
            "token": first.token,
            "left": Side(WHO[left], first.left),
            "right": Side(WHO[right], first.right),
            "command": command(run, sequence),
        }
        reports.append(_with_region(report, located, left, right))
    return reports


def _request(run: Run, sequence: int) -> tuple[capsule.Request, list[int]]:
    stress, requests = run.folder / "rollout_stress.json", run.folder / "capsule.json"
    count = 0
    if stress.exists() and requests.exists():
        whole = json.loads(stress.read_text())["sequences"]
        count = len(whole)
        if 0 <= sequence < count:
            return capsule.read(requests)[sequence], whole[sequence]
    raise Refused(
        "SB0911",
        seen=f"sequence {sequence}, and {count} sequences of this state of the sources",
        required=f"one of 0 to {count - 1}" if count else "a run that decoded its sequences",
        hint=f"samebits prove {run.recipe.case}{run.flag}",
    )


def reports(run: Run, comparisons: Sequence[Mapping]) -> list[DifferenceReport]:
    """One report for each comparison with a mismatch; a sequence is traced once for all of them."""
    traced: dict[int, dict[str, Arm] | str] = {}
    found = []
    for record in comparisons:
        first = record["first_difference"]
        if first is None:
            continue
        leg, name, sequence = record["leg"], record["name"], first["sequence"]
        left_name, _, right_name = name.partition("/")
        report = {
            "leg": leg,
            "comparison": name,
            **{key: first[key] for key in ("sequence", "position", "token")},
            "left": Side(left_name, first["left"]),
            "right": Side(right_name, first["right"]),
            "command": command(run, sequence),
        }
        names = _ARMS.get((leg, name))
        if leg == "E":
            report |= {
                "step": sequence // rl.STRIDE,
                "command": f"samebits rl {run.recipe.case} --steps {sequence // rl.STRIDE}",
            }
        if names is None:
            found.append(DifferenceReport(**report, note=_UNTRACED.get(leg)))
            continue
        if not _traced(run):
            found.append(DifferenceReport(**report, note=FUSED))
            continue
        if sequence not in traced:
            traced[sequence] = _try(run, sequence)
        arm = traced[sequence]
        if isinstance(arm, str):
            found.append(DifferenceReport(**report, note=arm))
        else:
            found.append(
                _with_region(report, pair(arm, *names, position=first["position"]), *names)
            )
    return found


def _try(run: Run, sequence: int) -> dict[str, Arm] | str:
    """Arms of a sequence; what kept them from being computed must not hide the difference."""
    say(f"sequence {sequence} differs: computing it alone, traced")
    try:
        return arms(run, *_request(run, sequence), sequence=sequence)
    except SamebitsError as error:
        return f"not traced: {error.error_id}, {error.seen}"
    except ValueError as error:
        return f"not traced: {error}"


def write(found: Sequence[DifferenceReport], path: Path) -> None:
    """Write the reports as JSON beside the evidence; without any, an older file is removed."""
    if not found:
        path.unlink(missing_ok=True)
        return
    text = json.dumps([asdict(report) for report in found], indent=1) + "\n"
    files.write_atomic(path, text.encode())
