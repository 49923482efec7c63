"""What a proving run does in which order: semantics and agreement stop it before numbers count."""

import types

import pytest

from samebits import prompts
from samebits.errors import NotObserved, Refused
from samebits.gates import prove, sizes, stages, workload
from samebits.gates.run import Run


@pytest.fixture
def run(run_of, monkeypatch):
    """A run whose folder holds nothing yet."""
    monkeypatch.setattr(prompts, "tokenizer_of", lambda model: None)
    plain = run_of("qwen3-tiny")
    made = Run.__new__(Run)
    made.recipe, made.contract, made.folder = plain.recipe, plain.contract, plain.folder
    made.model, made.options = plain.folder, {}
    return made


@pytest.fixture
def ran(run, stages_of, monkeypatch):
    """Fakes of all stages; returns the names of those that ran, and their results to change."""
    done = stages_of(run.recipe)
    contract, regions = run.contract.digest, dict.fromkeys(run.contract.regions, 9)
    binding = {"status": "known", "platform": "p", "description": {}, "answers": {"rope": "1"}}
    for name, stage in done.items():
        if name.startswith("rollout"):
            stage.facts["contract"] = contract
        if name.startswith(("trainer", "planted_ranks")):
            stage.facts["info"] = {
                "contract_digest": contract,
                "arithmetic": "aligned",
                "answers": {"rope": "1"},
                "served": dict(regions),
            }
    for stage in done.values():
        stage.facts["seconds"] = 1.0
    done["rollout_stress"].facts.update(binding=binding, served=dict(regions))
    names: list[str] = []

    def fake(name):
        names.append(name)
        return done[name]

    def trainer_score(run, whole, *, tp=1, arithmetic="aligned", fault=None, **_):
        name = "planted_ranks" if fault else f"trainer_tp{tp}" if tp > 1 else "trainer"
        return fake("stock_trainer" if arithmetic == "stock" else name)

    monkeypatch.setattr(stages, "rollout_stress", lambda *_: fake("rollout_stress"))
    monkeypatch.setattr(stages, "rollout_control", lambda *_, **__: fake("stock_rollout"))
    monkeypatch.setattr(stages, "rollout_plain", lambda *_: fake("rollout_plain"))
    monkeypatch.setattr(stages, "rollout_score", lambda *_, tp, **__: fake(f"rollout_tp{tp}"))
    monkeypatch.setattr(stages, "trainer_score", trainer_score)
    return types.SimpleNamespace(names=names, done=done)


def test_all_stages_of_a_case_run_once(run, ran):
    found = prove._stages(run, sizes.Size.quick())
    for first, then in (("rollout_stress", "trainer"), ("stock_rollout", "stock_trainer")):
        assert ran.names.index(first) < ran.names.index(then)
    assert len(set(ran.names)) == len(ran.names)
    assert {"trainer_tp2", "rollout_tp2", "planted_ranks"} <= set(found)
    assert prove._stages(run, sizes.Size.quick()).keys() == found.keys()
    assert len(ran.names) == len(found)  # the second time all were reused


def test_a_shared_seed_stops_the_run_before_any_engine(run, ran, monkeypatch):
    twice = workload.control(run.recipe, run.model, 4, 4)[:1] * 2
    monkeypatch.setattr(workload, "control", lambda *_: twice)
    with pytest.raises(Refused, match="SB0913"):
        prove._stages(run, sizes.Size.quick())
    assert ran.names == []


@pytest.mark.parametrize(
    ("stage", "change", "error"),
    [
        ("rollout_plain", {"contract": "0" * 64}, "SB0312"),
        ("rollout_stress", {"served": {}}, "SB0313"),
        ("trainer", {"info": {"contract_digest": "0" * 64}}, "SB0312"),
        ("trainer", {"info": {"answers": {"rope": "2"}}}, "SB0320"),
        ("trainer", {"info": {"served": {}}}, "SB0313"),
    ],
)
def test_sides_that_disagree_stop_the_run(run, ran, stage, change, error):
    facts = ran.done[stage].facts
    if "info" in change:
        change = {"info": facts["info"] | change["info"]}
    facts.update(change)
    with pytest.raises((Refused, NotObserved), match=error):
        prove._stages(run, sizes.Size.quick())
    assert "planted_ranks" not in ran.names


@pytest.mark.parametrize("stage", ["rollout_tp2", "trainer_tp2"])
def test_a_layout_with_another_contract_is_refused(run, ran, stage):
    facts = ran.done[stage].facts
    if "info" in facts:
        facts["info"]["contract_digest"] = "0" * 64
    else:
        facts["contract"] = "0" * 64
    with pytest.raises(Refused, match="SB0312") as error:
        prove._stages(run, sizes.Size.quick())
    assert stage in error.value.seen
