"""Evidence of a case on a GPU is held to its own platform, checked on a machine without one."""

import copy

import pytest
import yaml
from platforms import GPU, INTENT

from samebits import evidence
from samebits import recipe as recipes
from samebits.contract import Contract
from samebits.contract.build import seal
from samebits.errors import Refused
from samebits.evidence import required
from samebits.gates import capsule, semantic

WHEN = {"started": "2025-01-01T00:00:00Z", "finished": "2025-01-01T00:10:00Z"}


@pytest.fixture
def gpu_case(recipe) -> recipes.Recipe:
    """The case of the other tests, moved to the platform sm90."""
    data = yaml.safe_load(recipe.path.read_text()) | {"platform": "sm90"}
    recipe.path.write_text(yaml.safe_dump(data))
    contract = copy.deepcopy(dict(Contract.load(recipe.folder).data))
    contract |= {"platform": "sm90", "platforms": {}}
    for entry in contract["composition"]:
        entry["implementation"] = entry["implementation"].replace(".cpu.", ".sm90.")
    (recipe.folder / "contract.json").write_bytes(seal(contract).raw)
    return recipes.load(recipe.folder)


@pytest.fixture
def verified(gpu_case, make_rows):
    """Verifies a statement of the case; arguments replace those of a good run."""

    def verify(**changes):
        fields = {
            "comparisons": make_rows(gpu_case),
            "limits": required.limits("sm90"),
            "not_covered": required.not_covered("sm90"),
            "intent": GPU,
            "switches": {
                "distinct_prompt_seed_pairs": "2",
                **semantic.required(gpu_case),
            },
            "happenstance": WHEN,
            "seeds": capsule.SEEDS,
        }
        contract = Contract.load(gpu_case.folder)
        statement = evidence.build(gpu_case, contract, **(fields | changes))
        evidence.write(statement, gpu_case.evidence_path)
        return evidence.verify(gpu_case.folder)

    return verify


def test_a_run_on_its_platform_is_equal(verified):
    assert verified().status == "EQUAL"


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"intent": INTENT}, "platform described by"),
        ({"limits": required.limits("cpu")}, "other limits"),
        ({"not_covered": required.not_covered("cpu")}, "not covered: CUDA"),
    ],
)
def test_what_a_run_on_a_cpu_writes_is_refused(verified, changes, seen):
    with pytest.raises(Refused, match="SB0813") as caught:
        verified(**changes)
    assert seen in caught.value.seen


def test_it_stands_on_the_hooks_of_the_gpu(verified):
    (hooks,) = (s for s in verified().statement.predicate["sources"] if s["name"] == "hooks/vllm")
    assert any(".cuda" in name for name in hooks["modules"])
    assert not any(".cpu_" in name for name in hooks["modules"])


def test_decode_without_replayed_steps_is_refused(verified, gpu_case, make_rows):
    rows = make_rows(gpu_case)
    (decode,) = (row for row in rows if row["name"] == "decode/prefill")
    del decode["hazards"]["graph_replay"]
    with pytest.raises(Refused, match="SB0813") as caught:
        verified(comparisons=rows)
    assert "counts of graph_replay" in caught.value.seen
