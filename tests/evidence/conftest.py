"""A case of its own in a temporary folder, and a run of it that earned EQUAL."""

from __future__ import annotations

import copy
import itertools
import shutil

import pytest
from platforms import INTENT

from samebits import evidence
from samebits import recipe as recipes
from samebits.contract import Contract, canonical
from samebits.evidence import current, pairs, required
from samebits.evidence import rows as written
from samebits.evidence.statement import integrity
from samebits.gates import capsule, semantic

TREES = {"vllm": "1" * 40, "megatron": "2" * 40, "verl": "3" * 40}
WHEN = {"started": "2025-01-01T00:00:00Z", "finished": "2025-01-01T00:10:00Z"}


def row(leg: str, name: str, recipe: recipes.Recipe, **changes) -> dict:
    """A comparison of `leg` that satisfies its recipe."""
    wanted, named = recipe.legs[leg], {"leg": leg, "name": name}
    fields = {
        "tokens": wanted.tokens,
        "mismatches": 0,
        "max_abs": 0.0,
        "streams": ("a" * 64, "a" * 64),
        "hazards": dict.fromkeys(written.hazards(leg, name, recipe.platform), 2),
        "control": None,
        "command": required.command(recipe.case, " --record"),
    }
    if leg == "D":
        ran = changes.get("layouts", ("tp1", "tp1"))
        fired = (int(layout == "tp2") for layout in ran)
        fields["hazards"] = dict(zip(("trainer_tp2", "rollout_tp2"), fired, strict=True))
    distance = None if leg == "F" else 0.05
    for planted in written.controls(named, {"sources": []}, recipe)[:1]:
        fields["control"] = evidence.control(
            planted, wanted.tokens if leg == "D" else 100, 90, distance
        )
    if leg == "F":
        fields["max_abs"] = None
    return evidence.comparison(leg, name, written.of(leg, name).sentence, **(fields | changes))


def rows(recipe: recipes.Recipe, leg: str = "", **changes) -> list[dict]:
    """Comparisons of all legs that satisfy the recipe, those of `leg` changed."""
    found = []
    for name in recipe.legs:
        if name not in "DO":
            given = changes if name == leg else {}
            found += [row(name, pair, recipe, **given) for pair in pairs.DENSE[name]]
    for sizes in itertools.product(recipe.trainer_tp, recipe.rollout_tp):
        if "D" in recipe.legs:
            a, b = (f"tp{size}" for size in sizes)
            given = {"layouts": (a, b)} | (changes if leg == "D" else {})
            found.append(row("D", pairs.of_layouts(a, b), recipe, **given))
    return found


@pytest.fixture
def make_row():
    return row


@pytest.fixture
def make_rows():
    return rows


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> recipes.Recipe:
    """qwen3-tiny with its contract; its trees are pinned to `TREES`."""
    folder = tmp_path / "cases" / "qwen3-tiny"
    folder.mkdir(parents=True)
    source = recipes.find("qwen3-tiny").parent
    shutil.copy(source / "recipe.yaml", folder)
    contract = copy.deepcopy(Contract.load(source).data)
    for entry in contract["composition"]:  # stand on one small file, not on every kernel
        entry["modules"] = ["samebits.plan"]
        entry["content_hash"] = current.source_hash(["samebits.plan"])
    for claim in contract["claims"]["topology"].values():
        claim["evidence"] = None
    from samebits.contract.build import seal

    (folder / "contract.json").write_bytes(seal(contract).raw)
    monkeypatch.setattr(current, "trees", lambda recipe: dict(TREES))
    return recipes.load(folder)


@pytest.fixture
def fake_operators():
    """One small operator for every region."""
    from samebits.ops.registry import REGIONS, Implementation

    return {
        region: Implementation(region, f"{region}.cpu.1", "cpu", {}, ("samebits.plan",), lambda: 7)
        for region in REGIONS
    }


@pytest.fixture
def run(recipe):
    """Builds a statement of a run; arguments replace those of a good run."""

    def build(**changes):
        fields = {
            "comparisons": rows(recipe),
            "limits": required.limits("cpu"),
            "not_covered": required.not_covered("cpu"),
            "intent": INTENT,
            "switches": {
                "distinct_prompt_seed_pairs": "2",  # as every hazard of `row`
                **semantic.required(recipe),
            },
            "happenstance": WHEN,
            "seeds": capsule.SEEDS,
        }
        return evidence.build(recipe, Contract.load(recipe.folder), **(fields | changes))

    return build


@pytest.fixture
def good(run):
    return run()


@pytest.fixture
def forge(good, tmp_path):
    """Writes a changed copy of a good statement; `honest_digest` recomputes its integrity."""

    def change(edit, *, honest_digest: bool = True):
        data = copy.deepcopy(good.data)
        edit(data)
        if honest_digest:
            data["predicate"]["integrity"] = integrity(data)
        path = tmp_path / "cases" / "qwen3-tiny" / "forged.json"
        path.write_bytes(canonical.encode(data))
        return path

    return change
