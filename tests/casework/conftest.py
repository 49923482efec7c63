"""A checkout of its own with the template, and a new case whose evidence a test can shape."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from pathlib import Path

import pytest
from platforms import INTENT

from samebits import cli, evidence
from samebits import recipe as recipes
from samebits.contract import Contract
from samebits.contract.build import build, with_proofs, write
from samebits.evidence import pairs, required
from samebits.evidence import rows as written
from samebits.gates import capsule, semantic
from samebits.ops import registry
from samebits.ops.registry import Implementation
from samebits.patching.workspace import Workspace

WHEN = {"started": "2025-01-01T00:00:00Z", "finished": "2025-01-01T00:10:00Z"}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
# Qwen2.5's small models; nothing in it says that q, k and v have a bias.
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# MiMo-7B: the same layers, with an entry for their bias, and one for layers that predict ahead.
MIMO = QWEN2 | {
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "model_type": "mimo",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 640000,
    "tie_word_embeddings": False,
    "vocab_size": 151680,
}
HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "rope_theta": 10000000,
        "rope_type": "default",
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": True,
    "vocab_size": 248320,
}


# As Qwen3.5 is published: the text model inside, without a class of its own.
COMPOSITE = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "vision_config": {"depth": 12},
    "tie_word_embeddings": True,
    "text_config": {
        **{name: value for name, value in HYBRID.items() if name != "architectures"},
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            **HYBRID["rope_parameters"],
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
}


@pytest.fixture
def published(tmp_path):
    """Writes a config.json: that of a Llama, or of a hybrid, with changes; None removes."""

    def make(base=LLAMA, **changes) -> Path:
        path = tmp_path / "config.json"
        merged = {k: v for k, v in {**base, **changes}.items() if v is not None}
        path.write_text(json.dumps(merged))
        return path

    return make


@pytest.fixture
def hybrid():
    return HYBRID


@pytest.fixture
def composite():
    return copy.deepcopy(COMPOSITE)


@pytest.fixture
def qwen2():
    return QWEN2


@pytest.fixture
def mimo():
    return MIMO


@pytest.fixture
def operators(monkeypatch) -> dict[str, Implementation]:
    """One small operator for every region."""
    found = {
        region: Implementation(region, f"{region}.cpu.1", "cpu", {}, ("samebits.plan",), lambda: 7)
        for region in registry.REGIONS
    }
    monkeypatch.setattr(registry, "implementations", lambda platform="cpu": found)
    return found


@pytest.fixture
def checkout(tmp_path, monkeypatch, operators) -> Path:
    """Template and one real recipe in `cases/` of an empty checkout; patches are the real ones."""
    real = Workspace.find()
    root = tmp_path / "checkout"
    shutil.copytree(real.root / "cases" / "_template", root / "cases" / "_template")
    (root / "cases" / "qwen3-tiny").mkdir()
    shutil.copy(real.root / "cases" / "qwen3-tiny" / "recipe.yaml", root / "cases" / "qwen3-tiny")
    (root / "patches").symlink_to(real.patches)
    (root / "tests" / "ops").mkdir(parents=True)
    (root / "tests" / "ops" / "test_gemm.py").touch()
    monkeypatch.setattr(Workspace, "find", classmethod(lambda cls: Workspace(root)))
    return root


def rows(recipe: recipes.Recipe, changed: dict | None = None) -> dict:
    """Arguments of `evidence.build` for a run that earns EQUAL; `changed`: leg -> other fields."""
    changed = changed or {}
    comparisons, oracles = [], []
    tokens = max(leg.tokens for leg in recipe.legs.values())  # rows over one set count alike
    for name, leg in recipe.legs.items():
        fields = {
            "tokens": tokens,
            "mismatches": 0,
            "max_abs": 0.0,
            "streams": ("a" * 64, "a" * 64),
            "control": evidence.control(leg.control, 100, 90, 0.05),
            "command": f"samebits prove {recipe.case}",
        } | changed.get(name, {})
        if name == "E":  # the steps of `_rl` but the first
            late = recipe.rl["steps"] - 1
            fields |= {"tokens": 50 * late} | changed.get(name, {})
            fields |= {"control": evidence.control(leg.control, 50 * late, 40 * late, 0.5)}
        if name == "D":  # its control scores what its rows score
            fields["control"] = evidence.control(leg.control, tokens, 90, 0.05)
            fields |= changed.get(name, {})
        if name in "CF":  # the oracle scores what their controls scored
            scored = recipe.legs["O"].tokens if "O" in recipe.legs else 100
            distance = 0.05 if name == "C" else None
            fields["control"] = evidence.control(leg.control, scored, 90, distance)
            fields |= changed.get(name, {})
        if name == "F":
            fields["max_abs"] = None
        ran = [(pair, ("tp1", "tp1")) for pair in _pairs(recipe, name)]
        if name == "D":
            sizes = itertools.product(recipe.trainer_tp, recipe.rollout_tp)
            layouts = [(f"tp{a}", f"tp{b}") for a, b in sizes]
            ran = [(pairs.of_layouts(*two), two) for two in layouts]
        for pair, two in ran:
            fires = written.of(name, pair)
            hazards = dict.fromkeys(fires.hazards, 2)
            if name == "D":
                fired = (int(layout == "tp2") for layout in two)
                hazards = dict(zip(("trainer_tp2", "rollout_tp2"), fired, strict=True))
            hazards |= {k: n for k, n in fields.get("hazards", {}).items() if k in hazards}
            given = {**_controlled(recipe, name, pair, fields), "hazards": hazards}
            comparisons.append(
                evidence.comparison(name, pair, fires.sentence, layouts=two, **given)
            )
        if name == "O":
            oracles = [
                evidence.oracle(
                    "prefill/fp32-hugging-face",
                    written.of("O", "prefill/fp32-hugging-face").sentence,
                    tokens=leg.tokens,
                    aligned=(0.01, 0.1),
                    stock=(0.02, 0.1),
                    command="samebits prove toy",
                    control=(leg.control, leg.tokens, 0.5),
                    **changed.get("O", {}),
                )
            ]
    return {"comparisons": comparisons, "oracles": oracles, "rl": _rl(recipe, changed.get("E", {}))}


def _controlled(recipe: recipes.Recipe, leg: str, pair: str, fields: dict) -> dict:
    """Fields of one row: its negative control by its own name, or none where it holds none."""
    states = {"sources": _states(recipe)}
    named = written.controls({"leg": leg, "name": pair}, states, recipe)
    control = fields["control"]
    if not named or control is None:
        return fields | {"control": None}
    name = control["name"] if control["name"] in named else named[0]
    return fields | {"control": {**control, "name": name}}


def _states(recipe: recipes.Recipe) -> list[dict[str, str]]:
    return [{"name": "implementation/gdn.core.cpu.1"}] if recipe.gdn_schedule else []


def _pairs(recipe: recipes.Recipe, leg: str) -> tuple[str, ...]:
    if leg in "DO":
        return ()
    return pairs.of(leg, {"sources": _states(recipe)})


def _rl(recipe: recipes.Recipe, late):
    """Steps of both arms; `late`: what the aligned steps behind the first refit differ by."""
    if recipe.rl is None:
        return None
    equal = dict.fromkeys(("max_abs", "mean_abs", "k3_kl"), 0.0)
    equal |= {"is_ratio_max": 1.0, "is_ratio_median": 1.0, "tokens": 50, "mismatches": 0}
    differs = equal | {"max_abs": 0.5, "mean_abs": 0.1, "mismatches": 40, "k3_kl": 0.01}
    differs |= {"is_ratio_max": 1.2}
    steps = range(1, recipe.rl["steps"] + 1)
    aligned = [evidence.rl_step(step, equal, 0.1) for step in steps]
    if "mismatches" in late:
        wrong = {"mismatches": late["mismatches"], "max_abs": late["max_abs"], "mean_abs": 0.05}
        wrong |= {"k3_kl": 0.01, "is_ratio_max": 1.2}
        aligned[-1] = evidence.rl_step(recipe.rl["steps"], equal | wrong, 0.1)
    return evidence.rl(
        aligned,
        [evidence.rl_step(step, differs, 0.1) for step in steps],
        "samebits rl toy",
    )


class Toy:
    """A new case in the checkout, with a contract, and ways to give it evidence."""

    def __init__(self, root: Path, operators):
        self.root, self.operators = root, operators
        assert cli.run(["case", "new", "toy", "--architecture", "qwen3"]) == 0
        self.folder = root / "cases" / "toy"

    @property
    def recipe(self) -> recipes.Recipe:
        return recipes.load("toy")

    def contract(self) -> Contract:
        contract = build(self.recipe, self.operators)
        write(contract, self.recipe.contract_path)
        return contract

    def statement(self, changed: dict | None = None, **fields):
        pairs = {"distinct_prompt_seed_pairs": "2"}  # as every hazard of `rows`
        given = {
            "limits": required.limits("cpu"),
            "not_covered": required.not_covered("cpu"),
            "happenstance": WHEN,
            "intent": INTENT,
            "seeds": capsule.SEEDS | {"rl": self.recipe.rl["seed"]},
            "switches": semantic.required(self.recipe) | pairs,
        }
        return evidence.build(
            self.recipe,
            Contract.load(self.recipe.contract_path),
            **(given | rows(self.recipe, changed) | fields),
        )

    def record(self, changed: dict | None = None, **fields) -> None:
        evidence.write(self.statement(changed, **fields), self.recipe.evidence_path)
        self.name_evidence()

    def name_evidence(self) -> None:
        write(with_proofs(Contract.of(self.recipe), self.recipe), self.recipe.contract_path)

    def differs(self) -> bool:
        """Whether the contract is another than `contract build` would write now."""
        contract = Contract.of(self.recipe)
        return build(self.recipe, self.operators, contract).raw != contract.raw

    def bench(self) -> None:
        row = {"ours": 1.0, "unit": "ms/token", "against": {"name": "stock", "time": 2.0}}
        row |= {
            "ratio": 0.5,
            "target": 2.0,
            "met": True,
            "hardware": "toy (x)",
            "date": "2025-01-01",
        }
        works = ("rollout prefill, toy", "trainer score, toy")
        text = json.dumps([{**row, "work": work} for work in works])
        (self.root / "cases" / "bench.json").write_text(text)

    def write_up(self) -> None:
        (self.folder / "recipe.md").write_text(
            "# toy\n\n| weights | drawn |\n| series | one |\n"
            "| layouts | two |\n| needs | a core |\n"
            "\n## Run it\n\n```\nsamebits prove toy\n```\n\n## What is not shown\n\n- Much.\n"
        )
        (self.folder / "broke.md").write_text(
            "# toy\n\n## gemm: rows\n\n- **Cause**: order.\n- **Fix**: a hook.\n"
            "- **Guard**: `tests/ops/test_gemm.py`.\n"
        )


@pytest.fixture
def toy(checkout, operators, capsys) -> Toy:
    made = Toy(checkout, operators)
    capsys.readouterr()
    return made
