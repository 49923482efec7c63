"""Where a case stands follows from its files: each state is reached, and left when one changes."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from samebits import cli, evidence
from samebits import recipe as recipes
from samebits.casework import steps
from samebits.contract import Contract
from samebits.gates import prove

LEGS = {"leg-a": "A", "leg-b": "B", "leg-c": "C", "topology": "D", "rows": "F", "refit": "E"}


def status(capsys, expected: int) -> dict:
    capsys.readouterr()
    assert cli.run(["case", "status", "toy", "--json"]) == expected
    found = json.loads(capsys.readouterr().out)
    found["states"] = {row["step"]: row["state"] for row in found["steps"]}
    return found


@pytest.fixture
def whole(toy):
    """A case of which everything is there."""
    toy.contract()
    toy.record()
    toy.bench()
    toy.write_up()
    return toy


def test_a_new_case_waits_for_its_contract(toy, capsys):
    found = status(capsys, 3)
    assert found["states"]["intake"] == found["states"]["pins"] == "done"
    assert found["next"] == {"step": "contract", "command": "samebits contract build toy"}
    assert found["states"]["write-up"] == "waiting"


def test_with_a_contract_the_engines_are_next(toy, capsys):
    toy.contract()
    found = status(capsys, 3)
    assert found["next"] == {"step": "semantics", "command": "samebits prove toy --quick"}


def test_a_case_like_a_proved_one_is_recorded_at_once(toy, capsys, monkeypatch):
    toy.contract()
    monkeypatch.setattr(steps, "_proved_alike", lambda recipe: "other")
    found = status(capsys, 3)
    assert found["next"] == {"step": "semantics", "command": "samebits prove toy --record"}
    assert any("other is proved" in row["why"] for row in found["steps"])


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        ({"case": "fresh"}, True),
        ({"case": "fresh", "platform": "sm90"}, False),
        ({"case": "fresh", "series": {"vllm": "fresh", "megatron": "fresh"}}, False),
    ],
)
def test_what_is_alike_has_the_same_operators_and_patches(change, alike):
    recipe = recipes.load("qwen3.5-tiny")
    found = steps._proved_alike(replace(recipe, data={**recipe.data, **change}))
    assert (found == "qwen3.5-tiny") == alike
    if alike:  # the other schedule of states is another kind
        contract = {**recipe.data["contract"], "gdn_schedule": "cpr"}
        other = replace(recipe, data={**recipe.data, **change, "contract": contract})
        assert steps._proved_alike(other) == "qwen3.5-tiny-cpr"


def test_an_unrecorded_run_serves_the_steps_before_the_recorded_one(toy, capsys):
    toy.contract()
    path = toy.root / "build/runs/toy/0123/evidence.json"
    evidence.write(toy.statement(), path)
    found = status(capsys, 3)
    assert [found["states"][s] for s in ("semantics", "baseline", "regions")] == ["done"] * 3
    assert found["next"] == {"step": "leg-a", "command": "samebits prove toy --record"}
    assert steps.progress("toy", local=False).next.step == "semantics"
    recipe = toy.folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("seed: 1, entropy", "seed: 2, entropy"))
    toy.contract()
    assert status(capsys, 3)["next"]["step"] == "semantics"


def test_a_run_of_another_case_or_an_edited_one_does_not_serve(toy, capsys):
    toy.contract()
    path = toy.root / "build/runs/toy/0123/evidence.json"
    evidence.write(toy.statement(), path)
    path.write_bytes(path.read_bytes().replace(b'"tokens":400', b'"tokens":900'))
    assert status(capsys, 3)["next"]["step"] == "semantics"


def test_everything_there_is_done(whole, capsys):
    found = status(capsys, 0)
    assert set(found["states"].values()) == {"done"} and found["next"] is None
    assert found["settled"] == found["of"] == len(steps.STEPS)
    assert cli.run(["case", "status", "toy"]) == 0
    assert "17 of 17 steps settled (drawn weights)" in capsys.readouterr().out


def test_a_contract_that_does_not_name_its_evidence_is_not_settled(whole, capsys):
    whole.contract()  # names it, as `contract build` does
    recorded = whole.recipe.contract_path.read_bytes()
    assert status(capsys, 0)["next"] is None
    evidence.write(whole.statement(), whole.recipe.evidence_path)
    whole.recipe.contract_path.write_bytes(recorded)  # names what was superseded
    assert whole.differs()
    found = status(capsys, 3)
    assert found["next"] == {"step": "contract", "command": "samebits contract build toy"}
    whole.name_evidence()
    assert not whole.differs() and status(capsys, 0)["next"] is None


@pytest.mark.parametrize(("changed", "named"), [({}, True), ({"A": {"tokens": 40}}, False)])
def test_a_recorded_run_names_its_evidence_in_the_contract(toy, changed, named):
    contract = toy.contract()
    statement = evidence.write(toy.statement(changed), toy.recipe.evidence_path)
    assert toy.differs() == named
    prove._name_evidence(SimpleNamespace(contract=contract, recipe=toy.recipe))  # type: ignore[arg-type]
    topology = Contract.of(toy.recipe).data["claims"]["topology"]
    proofs = {claim["evidence"] for claim in topology.values()}
    assert proofs == {statement.digest if named else None} and not toy.differs()
    result = evidence.verify("toy")
    assert not result.stale and (result.status == "EQUAL") == named


@pytest.mark.parametrize(("step", "leg"), LEGS.items())
def test_a_difference_is_red_whatever_the_ledger_says(whole, capsys, step, leg):
    first = {"sequence": 3, "position": 5, "token": 7, "left": "aa", "right": "bb"}
    differs = {"mismatches": 9, "max_abs": 0.5, "streams": ("a" * 64, "b" * 64), "first": first}
    whole.record({leg: differs})
    assert cli.run(["case", "decide", "toy", step, "blocked", "--reason", "not my fault"]) == 0
    found = status(capsys, 1)
    assert found["states"][step] == "different"
    if leg in "BCDF":
        assert found["next"]["command"] == "samebits prove toy --record --locate 3"


@pytest.mark.parametrize(
    ("changed", "step"),
    [
        ({"A": {"hazards": {"batch_1": 0, "batch_16": 0}}}, "leg-a"),
        ({"A": {"tokens": 40}}, "leg-a"),
        ({"B": {"control": evidence.control("stock", 100, 0, 0.0)}}, "baseline"),
        ({"B": {"control": evidence.control("stock", 10, 9, 0.5)}}, "baseline"),
        ({"F": {"control": evidence.control("stock", 300, 0)}}, "baseline"),
    ],
)
def test_too_little_is_not_observed(whole, capsys, changed, step):
    whole.record(changed)
    assert status(capsys, 3)["states"][step] == "not observed"


def test_refits_have_to_happen(whole, capsys):
    hazards = {"optimizer_step": 4, "refit": 0, "prefix_cache_invalidated": 1}
    whole.record({"E": {"hazards": hazards}})
    found = status(capsys, 3)
    assert found["states"]["refit"] == "waiting" and found["states"]["backward"] == "not observed"


def test_a_recipe_that_asks_for_no_refit_does_not_show_one(whole, capsys):
    path = whole.folder / "recipe.yaml"
    asked = "hazards: [optimizer_step, refit, prefix_cache_invalidated]"
    path.write_text(path.read_text().replace(asked, "hazards: [optimizer_step]"))
    whole.contract()
    hazards = {"optimizer_step": 4, "refit": 0, "prefix_cache_invalidated": 0}
    whole.record({"E": {"hazards": hazards}})
    found = status(capsys, 3)
    assert found["states"]["backward"] == "done" and found["states"]["refit"] == "not observed"


def test_a_changed_recipe_makes_legs_stale(whole, capsys):
    path = whole.folder / "recipe.yaml"
    path.write_text(path.read_text().replace("A: {tokens: 400", "A: {tokens: 399"))
    found = status(capsys, 3)
    assert found["states"]["semantics"] == "stale" and found["states"]["leg-a"] == "waiting"


def test_changed_operators_make_the_contract_stale(whole, capsys, monkeypatch):
    from samebits.evidence import current

    monkeypatch.setattr(current, "source_hash", lambda modules: "0" * 64)
    found = status(capsys, 3)
    assert found["states"]["contract"] == "stale"
    assert found["next"]["command"] == "samebits contract build toy"


def test_forged_evidence_is_refused_not_counted(whole, capsys):
    path = whole.recipe.evidence_path
    path.write_bytes(path.read_bytes().replace(b'"mismatches":90', b'"mismatches":91'))
    found = status(capsys, 2)
    assert found["states"]["leg-a"] == "refused"


def test_evidence_of_another_case_is_refused(whole, capsys):
    other = json.loads(whole.recipe.evidence_path.read_bytes())
    other["predicate"]["parameters"]["case"] = "qwen3-tiny"
    whole.recipe.evidence_path.write_text(json.dumps(other))
    assert status(capsys, 2)["states"]["leg-a"] == "refused"


def test_a_missing_series_leaves_pins_open(toy, capsys):
    path = toy.folder / "recipe.yaml"
    path.write_text(path.read_text().replace("vllm: qwen3-tiny", "vllm: mine"))
    found = status(capsys, 3)
    assert found["next"] == {"step": "pins", "command": "samebits patch export vllm --record"}


def test_a_recipe_that_leaves_the_published_model_is_open_again(checkout, published, capsys):
    assert cli.run(["case", "new", "toy", "--config", str(published())]) == 0
    path = checkout / "cases/toy/recipe.yaml"
    path.write_text(path.read_text().replace("hidden_size: 2048", "hidden_size: 1024"))
    found = status(capsys, 3)
    assert found["next"] == {"step": "intake", "command": "samebits plan toy"}


def test_a_hybrid_without_full_attention_is_open(checkout, published, hybrid, capsys):
    args = ["--config", str(published(hybrid)), "--layers", "3"]
    assert cli.run(["case", "new", "toy", *args]) == 0
    found = status(capsys, 3)
    assert found["states"]["intake"] == "open" and "full attention" in found["steps"][0]["why"]


def test_a_layout_that_heads_do_not_allow_is_open(toy, capsys):
    path = toy.folder / "recipe.yaml"
    path.write_text(path.read_text().replace("rollout_tp: [1, 2]", "rollout_tp: [1, 4]"))
    assert status(capsys, 3)["states"]["intake"] == "open"


def test_a_case_on_one_rank_has_no_topology_to_show(whole, capsys):
    path = whole.folder / "recipe.yaml"
    text = path.read_text().replace("tp: [1, 2]", "tp: [1]")
    path.write_text("".join(line for line in text.splitlines(True) if "  D: {" not in line))
    whole.contract()
    whole.record()
    found = status(capsys, 0)
    assert found["states"]["topology"] == "out-of-scope"
    decision = ["topology", "out-of-scope", "--reason", "nobody ran it"]
    assert cli.run(["case", "decide", "toy", *decision]) == 0
    assert any("nobody ran it" in row["why"] for row in status(capsys, 0)["steps"])
    assert cli.run(["case", "status", "toy"]) == 0
    shown = capsys.readouterr().out
    assert "17 of 17 steps settled, 1 of them out of scope" in shown
    assert shown.endswith("(drawn weights; not claimed: D)\n")


def test_a_leg_that_is_not_asked_for_has_to_be_decided(whole, capsys):
    path = whole.folder / "recipe.yaml"
    text = path.read_text()
    path.write_text("".join(line for line in text.splitlines(True) if "  F: {" not in line))
    whole.contract()
    whole.record()
    found = status(capsys, 3)
    assert found["next"]["step"] == "rows"
    assert cli.run(["case", "decide", "toy", "rows", "out-of-scope", "--reason", "rows of C"]) == 0
    assert status(capsys, 0)["states"]["rows"] == "out-of-scope"


@pytest.mark.parametrize("alike", [True, False])
def test_a_leg_that_a_case_of_the_same_model_claims_is_not_asked_for_again(whole, capsys, alike):
    path = whole.folder / "recipe.yaml"
    text = path.read_text()
    other = path.parent.with_name("toy-whole")
    other.mkdir()
    seed = "seed: 1" if alike else "seed: 2"
    assert text.count("seed: 1,") == 1
    changed = text.replace("case: toy", "case: toy-whole").replace("seed: 1,", f"{seed},")
    (other / "recipe.yaml").write_text(changed)
    path.write_text("".join(line for line in text.splitlines(True) if "  F: {" not in line))
    whole.contract()
    whole.record()
    found = status(capsys, 0 if alike else 3)
    (rows,) = (row for row in found["steps"] if row["step"] == "rows")
    assert rows["state"] == ("out-of-scope" if alike else "open")
    assert ("toy-whole claims leg F" in rows["why"]) == alike


def test_what_is_blocked_stops_what_follows(whole, capsys):
    shutil.rmtree(whole.folder / "evidence")
    assert status(capsys, 3)["next"]["step"] == "contract"  # which names what is gone
    whole.contract()
    toy_run = whole.root / "build/runs/toy/0123/evidence.json"
    evidence.write(whole.statement(), toy_run)
    assert cli.run(["case", "decide", "toy", "leg-c", "blocked", "--reason", "a bug upstream"]) == 0
    found = status(capsys, 3)
    assert found["states"]["leg-c"] == "blocked" and found["states"]["oracle"] == "waiting"
    assert found["next"]["step"] == "leg-a"
    (stopped,) = found["blocked"]
    assert stopped["step"] == "leg-c" and "a bug upstream" in stopped["why"]
    assert {"oracle", "backward", "rl", "write-up"} <= {*stopped["behind"]}
    assert "leg-a" not in stopped["behind"]
    assert cli.run(["case", "status", "toy"]) == 3
    *_, command, last = capsys.readouterr().out.splitlines()
    assert command.startswith("next: samebits prove toy --record")
    assert last.startswith("blocked: leg-c: a bug upstream") and "oracle" in last


def test_no_recorded_row_leaves_overhead_open(whole, capsys):
    (whole.root / "cases/bench.json").unlink()
    found = status(capsys, 3)
    command = "samebits bench run rollout --case toy --record"
    assert found["next"] == {"step": "overhead", "command": command}


def test_a_row_that_was_not_measured_leaves_overhead_open(whole, capsys):
    path = whole.root / "cases/bench.json"
    rollout, trainer = json.loads(path.read_text())
    path.write_text(json.dumps([rollout, {**trainer, "ratio": None, "met": None}]))
    found = status(capsys, 3)
    assert found["states"]["overhead"] == "open"
    (row,) = (row for row in found["steps"] if row["step"] == "overhead")
    assert "trainer" in row["why"] and "rollout" not in row["why"]


def test_every_command_of_a_step_exists(toy):
    from quoted import problem

    found = steps.progress("toy")
    wrong = {s.step: problem(s.command) for s in found.states if problem(s.command)}
    assert not wrong


def test_entry_conditions_name_earlier_steps():
    names = [step.name for step in steps.STEPS]
    for index, step in enumerate(steps.STEPS):
        assert set(step.after) <= set(names[:index])


def test_status_of_nothing_is_refused(checkout, capsys):
    assert cli.run(["case", "status", "nothing"]) == 2
    assert "SB0322" in capsys.readouterr().err
