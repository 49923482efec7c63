"""What the legs of a proving run compare: records of evidence from finished stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from samebits import evidence, faults
from samebits.evidence import required, rows
from samebits.evidence.pairs import of_layouts
from samebits.evidence.verdict import diverged
from samebits.gates import fired, oracle, rl
from samebits.gates.run import Run, Stage
from samebits.gates.streams import Counts, Stream, compare
from samebits.recipe import Recipe


class _Book:
    """Collects comparison records; every one names the command that repeats it."""

    def __init__(self, run: Run):
        self.command = required.command(run.recipe.case, run.flag)
        self.records: list[dict[str, Any]] = []

    def add(self, leg: str, name: str, counts: Counts, **fields) -> None:
        values = counts.values
        self.records.append(
            evidence.comparison(
                leg,
                name,
                rows.of(leg, name).sentence,
                tokens=counts.tokens,
                mismatches=counts.mismatches,
                streams=(counts.left_digest, counts.right_digest),
                max_abs=None if values is None else values.max_abs,
                first=None if counts.first is None else asdict(counts.first),
                command=self.command,
                **fields,
            )
        )


def control_of(name: str, counts: Counts) -> dict[str, Any]:
    """Of whole rows, those with finite values: their digests do not say what they hold."""
    if counts.values is None:
        return evidence.control(name, counts.tokens, counts.finite)
    return evidence.control(name, counts.tokens, counts.mismatches, counts.values.max_abs)


def judge(run: Run, done: Mapping[str, Stage]):
    """Comparison, oracle and RL records of everything that ran."""
    legs = run.recipe.legs
    book = _Book(run)
    if not run.recipe.refits_only:
        _leg_a(book, done)
        (_leg_b if "rollout_paged" not in done else _leg_b_of_states)(book, done)
        _leg_c(book, done)
    if "D" in legs:
        _leg_d(book, run, done)
    rl_record = None
    if "rl_aligned" in done:
        _leg_e(book, done)
        rl_record = _rl_record(run, done)
    if "F" in legs:
        _leg_f(book, run, done)
    oracles = [_leg_o(book, run, done)] if "O" in legs else []
    return book.records, oracles, rl_record


def _self_control(done: Mapping[str, Stage], left: str, right: str) -> dict[str, Any]:
    """Stock against itself, or the planted fault where stock happens to agree with itself."""
    streams = done["stock_rollout"].streams
    stock = control_of("stock", compare(streams[left], streams[right]))
    if diverged(stock) or "planted_rollout" not in done:
        return stock
    planted = done["planted_rollout"].streams
    return control_of("k_cut_by_rows", compare(planted[left], planted[right]))


def _leg_a(book: _Book, done: Mapping[str, Stage]) -> None:
    plain, stress = done["rollout_plain"], done["rollout_stress"]
    hazards = fired.batched(plain, stress)
    pair = "prefill-alone/prefill-batch"
    book.add(
        "A",
        pair,
        compare(plain.streams["alone"], plain.streams["batch"]),
        hazards=hazards[pair],
        control=_self_control(done, "alone", "batch"),
    )
    mixed = stress.streams["decode"]
    for arm in ("alone", "batch"):
        pair = f"decode-{arm}/decode-mixed"
        counts = compare(plain.streams[f"decode_{arm}"], mixed, sampled=True)
        book.add("A", pair, counts, hazards=hazards[pair])


def _leg_b(book: _Book, done: Mapping[str, Stage]) -> None:
    name = fired.ROWS["rollout_stress"]
    book.add(
        "B",
        name,
        compare(done["rollout_stress"].streams["decode"], done["rollout_plain"].streams["batch"]),
        hazards=fired.decoded(name, done["rollout_stress"]),
        control=_self_control(done, "decode", "batch"),
    )


def _leg_b_of_states(book: _Book, done: Mapping[str, Stage]) -> None:
    """Three engines decode the same requests along paths that share as little as possible."""
    prefill = done["rollout_plain"].streams["batch"]
    sliced = done["rollout_stress"].streams["decode"]
    paged = done["rollout_paged"].streams["decode"]
    in_slices, in_pages = (fired.ROWS_OF_STATES[n] for n in ("rollout_stress", "rollout_paged"))
    book.add(
        "B",
        in_slices,
        compare(sliced, prefill),
        hazards=fired.decoded(in_slices, done["rollout_stress"]),
        control=_self_control(done, "decode", "batch"),
    )
    book.add(
        "B",
        in_pages,
        compare(paged, prefill, sampled=True),
        hazards=fired.decoded(in_pages, done["rollout_paged"]),
    )
    book.add(
        "B",
        "decode-one-token-slices/prefill",
        compare(done["rollout_slices"].streams["decode"], prefill, sampled=True),
        hazards={"one_token_slice": done["rollout_slices"].facts["one_token_slices"]},
    )
    book.add(
        "B",
        "decode-sliced/decode-paged",
        compare(sliced, paged, sampled=True),
    )


def _leg_c(book: _Book, done: Mapping[str, Stage]) -> None:
    prefill, trainer = done["rollout_plain"].streams["batch"], done["trainer"].streams
    count = len(done["rollout_stress"].facts["sequences"])
    stock = compare(done["stock_trainer"].streams["padded"], done["stock_rollout"].streams["batch"])
    controls = {"padded": control_of("stock", stock)}
    if "planted_schedule" in done:
        other = done["planted_schedule"].streams["padded"]
        controls["packed"] = control_of(
            "other_gdn_schedule", compare(other, done["rollout_plain"].streams["extra"])
        )
    for layout in ("padded", "packed"):
        book.add(
            "C",
            f"trainer-{layout}/prefill",
            compare(trainer[layout], prefill),
            hazards={layout: count},
            control=controls.get(layout),
        )


def _layout(done: Mapping[str, Stage], side: str, tp: int) -> Stream:
    """Score of the main sequences by one layout; one rank is what the other legs ran."""
    if tp == 1:
        return {
            "rollout": done["rollout_plain"].streams["batch"],
            "trainer": done["trainer"].streams["padded"],
        }[side]
    return done[f"{side}_tp{tp}"].streams[{"rollout": "score", "trainer": "padded"}[side]]


def _ranks(done: Mapping[str, Stage], side: str, tp: int) -> int:
    """Ranks that really computed what `_layout` returns, as the engine counted them."""
    if side == "trainer":
        return done["trainer" if tp == 1 else f"trainer_tp{tp}"].facts["info"]["ranks"]
    if tp == 1:
        return done["rollout_plain"].facts["batch_hazards"]["ranks"]
    return done[f"rollout_tp{tp}"].facts["hazards"]["ranks"]


def _leg_d(book: _Book, run: Run, done: Mapping[str, Stage]) -> None:
    largest = max(run.recipe.trainer_tp)
    planted = compare(done["planted_ranks"].streams["padded"], _layout(done, "rollout", 1))
    for trainer_tp in run.recipe.trainer_tp:
        for rollout_tp in run.recipe.rollout_tp:
            last = (trainer_tp, rollout_tp) == (largest, 1)
            trained, rolled = (
                _ranks(done, "trainer", trainer_tp),
                _ranks(done, "rollout", rollout_tp),
            )
            layouts = (f"tp{trained}", f"tp{rolled}")
            book.add(
                "D",
                of_layouts(*layouts),
                compare(_layout(done, "trainer", trainer_tp), _layout(done, "rollout", rollout_tp)),
                layouts=layouts,
                hazards={"trainer_tp2": int(trained == 2), "rollout_tp2": int(rolled == 2)},
                control=control_of("rank_order_sum", planted) if last else None,
            )


def _leg_e(book: _Book, done: Mapping[str, Stage]) -> None:
    book.add(
        "E",
        "rollout/trainer-after-refits",
        rl.as_counts(done["rl_aligned"]),
        hazards=fired.refitted(done["rl_aligned"]),
        control=control_of("stock", rl.as_counts(done["rl_stock"])),
    )


def _leg_f(book: _Book, run: Run, done: Mapping[str, Stage]) -> None:
    trainer, stock = done["trainer"].streams, done["stock_trainer"].streams["padded"]
    # A digest names its columns, so equal ones cover on both sides what the trainer counted.
    counted = done["trainer"].facts["info"]["digest_columns"]
    columns = {"whole_row": counted if counted == run.recipe.config["vocab_size"] else 0}
    control = control_of("stock", compare(stock, done["stock_rollout"].streams["batch"], "row"))
    for name, left, layout in (
        ("decode-rows/trainer-rows", done["rollout_stress"].streams["decode"], "padded"),
        ("prefill-rows/packed-trainer-rows", done["rollout_plain"].streams["batch"], "packed"),
    ):
        book.add(
            "F",
            name,
            compare(left, trainer[layout], "row"),
            hazards=columns,
            control=control,
        )


def oracle_fault(recipe: Recipe) -> str:
    """The planted fault of leg O: the one that the recipe names, or else another rotary base."""
    named = recipe.legs["O"].control
    return named if named in faults.PLANTED else "rope_base_doubled"


def _leg_o(book: _Book, run: Run, done: Mapping[str, Stage]) -> dict[str, Any]:
    reference = done["oracle"].streams["oracle"]
    tokens, *aligned = oracle.distance(done["rollout_plain"].streams["extra"], reference)
    _, *stock = oracle.distance(done["stock_rollout"].streams["batch"], reference)
    planted, mean, _ = oracle.distance(done["planted_oracle"].streams["padded"], reference)
    name = "prefill/fp32-hugging-face"
    return evidence.oracle(
        name,
        rows.of("O", name).sentence,
        tokens=tokens,
        aligned=(aligned[0], aligned[1]),
        stock=(stock[0], stock[1]),
        control=(oracle_fault(run.recipe), planted, mean),
        command=book.command,
    )


def _rl_record(run: Run, done: Mapping[str, Stage]) -> dict[str, Any]:
    arms = {}
    for arm in ("aligned", "stock"):
        arms[arm] = [
            evidence.rl_step(step["step"], step, step["reward"])
            for step in done[f"rl_{arm}"].facts["steps"]
        ]
    return evidence.rl(arms["aligned"], arms["stock"], required.rl_command(run.recipe.case))
