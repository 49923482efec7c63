"""A published `config.json`: which regions its arithmetic needs, and the dimensions of a recipe.

Reads the configuration alone, by the names that Hugging Face gives its entries. An entry that asks
for arithmetic no operator has is named together with the region that is missing; what is not in
`samebits.ops.registry` cannot be bound by a contract.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits import recipe as recipes
from samebits.casework import text_model
from samebits.contract import canonical
from samebits.contract.dims import architecture_of
from samebits.errors import Refused, word
from samebits.ops import registry
from samebits.recipe import Recipe, schema

HEAD_DIM = 128  # of linear attention: the only size that both engines are proved with
_SILU = ("silu", "swish")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED_EXPERTS = ("n_shared_experts", "shared_expert_intermediate_size", "moe_num_shared_experts")
# Entry -> region; the last of them also with a bias on a sum over ranks.
_BIASES = {
    "qkv_bias": "gemm.bias",
    "attention_bias": "gemm.row_bias",
    "mlp_bias": "gemm.row_bias",
    "use_bias": "gemm.row_bias",
}
# Classes whose log-probabilities are computed as those of an architecture that contracts know.
# MiMo has Qwen2's layers; what it has besides predicts tokens further ahead, and is not read.
_ALIKE = {"MiMoForCausalLM": "qwen2"}
_LAYERS = {"sliding_attention": "attention.window", "chunked_attention": "attention.chunked"}
# Entry -> region, where any value but the neutral ones moves bits.
_SCALES = {
    "final_logit_softcapping": ("logits.softcap", (None,)),
    "attn_logit_softcapping": ("attention.softcap", (None,)),
    "logit_scale": ("logits.scale", (None, 1, 1.0)),
    "logits_scaling": ("logits.scale", (None, 1, 1.0)),
    "embedding_multiplier": ("embedding.scale", (None, 1, 1.0)),
    "scale_emb": ("embedding.scale", (None, 1, 1.0)),
    "residual_multiplier": ("residual.scale", (None, 1, 1.0)),
    "layer_scale": ("residual.scale", (None, False)),
    "attention_multiplier": ("attention.scale", (None,)),
    "query_pre_attn_scalar": ("attention.scale", (None,)),
}
# Entry whose presence asks for a region.
_PRESENT = {
    "kv_lora_rank": "attention.mla",
    "index_topk": "attention.sparse",
    "dual_chunk_attention_config": "attention.chunked",
    "linear_attn_config": "kda.core",
    "quantization_config": "gemm.quantized",
    "vision_config": "vision.encoder",
    "audio_config": "audio.encoder",
}
_MAMBA = ("mamba_d_state", "ssm_state_size", "state_size", "mamba_num_heads")
_IMPLIED = {  # model type -> what its code does without an entry that says so
    "qwen2": ("gemm.bias", "of queries, keys and values, in another architecture's class"),
    "gpt_oss": ("attention.sink", "one logit per head"),
    "gemma2": ("embedding.scale", "by the root of hidden_size"),
    "gemma3_text": ("embedding.scale", "by the root of hidden_size"),
}


@dataclass(frozen=True)
class Gap:
    """A region that keeps a contract from covering a model, and what asks for it.

    Either no operator computes it, or one does and neither engine routes a layer to it.
    """

    region: str
    because: str

    def routed(self) -> Gap:
        """The same, saying so where an operator is there and its route is not."""
        if self.region not in registry.UNROUTED:
            return self
        return Gap(self.region, f"{self.because}; an operator exists, neither engine routes to it")

    def __str__(self) -> str:
        return f"{self.region} ({self.because})"


def read(path: Path) -> dict[str, Any]:
    """A `config.json`; SB0920 for what is no JSON, no model, or has a value that no model has."""
    raw = canonical.read(path, "config.json", "samebits case new --help")
    try:
        config = json.loads(raw, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as problem:
        raise _bad(path, f"{type(problem).__name__}: {problem}") from None
    check(config, "SB0920", str(path))
    if (text := text_model.inside(config, str(path))) is not None:
        check(text, "SB0920", f"{path}, text_config")
    return config


def text_only(path: Path) -> tuple[dict[str, Any], tuple[text_model.Part, ...]]:
    """The text model of a `config.json`, and what was left out; errors as of `read`."""
    return text_model.taken_out(read(path), path)


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"the number {literal[:20]} is not finite")
    return value


def check(config: Any, error_id: str, what: str) -> None:
    """Refuse types and sizes that no model has, and heads that do not go together.

    config   a published configuration, or what a recipe says in its words (`Recipe.hf_config`
             with `architectures`): one rule for both
    """
    form = canonical.load_schema("samebits.casework", "published.schema.json")
    required = "entries of the types, and within the bounds, of casework/published.schema.json"
    try:
        canonical.check_schema(config, form, error_id, what)
    except Refused as problem:
        raise Refused(error_id, seen=problem.seen, required=required, hint=problem.hint) from None
    wrong = [*_fractions(config, form), *_uneven(config)]
    if wrong:
        raise Refused(
            error_id,
            seen=f"{what}: {wrong[0]}",
            required=required,
            hint=f"samebits explain {error_id}",
        )


def check_recipe(recipe: Recipe) -> None:
    """SB0314 where a recipe's dimensions are of no model, by the rule of a published one."""
    config = {"architectures": [recipe.architecture], **recipe.hf_config()}
    check(config, "SB0314", f"{recipe.path}, model/config")


def _fractions(config: Mapping[str, Any], form: Mapping[str, Any]) -> Iterator[str]:
    """JSON schema takes 576.0 for an integer; sizes are counted with integers only."""
    for name, entry in form["properties"].items():
        kind = form["$defs"].get(entry.get("$ref", "").rpartition("/")[2], {}).get("type", [])
        if "integer" in kind and isinstance(config.get(name), float):
            yield f"{name} is {config[name]}, not written as an integer"


def _uneven(config: Mapping[str, Any]) -> Iterator[str]:
    """Sizes of which one has to be a multiple of the other, and are not."""
    pairs = [
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ]
    if config.get("head_dim") is None:
        pairs.append(("hidden_size", "num_attention_heads"))
    for whole, part in pairs:
        if (config.get(whole) or 0) % (config.get(part) or 1):
            yield f"{whole} {config[whole]} is no multiple of {part} {config[part]}"
    width = (config.get("head_dim") or 0) * (config.get("num_attention_heads") or 0)
    if architecture(config) == "qwen2" and width not in (0, config.get("hidden_size")):
        yield f"heads of {config['head_dim']}: in qwen2 one has hidden_size / num_attention_heads"


def _bad(path: Path, seen: str) -> Refused:
    return Refused(
        "SB0920",
        seen=f"{path}: {seen}",
        required="the config.json of a model on the Hugging Face hub, whole",
        hint="samebits explain SB0920",
    )


def architecture(config: Mapping[str, Any]) -> str:
    """The recipe's name of the architecture, or the class that the configuration names."""
    name = config["architectures"][0]
    return _ALIKE.get(name, architecture_of(name))


def known(name: str) -> bool:
    """Whether contracts and engines know an architecture by this name."""
    return name in schema()["properties"]["model"]["properties"]["architecture"]["enum"]


def covered(name: str) -> tuple[str, ...]:
    """The regions of an architecture that an operator is registered for; loads all operators."""
    installed = registry.implementations("cpu")
    return tuple(region for region in registry.regions_of(name) if region in installed)


def gaps(config: Mapping[str, Any]) -> list[Gap]:
    """Everything that keeps a contract from covering this model, in forward order of finding.

    Of a file with a text model inside: its gaps, behind those of what stands around it.
    """
    text = text_model.inside(config, recipes.PUBLISHED)
    if text is not None:
        name = config["architectures"][0]
        around = [
            Gap(f"{kind}.encoder", f"{name} around its text model")
            for kind in text_model.towers(config)
        ]
        around = around or [Gap("engine hooks", f"{name} is more than its text model")]
        return [gap for gap in dict.fromkeys([*around, *gaps(text)])]
    name = architecture(config)
    found = [*_gaps(config, name)]
    if known(name):
        bound = covered(name)
        found += [
            Gap(r, "of this architecture") for r in registry.regions_of(name) if r not in bound
        ]
    else:
        found.append(Gap("engine hooks", f"neither engine's hooks know {name}"))
    return list(dict.fromkeys(gap.routed() for gap in found))


def cure(config: Mapping[str, Any], path: Path, command: str) -> str:
    """Hint for a configuration with gaps: `command` for its text model alone, where that has none.

    command    with `--text-only` still to follow
    """
    model, parts = text_model.taken_out(config, path)
    return f"{command} --text-only" if parts and not gaps(model) else "samebits explain SB0916"


def refuse_gaps(config: Mapping[str, Any], path: Path, case: str) -> None:
    """SB0916 with every gap of a configuration that `case` was to be made of."""
    found = gaps(config)
    if found:
        raise Refused(
            "SB0916",
            seen=f"{path.name}: not covered: {'; '.join(map(str, found))}",
            required=f"regions that an operator covers: {', '.join(registry.REGIONS)}",
            hint=cure(config, path, f"samebits case new {word(case)} --config {word(path)}"),
        )


def _gaps(config: Mapping[str, Any], name: str) -> Iterator[Gap]:
    for entry, region in _PRESENT.items():
        if config.get(entry) is not None:
            yield Gap(region, entry)
    implied = ("attention_bias", "qkv_bias") if name == "qwen2" else ()
    for entry, region in _BIASES.items():
        if config.get(entry) and entry not in implied:
            yield Gap(region, f"{entry}=true")
    if config.get("model_type") in _IMPLIED and config["model_type"] != name:
        region, why = _IMPLIED[config["model_type"]]
        yield Gap(region, f"model_type {config['model_type']}: {why}")
    if config.get("rms_norm_eps") is None:
        yield Gap("norm.layer", "no rms_norm_eps")
    yield from _attention_gaps(config, name)
    yield from _rope_gaps(config, name)
    activation = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    if activation not in _SILU:
        yield Gap(f"act.{activation}_mul", f"hidden_act={activation}")
    yield from _expert_gaps(config)
    for entry, (region, neutral) in _SCALES.items():
        if config.get(entry) not in neutral:
            yield Gap(region, f"{entry}={config[entry]}")
    yield from _recurrent_gaps(config, name)


def _attention_gaps(config: Mapping[str, Any], name: str) -> Iterator[Gap]:
    window = config.get("sliding_window")
    if config.get("use_sliding_window", window is not None) and window:
        yield Gap("attention.window", f"sliding_window={window}")
    for kind in sorted(set(config.get("layer_types") or ()) & set(_LAYERS)):
        yield Gap(_LAYERS[kind], f"layer_types: {kind}")
    if not config.get("is_causal", True):
        yield Gap("attention.whole", "is_causal=false")
    if config.get("qk_norm"):
        yield Gap("norm.rms", f"qk_norm=true in {name}")
    if config.get("is_encoder_decoder"):
        yield Gap("attention.cross", "is_encoder_decoder=true")
    gated = name == "qwen3_5_text"
    if bool(config.get("attn_output_gate", gated)) != gated:
        wanted = "without" if gated else "with"
        yield Gap("attention.gate", f"attention {wanted} an output gate in {name}")
    if config.get("output_gate_type", "silu") not in _SILU:
        yield Gap("norm.gated", f"output_gate_type={config['output_gate_type']}")


def _rope_gaps(config: Mapping[str, Any], name: str) -> Iterator[Gap]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        yield Gap("rope.scaled", f"rope_type={kind}")
    if "mrope_section" in rope:
        yield Gap("rope.sections", f"mrope_section={rope['mrope_section']}")
    share = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1
    if share != 1 and name != "qwen3_5_text":
        yield Gap("rope.partial", f"partial_rotary_factor={share}")


def _expert_gaps(config: Mapping[str, Any]) -> Iterator[Gap]:
    for entry in _EXPERTS:
        if (config.get(entry) or 0) > 1:
            for region in ("moe.route", "moe.experts", "moe.combine"):
                yield Gap(region, f"{entry}={config[entry]}")
    for entry in _SHARED_EXPERTS:
        if config.get(entry):
            yield Gap("moe.shared", f"{entry}={config[entry]}")


def _recurrent_gaps(config: Mapping[str, Any], name: str) -> Iterator[Gap]:
    for entry in _MAMBA:
        if config.get(entry):
            yield Gap("mamba.core", f"{entry}={config[entry]}")
    kinds = set(config.get("layer_types") or ())
    if "linear_attention" in kinds and name != "qwen3_5_text":
        yield Gap("gdn.core", f"layer_types: linear_attention in {name}")
    for entry in ("linear_key_head_dim", "linear_value_head_dim"):
        if config.get(entry, HEAD_DIM) != HEAD_DIM:
            yield Gap("gdn.core", f"{entry}={config[entry]}, proved with {HEAD_DIM}")


# --- dimensions -----------------------------------------------------------------------------------


def dimensions(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The `model.config` of a recipe, from a configuration without gaps; SB0920 where one lacks."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values: dict[str, Any] = dict(config)
    heads = config.get("num_attention_heads")
    if heads:
        values["num_key_value_heads"] = config.get("num_key_value_heads") or heads
        values["head_dim"] = config.get("head_dim") or config.get("hidden_size", 0) // heads
    values["rope_theta"] = config.get("rope_theta") or rope.get("rope_theta") or 10000
    share = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor")
    values["partial_rotary_factor"] = share
    values["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", False))
    listed = _interval(config.get("layer_types"), config.get("num_hidden_layers"), path)
    stated = values.get("full_attention_interval")
    if None not in (listed, stated) and listed != stated:
        raise _bad(path, f"full_attention_interval {stated}, and {listed} by layer_types")
    values["full_attention_interval"] = listed if stated is None else stated
    for name in ("bos_token_id", "eos_token_id"):
        first = values.get(name)
        values[name] = first[0] if isinstance(first, list) and first else first
    fields = schema()["properties"]["model"]["properties"]["config"]
    hybrid = architecture(config) == "qwen3_5_text"
    only_hybrid = schema()["else"]["properties"]["model"]["properties"]["config"]["properties"]
    wanted = [n for n in fields["properties"] if hybrid or n not in only_hybrid]
    needed = {*fields["required"], *(only_hybrid if hybrid else ())}
    found: dict[str, Any] = {}
    for name in wanted:
        value = values.get(name)
        if value is None and name in needed:
            raise _bad(path, f"no {name}")
        if value is not None:
            real = fields["properties"][name] == {"$ref": "#/$defs/decimal"}
            found[name] = recipes.decimal(value) if real else value
    return found


def _interval(types: list[str] | None, layers: Any, path: Path) -> int | None:
    """Every how many layers one has full attention; None where `layer_types` says nothing of it."""
    if not types or "linear_attention" not in types:
        return None
    interval = types.index("full_attention") + 1 if "full_attention" in types else 0
    wanted = [
        ("full" if interval and (i + 1) % interval == 0 else "linear") for i in range(len(types))
    ]
    if [kind.partition("_")[0] for kind in types] != wanted:
        raise _bad(path, "layer_types without a regular interval of full attention")
    if len(types) != layers:
        raise _bad(path, f"{len(types)} layer_types for {layers} layers")
    return interval


def differences(
    config: Mapping[str, Any], recipe_config: Mapping[str, Any], path: Path
) -> list[str]:
    """Where a recipe's dimensions are not the published ones; the number of layers may be less."""
    published = dimensions(config, path)
    found = []
    for name, value in published.items():
        mine = recipe_config.get(name)
        same = float(mine or 0) == float(value) if isinstance(value, str) else mine == value
        if name == "num_hidden_layers":
            same = isinstance(mine, int) and 1 <= mine <= value
        if not same:
            found.append(f"{name} is {mine}, published {value}")
    return found
