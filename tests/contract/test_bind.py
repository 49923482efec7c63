import pytest

from samebits.contract.build import seal
from samebits.errors import Refused
from samebits.ops import registry


def without_answers(contract, *regions):
    """The contract with some of this platform's answers removed."""
    data = dict(contract.data)
    data["platforms"] = {
        key: {
            "description": record["description"],
            "known_answers": {
                r: a for r, a in record["known_answers"].items() if regions and r not in regions
            },
        }
        for key, record in data["platforms"].items()
    }
    return seal(data)


@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_equal_answers_bind(contract, operators, role):
    binding = contract.bind(role, operators)
    assert binding.status == "known"
    assert set(binding.answers) == set(contract.regions)


def test_a_missing_record_is_a_new_platform(contract, operators):
    assert without_answers(contract).bind("rollout", operators).status == "new platform"
    assert without_answers(contract, "rope").bind("rollout", operators).status == "new platform"


def test_a_wrong_answer_is_refused(contract, operators, fake_operator):
    operators["rope"] = fake_operator("rope", answer=1234)
    with pytest.raises(Refused, match="SB0310"):
        contract.bind("rollout", operators)


def test_a_wrong_answer_is_refused_also_beside_missing_ones(contract, operators, fake_operator):
    operators["rope"] = fake_operator("rope", answer=1234)
    with pytest.raises(Refused, match="SB0310"):
        without_answers(contract, "logprob").bind("rollout", operators)


def test_changed_source_is_refused(contract, operators, fake_operator):
    operators["rope"] = fake_operator("rope", answer=4, modules=("samebits.bits",))
    with pytest.raises(Refused, match="SB0309"):
        contract.bind("rollout", operators)


def test_another_or_a_missing_implementation_is_refused(contract, operators, fake_operator):
    operators["rope"] = fake_operator("rope", id="rope.cpu.2")
    with pytest.raises(Refused, match="SB0308"):
        contract.bind("rollout", operators)
    del operators["rope"]
    with pytest.raises(Refused, match="SB0308"):
        contract.bind("rollout", operators)


def test_a_planted_fault_is_bound_but_never_known(contract, operators, fake_operator, monkeypatch):
    monkeypatch.setenv("SAMEBITS_FAULT", "some_fault")
    operators["rope"] = fake_operator("rope", answer=1234)
    assert contract.bind("rollout", operators).status == "planted fault"


def test_peers_must_give_the_same_answers(contract, operators):
    binding = contract.bind("rollout", operators)
    binding.check_peer(contract.bind("trainer", operators).answers)
    with pytest.raises(Refused, match="SB0320"):
        binding.check_peer(dict(binding.answers) | {"rope": "f" * 32})
    with pytest.raises(Refused, match="SB0320"):
        binding.check_peer({})


def test_probes_do_not_count_as_served(contract, operators, fake_operator):
    def probe() -> int:
        registry.count_served("rope", 100)
        return registry.REGIONS.index("rope")  # what the operator of the contract answers

    operators["rope"] = fake_operator("rope", probe=probe)
    before = registry.served()
    contract.bind("rollout", operators)
    assert registry.served() == before
