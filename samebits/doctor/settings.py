"""Check the sampling and engine settings of a verl config or any JSON or YAML file.

Names are looked up wherever they stand in the file (verl nests them under
`actor_rollout_ref.rollout`), and each is judged at its own place; settings that the checks do not
know are named, not judged. A case's recipe holds no such settings: its runs fix them.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from samebits.doctor.finding import Finding
from samebits.errors import Refused, word

# name -> (accepted values, severity of any other, why)
_RULES: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "top_p": ((1,), "problem", "a cut distribution is not the one that the trainer scores"),
    "top_k": (
        (-1, 0, None),
        "problem",
        "a cut distribution is not the one that the trainer scores",
    ),
    "min_p": ((0, None), "problem", "a cut distribution is not the one that the trainer scores"),
    "repetition_penalty": ((1, None), "problem", "the trainer does not apply penalties"),
    "presence_penalty": ((0, None), "problem", "the trainer does not apply penalties"),
    "frequency_penalty": ((0, None), "problem", "the trainer does not apply penalties"),
    "logit_bias": ((None,), "problem", "the trainer does not apply a bias"),
    "logits_processors": ((None, ()), "problem", "the trainer does not apply processors"),
    "quantization": ((None, "none"), "problem", "the trainer computes with bf16 weights"),
    "kv_cache_dtype": (
        ("auto", "bfloat16"),
        "problem",
        "rounded keys and values differ from the trainer's",
    ),
    "dtype": (("auto", "bfloat16"), "problem", "schedules are written for bf16"),
    "mamba_ssm_cache_dtype": (
        ("float32",),
        "problem",
        "`auto` keeps recurrent state in bf16 and rounds it at every step",
    ),
    "calculate_log_probs": (
        (True,),
        "problem",
        "without it verl keeps no rollout values to compare",
    ),
    "bypass_mode": ((False,), "problem", "the trainer's values are then copies of the rollout's"),
    "full_determinism": (
        (False,),
        "warning",
        "sets VLLM_BATCH_INVARIANT, which aborts on hybrids and equals no trainer",
    ),
    "enforce_eager": ((True,), "warning", "compiled regions may be fused anew; prove both modes"),
    "speculative_config": ((None,), "problem", "draft and target rows take other kernels"),
    "enable_lora": ((False, None), "problem", "merged and unmerged adapters round differently"),
}
_LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_NAMED = 20  # settings that one finding lists
_KNOWN = {*_RULES, "temperature", "logprobs_mode"}
# Sampling and engines that a verl config also holds, and whose values are compared with nothing.
_SKIPPED = ("val_kwargs", "critic", "reward", "reward_model", "teacher_models")


def read_settings(path: Path) -> dict[str, Any]:
    """Known settings of a file by their place in it, `actor_rollout_ref.rollout.top_p`.

    Left out are settings that are null (the engine's default) or a reference (`${..}`) to another
    one. Raises Refused SB1005 when the file cannot be read or holds none.
    """
    found = {place: value for place, value in _leaves(_parsed(path), ()) if _is_known(place)}
    if not found:
        raise _unusable(path, "none of the settings that are checked")
    return {
        place: value
        for place, value in found.items()
        if value is not None and not str(value).startswith("${")
    }


def check_names(path: Path) -> list[Finding]:
    """Findings about the settings of a file that no check knows: one for each that is spelled
    nearly like a known one, and one that names the others. Errors as in `read_settings`."""
    unknown = [place for place, _ in _leaves(_parsed(path), ()) if not _is_known(place)]
    findings, others = [], []
    for place in unknown:
        name = place.rpartition(".")[2]
        near = difflib.get_close_matches(name, _KNOWN, 1, cutoff=0.85)
        if near:
            findings.append(
                Finding(
                    place,
                    "warning",
                    "no check knows this name",
                    f"{near[0]}, if that is what is meant",
                    _line_of(name, path),
                )
            )
        else:
            others.append(place)
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        seen = f"not checked: {', '.join(others[:_NAMED])}{more}"
        findings.append(Finding(str(path), "note", seen))
    return findings


def _parsed(path: Path) -> Any:
    try:
        text = path.read_text()
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as problem:
        raise _unusable(path, " ".join(str(problem).split())) from None


def _is_known(place: str) -> bool:
    return place.rpartition(".")[2] in _KNOWN


def _line_of(name: str, path: Path, value: Any = None) -> str:
    """The command that shows where a setting stands, and what to write there."""
    wanted = "" if value is None else f"  # write {value} there"
    return f"grep -n {word(name)} {word(path)}{wanted}"


def _leaves(node: Any, place: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from _leaves(item, (*place, str(number)))
    elif isinstance(node, dict):
        for name, value in node.items():
            if name in _SKIPPED:
                continue
            if name in _KNOWN:
                yield ".".join((*place, name)), value
            else:
                yield from _leaves(value, (*place, str(name)))
    elif place:
        yield ".".join(place), node


def check_settings(settings: dict[str, Any], file: Path = Path("SETTINGS")) -> list[Finding]:
    """One finding per setting of `file`, each judged at its own place."""
    findings: list[Finding] = []
    for place, value in settings.items():
        name = place.rpartition(".")[2]
        if name == "logprobs_mode":
            findings.append(_mode(place, value, file))
        elif name == "temperature":
            findings.append(_temperature(place, value, _mode_of(settings, place), file))
        else:
            accepted, severity, why = _RULES[name]
            if _is_one_of(value, accepted):
                findings.append(Finding(place, "ok", str(value)))
                continue
            required = " or ".join(str(v) for v in accepted if v != ())
            fix = _line_of(name, file, _written(accepted[0]))
            findings.append(Finding(place, severity, f"{value}: {why}", required, fix))
    return findings


def _written(value: Any) -> str:
    """A value as JSON and YAML spell it."""
    return value if isinstance(value, str) else json.dumps(value)


def _is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    if isinstance(value, list):
        value = tuple(value)
    return any(
        value == good and isinstance(value, bool) == isinstance(good, bool) for good in accepted
    )


def _mode_of(settings: dict[str, Any], place: str) -> Any:
    """The `logprobs_mode` beside a setting, else the only one of the file."""
    beside = f"{place.rpartition('.')[0]}.logprobs_mode".lstrip(".")
    modes = [v for name, v in settings.items() if name.rpartition(".")[2] == "logprobs_mode"]
    return settings.get(beside, modes[0] if len(modes) == 1 else None)


def _mode(place: str, mode: Any, file: Path) -> Finding:
    if mode in _LOGPROBS_MODES:
        return Finding(place, "ok", str(mode))
    required, fix = " or ".join(_LOGPROBS_MODES), _line_of("logprobs_mode", file, "raw_logprobs")
    return Finding(place, "problem", str(mode), required, fix)


def _temperature(place: str, temperature: Any, mode: Any, file: Path) -> Finding:
    if temperature == 1 and not isinstance(temperature, bool):
        return Finding(place, "ok", str(temperature))
    fix = _line_of("temperature", file, 1)
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        return Finding(place, "problem", f"{temperature} is no temperature", "1", fix)
    if mode == "processed_logprobs" and temperature > 0:
        seen = f"{temperature} with processed log-probabilities"
        required = "the trainer divides its logits by the same number"
        return Finding(place, "warning", seen, required, fix)
    seen = f"{temperature}: raw log-probabilities are taken before the temperature"
    return Finding(place, "problem", seen, "1", fix)


def _unusable(path: Path, problem: str) -> Refused:
    return Refused(
        "SB1005",
        seen=f"{path}: {problem}",
        required=f"JSON or YAML with some of: {', '.join(sorted(_KNOWN))}",
        hint="samebits doctor --help",
    )
