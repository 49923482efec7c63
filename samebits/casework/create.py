"""`samebits case new`: a case folder from the template, with the dimensions of a model."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from samebits import recipe as recipes
from samebits.casework import engine, ledger, published, text_model
from samebits.errors import Refused, word
from samebits.patching.series import Series
from samebits.patching.workspace import Workspace
from samebits.recipe import PUBLISHED, TEXT_ONLY

TEMPLATES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), "recipe.yaml"),
    "qwen3_5_text": "hybrid.yaml",
}
PAGES = ("recipe.md", "broke.md")
NAME_LENGTH = 64  # letters; names of files and of branches are made from it
# What a template says of its own dimensions; of published ones another line stands there.
_OF_TEMPLATE = (
    "# Dimensions: small ones of no published model; `case new --config` takes those of one.\n"
)
_LAYERS = 2  # of a dense proxy; a hybrid one has an interval of full attention


def create(
    case: str,
    *,
    config: Path | None = None,
    architecture: str | None = None,
    layers: int | None = None,
    series: str | None = None,
    text_only: bool = False,
) -> Path:
    """Make `cases/CASE` and return it; nothing is written unless all of it can be.

    config        published config.json: its dimensions, `layers` of its layers, and a copy of it
    architecture  instead: the template's dimensions
    series        patch series of all upstreams; default: what the template names
    text_only     take the text model out of `config`: the copy is derived, and the case's pages say
                  what was left out

    Refuses SB0915 (folder is there), SB0916 (regions that no operator covers), SB0920 (config),
    SB0314 (name, dimensions, more layers than there are), SB0102 (no such series).
    """
    folder = recipes.cases_folder() / case
    pattern = recipes.schema()["$defs"]["name"]["pattern"]
    if len(case) > NAME_LENGTH or not re.fullmatch(pattern, case):
        raise Refused(
            "SB0314",
            seen=f"case {case[:NAME_LENGTH]!r}, {len(case)} letters",
            required="lower case letters, digits, dots, hyphens and underscores, "
            f"{NAME_LENGTH} at most",
            hint="samebits case new --help",
        )
    if os.path.lexists(folder):
        raise Refused(
            "SB0915",
            seen=f"cases/{case}",
            required="a name that no case has",
            hint=f"samebits case status {word(case)}",
        )
    given = None if config is None else _given(case, config, text_only)
    text = _recipe(case, given, architecture, layers, series)
    template = recipes.cases_folder() / "_template"
    with (
        Workspace.find().writing(),
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{case}.") as made,
    ):
        draft = Path(made) / case
        draft.mkdir()
        (draft / "recipe.yaml").write_text(text)
        _check(draft / "recipe.yaml", case)
        for page in PAGES:
            (draft / page).write_text((template / page).read_text().replace("<model>", case))
        if given is not None and given.parts:
            sheet = draft / "recipe.md"
            sheet.write_text(_said(sheet.read_text(), given.parts))
            (draft / PUBLISHED).write_text(json.dumps(given.config, indent=1) + "\n")
        elif config is not None:
            shutil.copyfile(config, draft / PUBLISHED)
        ledger.write(draft / ledger.NAME, ledger.empty(case))
        try:
            draft.rename(folder)
        except OSError:  # somebody made it meanwhile
            raise Refused(
                "SB0915",
                seen=f"cases/{case}",
                required="a name that no case has",
                hint=f"samebits case status {word(case)}",
            ) from None
    return folder


@dataclass(frozen=True)
class _Given:
    """A configuration without gaps, where it was read, and what it was derived without."""

    config: Mapping[str, Any]
    path: Path
    parts: tuple[text_model.Part, ...] = ()


def _given(case: str, path: Path, text_only: bool) -> _Given:
    config, parts = published.text_only(path) if text_only else (published.read(path), ())
    published.refuse_gaps(config, path, case)
    return _Given(config, path, parts)


def _said(page: str, parts: tuple[text_model.Part, ...]) -> str:
    """A page `recipe.md` that lists under "What is not shown" what was taken out."""
    head = "## What is not shown\n\n"
    assert page.count(head) == 1
    return page.replace(head, head + "".join(f"- {part.line}\n" for part in parts))


def _check(file: Path, case: str) -> None:
    """Load a draft; a refusal names the case, as the draft is gone when it is read."""
    try:
        recipe = recipes.load(file)
        published.check_recipe(recipe)
        engine.check(recipe)
    except Refused as problem:
        raise Refused(
            problem.error_id,
            seen=problem.seen.replace(str(file.resolve()), f"recipe.yaml of {case}"),
            required=problem.required,
            hint="samebits case new --help",
        ) from None


def _recipe(
    case: str,
    given: _Given | None,
    architecture: str | None,
    layers: int | None,
    series: str | None,
) -> str:
    """Text of the recipe: that of the template, with what differs replaced block by block."""
    if given is not None:
        architecture = published.architecture(given.config)
    if architecture is None or not published.known(architecture):
        raise Refused(
            "SB0916",
            seen=f"architecture {architecture}",
            required=f"one of {', '.join(TEMPLATES)}",
            hint="samebits case new --help",
        )
    text = (recipes.cases_folder() / "_template" / TEMPLATES[architecture]).read_text()
    data = yaml.safe_load(text)
    data["model"]["architecture"] = architecture
    if given is not None:
        _take(data, published.dimensions(given.config, given.path), layers)
    elif layers is not None:
        data["model"]["config"]["num_hidden_layers"] = layers
    if series is not None:
        for upstream in data["series"]:
            Series(Workspace.find(), upstream).of(series)
        data["series"] = dict.fromkeys(data["series"], series)
    text = text.replace("case: my-model", f"case: {case}", 1)
    if given is not None:
        text = text.replace(_OF_TEMPLATE, _origin(given), 1)
    for name, value in yaml.safe_load(text).items():
        if name != "case" and value != data[name]:
            text = _replaced(text, name, data[name])
    return text


def _origin(given: _Given) -> str:
    """Comment of a recipe: whose dimensions these are."""
    if not given.parts:
        return f"# Dimensions: the published ones, of {PUBLISHED}.\n"
    derived = given.config[TEXT_ONLY]
    left_out = ", ".join(part.what for part in given.parts)
    return (
        f"# Dimensions: those of the text model of {derived['of']}. {PUBLISHED} was made\n"
        f"# by `case new --text-only` from the published file, sha256\n"
        f"# {derived['sha256']}\n"
        f"# Left out: {left_out}.\n"
    )


def _take(data: dict[str, Any], dims: Mapping[str, Any], layers: int | None) -> None:
    """Published dimensions with few layers, and the sizes of the run that follow from them."""
    config = dict(dims)
    few = config.get("full_attention_interval", _LAYERS)
    if (layers or 0) > dims["num_hidden_layers"]:
        raise Refused(
            "SB0314",
            seen=f"{layers} layers",
            required=f"at most {dims['num_hidden_layers']}, those of the published model",
            hint="samebits case new --help",
        )
    config["num_hidden_layers"] = min(layers or few, dims["num_hidden_layers"])
    data["model"]["config"] = config
    two = divisible(config, 2)
    data["layouts"] = {side: [1, 2] if two else [1] for side in data["layouts"]}
    if not two:
        del data["legs"]["D"]
    sums = (config["num_attention_heads"] * config["head_dim"], config["intermediate_size"])
    data["contract"]["reduction_leaves"] = 1 if any(n % 2 for n in sums) else 2
    data["contract"]["vocabulary_leaves"] = 1 if config["vocab_size"] % 2 else 2
    if "gdn_schedule" in data["contract"]:
        _size(data, config)


def divisible(config: Mapping[str, Any], size: int) -> bool:
    """Whether heads, sums and vocabulary divide evenly over `size` ranks."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    linear = ("linear_num_key_heads", "linear_num_value_heads")
    return all(config[name] % size == 0 for name in [*names, *(n for n in linear if n in config)])


def _size(data: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Sizes of a hybrid: a page of keys and values is no smaller than a layer's state."""
    from samebits.gates import pages

    platform = data.get("platform", "cpu")
    block = engine.page_tokens(config, data["contract"]["gdn_schedule"], platform)
    sizes = data["engine"]
    least = pages.engine(platform, block)
    sizes |= {name: max(sizes[name], value) for name, value in least.items()}
    sizes["block_size"] = block
    if pages.large(platform, block):
        data["run"] |= pages.RUN
        data["rl"]["steps"] = pages.RL_STEPS


class _Quoted(str):
    """A decimal: without quotes other readers of YAML would take it for a number."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Quoted, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def _quoted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _quoted(item) for name, item in value.items()}
    return _Quoted(value) if isinstance(value, str) and re.match(r"[\d.]", value) else value


def _replaced(text: str, name: str, value: Any) -> str:
    """`text` with the block of the top-level key `name` dumped anew; comments above it stay."""
    flat = all(not isinstance(item, dict | list) for item in value.values())
    body = yaml.dump(
        {name: _quoted(value)}, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=96
    )
    if not flat or len(body) > 96:
        body = yaml.dump({name: _quoted(value)}, Dumper=_Dumper, sort_keys=False, indent=2)
    pattern = re.compile(rf"^{name}:.*?(?=^[^\s]|\Z)", re.MULTILINE | re.DOTALL)
    return pattern.sub(lambda _: body, text, count=1)
