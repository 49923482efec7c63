"""The text model inside a published configuration: found to be judged, taken out where asked for.

A multimodal model's file holds that of its text model as `text_config`, without a class of its own.
What a text model alone does not need is taken out by name, and only where its absence moves no bit:

  tower              what turns images, videos or sound into embeddings; text has none
  rotary sections    every section of frequencies takes its angle from one of three rows of
                     positions. Of text all three rows are the running index (vLLM 0.24.0:
                     `_get_mrope_input_positions` without features, and
                     `get_next_input_positions_tensor` in decode), so that each choice among them,
                     in blocks or interleaved, gives the angles of one row. Held to vLLM's code by
                     `tests/engines/test_rotary_sections.py`
  multi-token layers predict tokens further ahead; the next token's logits do not read them
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.contract import canonical
from samebits.errors import Refused
from samebits.recipe import TEXT_ONLY

# Class -> that of its text model alone, which the engines know.
CLASSES = {"Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM"}
_AHEAD = ("mtp_", "num_nextn_predict_layers")
_TOWERS = {"vision": ("vision_", "image_", "video_"), "audio": ("audio_",)}
_ROPE = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class Part:
    """What was taken out: in a few words, and as a line of a case's page."""

    what: str
    line: str


def towers(config: Mapping[str, Any]) -> list[str]:
    """Which kinds of embeddings a file with a text model inside takes besides those of tokens."""
    return [
        kind
        for kind, starts in _TOWERS.items()
        if any(name.startswith(starts) and config[name] is not None for name in config)
    ]


def inside(config: Mapping[str, Any], what: str) -> dict[str, Any] | None:
    """The text model of a file that nests it, whole; None where nothing is nested.

    Entries that stand outside only, as a quantization's, belong to it too. SB0920 where an entry
    that dimensions or regions are read from says one thing outside and another inside.
    """
    text = config.get("text_config")
    if text is None:
        return None
    judged = canonical.load_schema("samebits.casework", "published.schema.json")["properties"]
    own = ("architectures", "model_type", "text_config")
    outside = {
        name: value
        for name, value in config.items()
        if name not in own and not name.startswith(sum(_TOWERS.values(), ()))
    }
    for name in sorted({*outside} & {*text} & {*judged}):
        if outside[name] != text[name]:
            raise Refused(
                "SB0920",
                seen=f"{what}: {name} is {outside[name]!r}, in text_config {text[name]!r}",
                required="one value of each entry",
                hint="samebits explain SB0920",
            )
    name = config["architectures"][0]
    return {**outside, **text, "architectures": [CLASSES.get(name, name)]}


def plain_sections(config: Mapping[str, Any]) -> bool:
    """Whether sections of a file's rotary embedding rotate text as one row of positions does.

    Only with unscaled frequencies, and where three sections are all of them: else vLLM and others
    cut in other places.
    """
    rope: Mapping[str, Any] = next((config[name] for name in _ROPE if config.get(name)), {})
    sections = rope.get("mrope_section")
    if rope.get("rope_type", rope.get("type", "default")) != "default" or not sections:
        return False
    heads = config.get("num_attention_heads")
    size = config.get("head_dim") or (config.get("hidden_size") or 0) // (heads or 1)
    share = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1
    counted = all(isinstance(count, int) and count > 0 for count in sections)
    return counted and len(sections) == 3 and 2 * sum(sections) == int(size * share)


def taken_out(config: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], tuple[Part, ...]]:
    """The text model alone and what was left out of the file; the file itself where that is all.

    What is not known to move no bit stays, and is a gap like any other.
    """
    text = inside(config, str(path))
    name = config["architectures"][0]
    parts = []
    if text is not None:
        kinds = " and ".join(towers(config)) or "other"
        line = f"What turns anything but tokens into embeddings ({kinds}) in `{name}`."
        parts.append(Part(f"{kinds} tower", line))
    model = dict(config if text is None else text)
    if plain_sections(model):
        entry = next(entry for entry in _ROPE if model.get(entry))
        sections = model[entry]["mrope_section"]
        model[entry] = {
            key: value for key, value in model[entry].items() if not key.startswith("mrope_")
        }
        line = (
            f"Prompts with image or video tokens: `mrope_section` {sections} is left out, because "
            "text has three equal rows of positions, whose sections rotate as plain positions do."
        )
        parts.append(Part("rotary sections", line))
    ahead = [model.pop(key) for key in [*model] if key.startswith(_AHEAD)]
    if any(ahead):
        parts.append(
            Part(
                "multi-token prediction",
                "Layers that predict tokens further ahead; no logits of the next token read them.",
            )
        )
    if not parts:
        return dict(config), ()
    before = model.pop(TEXT_ONLY, {"of": name, "taken_out": []})  # of a file that is derived itself
    derived = {
        "of": before["of"],
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "taken_out": [*before["taken_out"], *(part.what for part in parts)],
    }
    return {"architectures": model.pop("architectures"), TEXT_ONLY: derived, **model}, tuple(parts)
