"""Check the sampling and engine settings of a recipe, a verl config or any JSON or YAML file.

Names are looked up wherever they stand in the file (verl nests them under
`actor_rollout_ref.rollout`); settings that the checks do not know are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from samebits.doctor.finding import Finding
from samebits.errors import Refused

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
_KNOWN = {*_RULES, "temperature", "logprobs_mode"}
# verl keeps validation's own sampling in the same file; it is not trained on.
_SKIPPED = ("val_kwargs",)


def read_settings(path: Path) -> dict[str, Any]:
    """Known settings of a file. Raises Refused SB1005 when it cannot be read or holds none."""
    try:
        text = path.read_text()
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as problem:
        raise _unusable(path, " ".join(str(problem).split())) from None
    found: dict[str, Any] = {}
    for name, value in _leaves(data):
        if name in _KNOWN and found.setdefault(name, value) != value:
            raise _unusable(path, f"{name} is both {found[name]!r} and {value!r}")
    if not found:
        raise _unusable(path, "none of the settings that are checked")
    return found


def _leaves(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, list):
        for item in node:
            yield from _leaves(item)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name in _SKIPPED:
                continue
            if name in _KNOWN:
                yield name, value
            else:
                yield from _leaves(value)


def check_settings(settings: dict[str, Any]) -> list[Finding]:
    """One finding per known setting."""
    findings = list(_temperature(settings))
    for name, (accepted, severity, why) in _RULES.items():
        if name not in settings:
            continue
        value = settings[name]
        if _is_one_of(value, accepted):
            findings.append(Finding(name, "ok", str(value)))
        else:
            required = " or ".join(str(v) for v in accepted if v != ())
            fix = f"set {name}={accepted[0]}"
            findings.append(Finding(name, severity, f"{value}: {why}", required, fix))
    return findings


def _is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    if isinstance(value, list):
        value = tuple(value)
    return any(
        value == good and isinstance(value, bool) == isinstance(good, bool) for good in accepted
    )


def _temperature(settings: dict[str, Any]) -> Iterator[Finding]:
    mode = settings.get("logprobs_mode")
    if mode is not None:
        if mode in _LOGPROBS_MODES:
            yield Finding("logprobs_mode", "ok", str(mode))
        else:
            required, fix = " or ".join(_LOGPROBS_MODES), "set logprobs_mode=raw_logprobs"
            yield Finding("logprobs_mode", "problem", str(mode), required, fix)
    temperature = settings.get("temperature", 1)
    if temperature == 1 and not isinstance(temperature, bool):
        if "temperature" in settings:
            yield Finding("temperature", "ok", str(temperature))
        return
    if mode == "processed_logprobs" and isinstance(temperature, int | float) and temperature > 0:
        seen = f"{temperature} with processed log-probabilities"
        required, fix = "the trainer divides its logits by the same number", "set temperature=1"
        yield Finding("temperature", "warning", seen, required, fix)
    else:
        seen = f"{temperature}: raw log-probabilities are taken before the temperature"
        yield Finding("temperature", "problem", seen, "1", "set temperature=1")


def _unusable(path: Path, problem: str) -> Refused:
    return Refused(
        "SB1005",
        seen=f"{path}: {problem}",
        required=f"JSON or YAML with some of: {', '.join(sorted(_KNOWN))}",
        hint="samebits doctor --help",
    )
