"""Evidence whose integrity digest is true and whose verdict follows, and which no run writes."""

import copy
import datetime

import pytest
from test_verdict import step

from samebits import evidence
from samebits import recipe as recipes
from samebits.contract import Contract, canonical
from samebits.contract.build import seal as seal_contract
from samebits.errors import Refused
from samebits.evidence import rows, verdict
from samebits.evidence.statement import Statement, integrity, seal


def reseal(data) -> bytes:
    """Bytes of an edited statement with the verdict that follows from it, and a true digest."""
    predicate = data["predicate"]
    predicate["verdict"] = verdict.judge(predicate).verdict
    predicate["integrity"] = integrity(data)
    return canonical.encode(data)


@pytest.fixture
def refusal(good, recipe):
    """Edits a good statement, reseals it, and returns the id and text that `verify` answers."""

    def attempt(edit) -> str:
        data = copy.deepcopy(good.data)
        edit(data)
        path = recipe.folder / "resealed.json"
        path.write_bytes(reseal(data))
        with pytest.raises(Refused) as error:
            evidence.verify(path)
        assert error.value.exit_code == 2
        return f"{error.value.error_id} {error.value.seen}"

    return attempt


def test_an_untouched_statement_is_equal(good, recipe):
    path = recipe.folder / "resealed.json"
    path.write_bytes(reseal(copy.deepcopy(good.data)))
    assert evidence.verify(path).status == "EQUAL"


# What the gates demand.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs_mode", "processed_logprobs"),
        ("sampling", "temperature 0.7"),
        ("sampling_refused", "greedy"),
        ("vocabulary", "1023"),
        ("token_ids", None),
        ("compile", "default"),
        ("distinct_prompt_seed_pairs", "0"),
        ("distinct_prompt_seed_pairs", "3"),
        ("distinct_prompt_seed_pairs", None),
    ],
)
def test_other_semantics_are_refused(refusal, name, value):
    def edit(data):
        switches = data["predicate"]["parameters"]["switches"]
        switches.pop(name, None)
        if value is not None:
            switches[name] = value

    assert refusal(edit).startswith("SB0813")


def test_no_switches_are_refused(refusal):
    assert refusal(lambda d: d["predicate"]["parameters"].update(switches={})).startswith("SB0813")


def test_pairs_are_as_many_as_sequences(refusal):
    def edit(data):
        predicate = data["predicate"]
        predicate["parameters"]["switches"]["distinct_prompt_seed_pairs"] = "0"
        for record in predicate["comparisons"]:
            for layout in ("padded", "packed"):
                record["hazards"].pop(layout, None)

    assert refusal(edit).startswith("SB0813 0 distinct pairs")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"torch": "1.0.0"}, "SB0813 torch 1.0.0"),
        ({"numba": "0.1"}, "SB0813"),
        ({"kind": "cuda"}, "SB0813 chip of cuda"),
        ({"SAMEBITS_ARITHMETIC": "stock"}, "SB0813 platform described by SAMEBITS_ARITHMETIC"),
        ({"isa": ""}, "SB0801"),
        ({"isa": None}, "SB0801"),
    ],
)
def test_other_packages_than_an_admitted_platform_has_are_refused(refusal, changes, error):
    def edit(data):
        intent = data["predicate"]["environment"]["intent"]
        intent.update(changes)
        for name in [name for name, value in intent.items() if value is None]:
            del intent[name]

    assert refusal(edit).startswith(error)


def test_no_packages_are_refused(refusal):
    def edit(data):
        data["predicate"]["environment"]["intent"] = {}

    assert refusal(edit).startswith("SB0801")


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p["limits"].pop(0),
        lambda p: p["limits"].append("Everything else is fine."),
        lambda p: p["claim"].update(not_covered=[]),
        lambda p: p["comparisons"][0].update(command="rm -r somewhere"),
        lambda p: p["comparisons"][0].update(sentence="Also proved on CUDA with FP8."),
        lambda p: p["comparisons"][-1].update(sentence="The trainer on 8 rank(s) equals all."),
        lambda p: p["sources"][-1].update(modules=["os"]),
        lambda p: p["parameters"].update(seeds={}),
        lambda p: p["parameters"]["seeds"].update(capsule=12),
        lambda p: p["parameters"]["seeds"].update(rl=1),
        lambda p: p.update(supersedes={"statement": "0" * 64, "reason": "NVIDIA asked for it"}),
        lambda p: p.update(byproducts=[{"uri": "x", "digest": {"sha256": "0" * 64}, "size": 1}]),
        lambda p: p.update(repeats=[{"run": "x", "streams": verdict.streams_digest(p)}]),
        lambda p: p.update(
            reproductions=[{"operator": "NVIDIA", "statement": "0" * 64, "verdict": "EQUAL"}]
        ),
        lambda p: p["comparisons"][0].update(command="samebits prove qwen3-tiny --quick"),
    ],
)
def test_other_words_are_refused(refusal, edit):
    assert refusal(lambda data: edit(data["predicate"])).startswith("SB0813")


def test_a_leg_that_the_recipe_does_not_ask_for_is_refused(refusal, make_row, recipe):
    def edit(data):
        row = make_row("A", "decode-rows/trainer-rows", recipe)
        row |= {"leg": "F", "max_abs": None, "compared": "row"}
        row["control"]["max_abs"] = None
        more = row | {"name": "prefill-rows/packed-trainer-rows"}
        data["predicate"]["comparisons"] += [row, more]

    assert refusal(edit).startswith("SB0813 leg F")


def test_another_contract_file_is_refused(refusal):
    def edit(data):
        data["predicate"]["parameters"]["contract"]["digest"] = "0" * 64

    assert refusal(edit).startswith("SB0814")


def test_the_contract_may_name_the_evidence_afterwards(good, recipe):
    evidence.write(good, recipe.evidence_path)
    data = copy.deepcopy(dict(Contract.load(recipe.contract_path).data))
    for claim in data["claims"]["topology"].values():
        claim["evidence"] = good.digest
    recipe.contract_path.write_bytes(seal_contract(data).raw)
    assert evidence.verify(recipe.folder).status == "EQUAL"


# What each row holds.


def row_of(data, name):
    """The comparison of that name."""
    (found,) = (r for r in data["predicate"]["comparisons"] if r["name"] == name)
    return found


STOCK = evidence.control("stock", 100, 90, 0.05)


@pytest.mark.parametrize(
    ("name", "control"),
    [
        ("trainer-tp2/rollout-tp1", STOCK),
        ("trainer-tp2/rollout-tp2", STOCK),
        ("trainer-packed/prefill", STOCK),
        ("decode-alone/decode-mixed", evidence.control("k_cut_by_rows", 100, 90, 0.05)),
    ],
)
def test_a_row_holds_the_control_that_a_run_writes_there(refusal, name, control):
    def edit(data):
        row_of(data, name)["control"] = control

    assert f"{name}: control {control['name']} instead of" in refusal(edit)


def test_legs_a_and_b_hold_stock_or_the_planted_fault(good, recipe, refusal):
    planted = evidence.control("k_cut_by_rows", 100, 90, 0.05)
    data = copy.deepcopy(good.data)
    row_of(data, "decode/prefill")["control"] = planted
    path = recipe.folder / "resealed.json"
    path.write_bytes(reseal(data))
    assert evidence.verify(path).status == "EQUAL"
    seen = refusal(lambda d: row_of(d, "trainer-padded/prefill").update(control=planted))
    assert "control k_cut_by_rows instead of stock" in seen


@pytest.fixture
def states():
    """Recorded predicate of a model with states, to edit, and its recipe."""
    recipe = recipes.load("qwen3.5-tiny")
    return copy.deepcopy(Statement.load(recipe.evidence_path).data), recipe


@pytest.mark.parametrize(
    ("name", "control"),
    [
        ("trainer-packed/prefill", None),
        ("trainer-packed/prefill", STOCK),
        ("trainer-padded/prefill", None),
        ("trainer-padded/prefill", evidence.control("other_gdn_schedule", 100, 90, 0.05)),
        ("decode-paged/prefill", STOCK),
    ],
)
def test_rows_of_a_model_with_states_hold_their_controls(states, name, control):
    data, recipe = states
    assert list(rows.problems(data["predicate"], recipe)) == []
    row_of(data, name)["control"] = control
    (problem, *_) = rows.problems(data["predicate"], recipe)
    assert f"{name}: control" in problem


def test_leg_o_holds_the_fault_that_its_recipe_names(states):
    data, recipe = states
    data["predicate"]["oracle"][0]["control"]["name"] = "rope_base_doubled"
    (problem, *_) = rows.problems(data["predicate"], recipe)
    assert "control rope_base_doubled instead of gdn_decay_doubled" in problem


@pytest.mark.parametrize(
    ("name", "hazards"),
    [
        ("prefill-alone/prefill-batch", {"cuda_graph": 5}),
        ("decode-batch/decode-mixed", {"batch_1": 5}),
        ("decode/prefill", {"batch_1": 5}),
        ("trainer-tp1/rollout-tp1", {"trainer_tp2": 1}),
        ("trainer-tp2/rollout-tp1", {"trainer_tp2": 0}),
        ("trainer-tp1/rollout-tp2", {"rollout_tp2": 2}),
    ],
)
def test_hazards_are_counted_where_they_happen(refusal, name, hazards):
    assert f"{name}: " in refusal(lambda d: row_of(d, name)["hazards"].update(hazards))


def test_hazards_of_states_are_counted_where_they_happen(states):
    data, recipe = states
    fired = row_of(data, "decode-one-token-slices/prefill")["hazards"]
    row_of(data, "decode-sliced/decode-paged")["hazards"] = dict(fired)
    fired.clear()
    found = list(rows.problems(data["predicate"], recipe))
    assert len(found) == 2 and all("one_token_slice" in problem for problem in found)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("prefill-alone/prefill-batch", 10**15),
        ("decode-alone/decode-mixed", 10**15),
        ("decode/prefill", 801),
        ("trainer-padded/prefill", 799),
        ("trainer-packed/prefill", 35_593),
        ("trainer-tp2/rollout-tp2", 799),
    ],
)
def test_rows_that_share_streams_count_alike(refusal, name, tokens):
    assert "SB0813" in refusal(lambda d: row_of(d, name).update(tokens=tokens))


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("trainer-padded/prefill", 99),
        ("prefill-alone/prefill-batch", 101),
        ("trainer-tp2/rollout-tp1", 100),
    ],
)
def test_controls_that_share_streams_count_alike(refusal, name, tokens):
    assert "SB0813" in refusal(lambda d: row_of(d, name)["control"].update(tokens=tokens))


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("decode-paged/prefill", 6719),
        ("decode-sliced/decode-paged", 6719),
        ("decode-one-token-slices/prefill", 6721),
        ("decode-rows/trainer-rows", 6719),
        ("prefill-rows/packed-trainer-rows", 17_796),
    ],
)
def test_rows_of_states_that_share_streams_count_alike(states, name, tokens):
    data, recipe = states
    row_of(data, name)["tokens"] = tokens
    (problem, *_) = rows.problems(data["predicate"], recipe)
    assert f"{name}: {tokens} tokens" in problem


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("trainer-packed/prefill", "trainer-padded/prefill"),
        ("trainer-tp2/rollout-tp2", "trainer-padded/prefill"),
        ("decode-paged/prefill", "decode-sliced/prefill"),
        ("decode-sliced/decode-paged", "decode-sliced/prefill"),
    ],
)
def test_equal_rows_over_the_same_tokens_hold_the_same_streams(states, name, whole):
    data, recipe = states
    for stream in row_of(data, name)["streams"]:
        stream["left"] = stream["right"] = "e" * 64
    assert list(rows.problems(data["predicate"], recipe)) == [
        f"{name}: other streams than {whole}, over the same tokens"
    ]


def test_leg_o_counts_as_the_controls_do(states):
    data, recipe = states
    data["predicate"]["oracle"][0]["tokens"] = 10**15
    (problem, *_) = rows.problems(data["predicate"], recipe)
    assert "leg O: 1000000000000000 tokens" in problem


def test_a_row_of_few_tokens_is_not_observed(good):
    for record in good.predicate["comparisons"]:
        data = copy.deepcopy(good.data)
        row_of(data, record["name"])["tokens"] = 31
        assert Statement.parse(reseal(data), "short").verdict == "NOT_OBSERVED"
        (reason, *_) = verdict.judge(data["predicate"]).reasons
        assert "31 tokens of the 32 that a row needs" in reason


# Contradictions inside one file.


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (lambda c: c.update(tokens=2**53 + 1), "SB0801"),
        (lambda c: c.update(tokens=-1), "SB0801"),
        (lambda c: c.update(max_abs=evidence.number(-0.0)), "SB0804"),
        (lambda c: c.update(name="trainer-tp1/rollout-tp1", leg="D"), "SB0804"),
        (lambda c: c.update(layouts={"left": "tp2", "right": "tp1"}), "SB0804"),
        (lambda c: c.update(max_abs=None, compared="row"), "SB0804"),
        (lambda c: c["control"].update(max_abs=evidence.number(-0.5)), "SB0804"),
    ],
)
def test_impossible_comparisons_are_refused(refusal, edit, error):
    assert refusal(lambda data: edit(data["predicate"]["comparisons"][0])).startswith(error)


@pytest.mark.parametrize("name", ["tree/torch", "wheel/torch", "implementation/more.cpu.1"])
def test_more_subjects_than_a_run_has_are_refused(refusal, name):
    def edit(data):
        kind = {"gitTree": "1" * 40} if name.startswith("tree/") else {"sha256": "1" * 64}
        data["subject"].append({"name": name, "digest": kind})

    assert refusal(edit).startswith("SB0804")


def test_a_run_of_the_future_is_refused(refusal, good, recipe):
    def finished(days):
        moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)

        def edit(data):
            text = moment.isoformat(timespec="seconds")
            data["predicate"]["environment"]["happenstance"]["finished"] = text

        return edit

    assert "still to come" in refusal(finished(2))
    data = copy.deepcopy(good.data)
    finished(0.5)(data)
    assert Statement.parse(reseal(data), "a clock that is fast").verdict == "EQUAL"


def test_a_comparison_that_is_left_out_is_not_equal(good, recipe):
    for gone in ("trainer-packed/prefill", "decode-alone/decode-mixed"):
        data = copy.deepcopy(good.data)
        predicate = data["predicate"]
        predicate["comparisons"] = [r for r in predicate["comparisons"] if r["name"] != gone]
        assert Statement.parse(reseal(data), "short").verdict == "NOT_OBSERVED"


# The RL run, and leg E, which is a part of it.


@pytest.fixture
def trained(run, recipe, make_rows, make_row):
    """Statement of a run with leg E and RL steps of 64 tokens: three aligned, three stock."""
    steps = {"aligned": [step(i) for i in (1, 2, 3)], "stock": [step(i, 60) for i in (1, 2, 3)]}
    late = evidence.control("stock", 128, 120, 1e-3)
    fields = {"tokens": 128, "control": late}
    row = make_row("A", "rollout/trainer-after-refits", recipe, **fields) | {"leg": "E"}
    rl = evidence.rl(steps["aligned"], steps["stock"], "samebits rl qwen3-tiny")
    statement = run(comparisons=[*make_rows(recipe), row], rl=rl)
    assert statement.verdict == "EQUAL"
    return statement


def contradiction(statement, edit) -> str:
    data = copy.deepcopy(statement.data)
    predicate = data["predicate"]
    (late,) = (r for r in predicate["comparisons"] if r["leg"] == "E")
    edit(predicate["rl"], late)
    with pytest.raises(Refused, match="SB0804") as error:
        Statement.parse(reseal(data), "resealed")
    return error.value.seen


@pytest.mark.parametrize(
    "edit",
    [
        lambda rl, e: e.update(tokens=129),
        lambda rl, e: rl["aligned"].pop(),
        lambda rl, e: rl["stock"].pop(),
        lambda rl, e: rl["aligned"].__setitem__(1, step(2, 5)),
        lambda rl, e: rl["stock"].__setitem__(1, step(2, 59)),
        lambda rl, e: rl["stock"].__setitem__(1, step(2, 60, max_abs=2e-3)),
        lambda rl, e: e["control"].update(tokens=127),
        lambda rl, e: e["control"].update(mismatches=128),
        lambda rl, e: e["control"].update(max_abs=evidence.number(0.5)),
    ],
)
def test_leg_e_and_the_rl_run_are_one(trained, edit):
    assert "leg E" in contradiction(trained, edit)


def test_leg_e_without_an_rl_run_is_refused(trained):
    data = copy.deepcopy(trained.data)
    data["predicate"]["rl"] = None
    with pytest.raises(Refused, match="SB0804"):
        seal(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mean_abs", 0.9),
        ("mean_abs", 1e-6),
        ("max_abs", 1e-9),
        ("max_abs", float("nan")),
        ("k3_kl", 0.5),
        ("k3_kl", -0.5),
        ("k3_kl", -0.0),
        ("is_ratio_max", 1.5),
        ("is_ratio_max", 0.5),
        ("is_ratio_median", 1.5),
        ("is_ratio_median", 0.5),
        ("reward", -0.0),
    ],
)
def test_numbers_of_a_step_fit_together(trained, name, value):
    # The first step: leg E does not hold it.
    contradiction(trained, lambda rl, e: rl["stock"][0].update({name: evidence.number(value)}))


def test_the_median_is_one_where_most_tokens_agree(trained):
    def edit(rl, _):
        rl["stock"][0] = step(1, 20) | {"is_ratio_median": evidence.number(1.0005)}

    assert "most tokens agree" in contradiction(trained, edit)


@pytest.mark.parametrize(
    ("name", "value"),
    [("is_ratio_max", 1.5), ("k3_kl", 1e-9), ("max_abs", 1e-9), ("is_ratio_median", 0.9)],
)
def test_a_step_without_mismatches_is_exact(trained, name, value):
    contradiction(trained, lambda rl, e: rl["aligned"][0].update({name: evidence.number(value)}))


@pytest.mark.parametrize("arm", ["aligned", "stock"])
def test_a_mean_distance_above_the_largest_is_refused(run, arm):
    given = {"aligned": (0.5, 1.0), "stock": (0.6, 1.0)} | {arm: (0.6, 0.5)}
    with pytest.raises(Refused, match="SB0804"):
        run(
            oracles=[
                evidence.oracle(
                    "prefill/fp32-hugging-face",
                    "near",
                    tokens=50,
                    control=("rope_base_doubled", 50, 1.5),
                    command="samebits prove qwen3-tiny",
                    **given,
                )
            ]
        )


def test_an_honest_difference_can_be_written(run):
    """One token lower on the trainer's side leaves the largest ratio at 1: DIFFERENT, no refusal"""
    measured = {
        "tokens": 64,
        "mismatches": 1,
        "max_abs": 0.25,
        "mean_abs": 0.25 / 64,
        "k3_kl": 0.00044,
        "is_ratio_max": 1.0,
        "is_ratio_median": 1.0,
    }
    rl = evidence.rl([evidence.rl_step(1, measured, 0.0)], [step(1, 60)], "samebits rl qwen3-tiny")
    assert run(rl=rl).verdict == "DIFFERENT"
