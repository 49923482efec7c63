"""`samebits plan`: which layouts keep the order of every sum, what they take, what they cost.

From a recipe or a published configuration alone. Memory is counted from shapes; a slow-down is
shown only where a recorded benchmark measured it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits import recipe as recipes
from samebits.casework import engine, memory, published, text_model
from samebits.errors import Refused, word
from samebits.ops import registry
from samebits.recipe import PUBLISHED, TEXT_ONLY, Recipe

SIZES = (1, 2, 4, 8)  # of tensor parallelism; a plan has a power of two of leaves
_QK_NORM = ("qwen3", "qwen3_5_text")


@dataclass(frozen=True)
class Layout:
    """Ranks on each axis; `sp` is sequence parallelism inside the tensor-parallel group."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    cp: int = 1
    sp: bool = False


@dataclass(frozen=True)
class Model:
    """What is planned for: dimensions with all layers, and what a recipe has decided already.

    leaves       of sums over K and over the vocabulary; None where no recipe decides them
    schedule     of Gated DeltaNet
    platform     that keeps its states
    text_of      class whose text model this is; None where the model is all of the file
    taken_out    what was left out of the file
    hint         command that helps where there are gaps
    """

    name: str
    architecture: str
    config: Mapping[str, Any] | None
    gaps: tuple[published.Gap, ...] = ()
    leaves: int | None = None
    vocabulary_leaves: int | None = None
    schedule: str | None = None
    platform: str = "cpu"
    proved_layers: int | None = None
    text_of: str | None = None
    taken_out: tuple[str, ...] = ()
    hint: str = ""


def problems(model: Model, tp: int) -> list[str]:
    """Why `tp` ranks would not own whole heads, columns and subtrees; empty where they do."""
    config = model.config
    assert config is not None
    if tp < 1 or tp & (tp - 1):
        return [f"{tp} is no power of two, so no rank owns a whole subtree"]
    parts = {
        "attention heads": config["num_attention_heads"],
        "key-value heads": config["num_key_value_heads"],
        "FFN columns": config["intermediate_size"],
        "vocabulary rows": config["vocab_size"],
    }
    if config.get("full_attention_interval") is not None:
        parts["key heads of recurrent layers"] = config["linear_num_key_heads"]
        parts["value heads of recurrent layers"] = config["linear_num_value_heads"]
    if model.leaves is not None:
        parts["leaves of row-parallel sums"] = model.leaves
    if model.vocabulary_leaves is not None:
        parts["leaves of the vocabulary"] = model.vocabulary_leaves
    return [f"{count} {what} over {tp} ranks" for what, count in parts.items() if count % tp]


def _uncut(model: Model) -> list[str]:
    """Sums that the recipe's leaves do not divide."""
    config = model.config
    assert config is not None
    sums = {
        "attention output": config["num_attention_heads"] * config["head_dim"],
        "FFN": config["intermediate_size"],
    }
    if config.get("full_attention_interval") is not None:
        width = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        sums["recurrent output"] = width
    cut = [(n, s, model.leaves or 1) for n, s in sums.items()]
    cut.append(("vocabulary", config["vocab_size"], model.vocabulary_leaves or 1))
    return [f"{name} of {size} over {leaves} leaves" for name, size, leaves in cut if size % leaves]


def refused(model: Model, layout: Layout) -> list[str]:
    """Why a layout is not admissible: axes that nobody proved, and sums that it would reorder."""
    found = []
    for axis, name in (("pp", "pipeline"), ("cp", "context")):
        if getattr(layout, axis) != 1:
            found.append(f"{name} parallelism ({axis}={getattr(layout, axis)}) is not proved")
    if layout.sp:
        found.append("sequence parallelism is not proved")
    if layout.ep != 1:
        found.append(f"expert parallelism (ep={layout.ep}): no contract covers experts")
    return [*found, *_recurrent(model), *_uncut(model), *problems(model, layout.tp)]


def _recurrent(model: Model) -> list[str]:
    """What an engine refuses at its start in a model with recurrent layers."""
    config = model.config
    assert config is not None
    if config.get("full_attention_interval") is None:
        return []
    return [
        f"{name} {config[name]}: the rollout takes {published.HEAD_DIM} only"
        for name in ("linear_key_head_dim", "linear_value_head_dim")
        if config[name] != published.HEAD_DIM
    ]


def problems_of(recipe: Recipe) -> list[str]:
    """Why layouts that a recipe claims are not admissible; empty where all are."""
    model = of_recipe(recipe)
    found = [*_recurrent(model), *engine.problems(recipe), *_uncut(model)]
    for tp in sorted({*recipe.trainer_tp, *recipe.rollout_tp}):
        found += problems(model, tp)
    return found


def of_recipe(recipe: Recipe, config: Mapping[str, Any] | None = None) -> Model:
    """The model of a recipe; `config` are the dimensions to plan with, if others (all layers)."""
    return Model(
        name=recipe.case,
        architecture=recipe.architecture,
        config=recipe.config if config is None else config,
        leaves=recipe.leaves,
        vocabulary_leaves=recipe.vocabulary_leaves,
        schedule=recipe.gdn_schedule,
        platform=recipe.platform,
        proved_layers=recipe.config["num_hidden_layers"],
    )


def is_config(target: str) -> bool:
    """Whether a target is a configuration's file, not a recipe's or a case."""
    return Path(target).suffix == ".json"


def find(target: str, *, text_only: bool = False) -> Model:
    """The model of a case, a recipe.yaml or a config.json; of the last, on demand, its text model.

    A text model inside of a file is what is looked at in any case; without `text_only` what stands
    around it is a gap.
    """
    path = Path(target)
    if is_config(target):
        config = published.text_only(path)[0] if text_only else published.read(path)
        text = text_model.inside(config, str(path))
        gaps = tuple(published.gaps(config))
        name = published.architecture(config if text is None else text)
        derived = config.get(TEXT_ONLY, {})
        return Model(
            path.name,
            name,
            None if gaps else published.dimensions(config, path),
            gaps,
            schedule="chunk_row" if name == "qwen3_5_text" else None,
            text_of=config["architectures"][0] if text is not None else derived.get("of"),
            taken_out=tuple(derived.get("taken_out", ())),
            hint=published.cure(config, path, f"samebits plan {word(path)}") if gaps else "",
        )
    recipe = recipes.load(target)
    published.check_recipe(recipe)
    engine.check(recipe)
    beside = recipe.folder / PUBLISHED
    if beside.is_file():
        config = published.read(beside)
        gaps = tuple(published.gaps(config))
        if gaps:
            hint = "samebits explain SB0916"
            return Model(recipe.case, recipe.architecture, None, gaps, hint=hint)
        derived = config.get(TEXT_ONLY, {})
        return dataclasses.replace(
            of_recipe(recipe, published.dimensions(config, beside)),
            text_of=derived.get("of"),
            taken_out=tuple(derived.get("taken_out", ())),
        )
    return of_recipe(recipe)


def like(model: Model) -> list[str]:
    """Known cases with these dimensions, whatever their number of layers."""

    def rest(config: Mapping[str, Any]) -> dict[str, Any]:
        skipped = ("num_hidden_layers", "bos_token_id", "eos_token_id", "max_position_embeddings")
        return {
            name: float(value) if isinstance(value, str) else value
            for name, value in config.items()
            if name not in skipped
        }

    if model.config is None:
        return []
    found = []
    for case in recipes.known_cases():
        recipe = recipes.load(case)
        if recipe.architecture == model.architecture and rest(recipe.config) == rest(model.config):
            found.append(case)
    return found


def report(model: Model, layout: Layout, length: int) -> dict[str, Any]:
    """Everything that `samebits plan` says, for sequences of `length` tokens."""
    from samebits.casework.steps import rows_of

    known = published.known(model.architecture)
    data: dict[str, Any] = {
        "model": model.name,
        "architecture": model.architecture,
        "text_model": model.text_of and {"of": model.text_of, "taken_out": [*model.taken_out]},
        "regions": {
            "covered": list(published.covered(model.architecture)) if known else [],
            "missing": [{"region": gap.region, "because": gap.because} for gap in model.gaps],
        },
        "layout": {
            "tp": layout.tp,
            "ep": layout.ep,
            "pp": layout.pp,
            "cp": layout.cp,
            "sp": layout.sp,
            "refused": None,
        },
        "tensor_parallel": None,
        "memory": None,
        "overhead": [],
    }
    if model.config is None:
        return data
    data["layout"]["refused"] = refused(model, layout)
    data["tensor_parallel"] = {str(tp): problems(model, tp) for tp in SIZES}
    if not data["layout"]["refused"]:
        data["memory"] = _memory(model, layout.tp, length)
    data["overhead"] = [
        {
            "case": case,
            "work": row["work"],
            "ratio": row["ratio"],
            "hardware": row["hardware"],
            "date": row["date"],
        }
        for case in like(model)
        for row in rows_of(case)
    ]
    return data


def _memory(model: Model, tp: int, length: int) -> dict[str, Any]:
    """Bytes on one rank; what is the same in the stock engine is said once."""
    config = model.config
    assert config is not None
    biased = "gemm.bias" in registry.regions_of(model.architecture)
    count = memory.parameters(config, model.architecture in _QK_NORM, tp, qkv_bias=biased)
    found: dict[str, Any] = {
        "layers": config["num_hidden_layers"],
        "proved_layers": model.proved_layers,
        "weights_bf16": 2 * count,
        "kv_per_token": memory.kv_bytes(config, tp),
        "sequence_length": length,
        "kv_per_sequence": length * memory.kv_bytes(config, tp),
        "state_per_sequence": 0,
        "stock_state_per_sequence": 0,
    }
    if config.get("full_attention_interval") is not None:
        found["state_per_sequence"] = memory.state_bytes(
            config, model.schedule, tp, platform=model.platform
        )
        found["stock_state_per_sequence"] = memory.state_bytes(config, None, tp)
    return found


def check(model: Model, layout: Layout, target: str) -> None:
    """SB0916 for regions that no contract covers, SB0919 for a layout that is not admissible."""
    if model.gaps:
        raise Refused(
            "SB0916",
            seen=f"{model.name}: not covered: {'; '.join(map(str, model.gaps))}",
            required="a model whose regions all have an operator that both engines route to",
            hint=model.hint,
        )
    wrong = refused(model, layout)
    if wrong:
        raise Refused(
            "SB0919",
            seen=f"{model.name}: {'; '.join(wrong)}",
            required="what engines start with: ranks that own whole heads and whole subtrees",
            hint=f"samebits plan {word(target)}",
        )
