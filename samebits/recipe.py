"""A model case's `recipe.yaml`: everything a gate, an engine or a contract is told about a model.

Closed keys (`recipe.schema.json`), no floats: a real number is a decimal string, so that one
recipe has one digest. Loading needs no torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from samebits.contract import canonical
from samebits.errors import Refused

PUBLISHED = "config.json"  # in a case's folder: the model's configuration, as published or derived
# Entry of a derived one: the class it is the text model of, the published file, what is left out.
TEXT_ONLY = "samebits_text_only"
_T = TypeVar("_T")
# What a case can claim: the legs, and an RL run.
LEGS = (*"ABCDEFO", "rl")
_DECIMAL_FIELDS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe subset; a key given twice is refused rather than overwritten."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise Refused(
                    "SB0306",
                    seen=f"key {key!r} twice, {node.start_mark}".replace("\n", " "),
                    required="every key once",
                    hint="samebits explain SB0306",
                )
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Leg:
    """What one leg must show: `tokens` is the least number compared, `hazards` must all fire.

    `control` is `stock` or the name of a planted fault.
    """

    tokens: int
    hazards: tuple[str, ...]
    control: str
    options: Mapping[str, int]


@dataclass(frozen=True)
class Recipe:
    """One model case. `data` is the validated document; `path` the file it came from."""

    path: Path
    data: Mapping[str, Any]

    @property
    def case(self) -> str:
        """Name of the case."""
        return self.data["case"]

    @property
    def folder(self) -> Path:
        """Folder of the case."""
        return self.path.parent

    @property
    def contract_path(self) -> Path:
        """Where its contract is."""
        return self.folder / "contract.json"

    @property
    def evidence_path(self) -> Path:
        """Where its evidence is."""
        return self.folder / "evidence" / "evidence.json"

    @property
    def platform(self) -> str:
        """What the case computes on: `cpu`, or `sm90` for a Hopper GPU (`runtime.PLATFORMS`)."""
        return self.data.get("platform", "cpu")

    @property
    def architecture(self) -> str:
        """`llama`, `qwen2`, `qwen3` or `qwen3_5_text`."""
        return self.data["model"]["architecture"]

    @property
    def source(self) -> Mapping[str, Any]:
        """Where the weights come from: `kind` is `gguf-wheel` or `counter-hash`."""
        return self.data["model"]["source"]

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's dimensions as written: integers, booleans and decimal strings."""
        return self.data["model"]["config"]

    @property
    def published_layers(self) -> int | None:
        """Layers of the model whose published configuration lies beside the recipe; None without
        one.

        SB0920 where that says no number of layers.
        """
        return self._beside(lambda config: int(config["num_hidden_layers"]))

    @property
    def taken_out(self) -> tuple[str, ...] | None:
        """What its configuration was derived without (`case new --text-only`); None where it is as
        published, or none is there.

        SB0920 as of `published_layers`.
        """
        return self._beside(
            lambda config: tuple(config[TEXT_ONLY]["taken_out"]) if TEXT_ONLY in config else None
        )

    def _beside(self, read: Callable[[Mapping[str, Any]], _T]) -> _T | None:
        path = self.folder / PUBLISHED
        if not path.is_file():
            return None
        try:
            return read(json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError) as problem:
            raise Refused(
                "SB0920",
                seen=f"{path}: {type(problem).__name__}: {problem}",
                required="the config.json of a model on the Hugging Face hub, whole",
                hint="samebits explain SB0920",
            ) from None

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the case leaves out of its published model; SB0920 as of `published_layers`."""
        layers = self.published_layers or 0
        fewer = layers - self.config["num_hidden_layers"]
        few = (f"{fewer} of {layers} layers",) if fewer > 0 else ()
        return (*few, *(self.taken_out or ()))

    @property
    def scope(self) -> str:
        """What a verdict of this case is less than, in a few words; empty where it is nothing.

        As `proxy: 2 of 28 layers, drawn weights; not claimed: D, E, rl`.
        """
        layers = self.published_layers or 0
        mine = self.config["num_hidden_layers"]
        drawn = ["drawn weights"] if self.source["kind"] == "counter-hash" else []
        model = [f"proxy: {mine} of {layers} layers"] if mine < layers else []
        model += [*(["text model only"] if self.taken_out else []), *drawn]
        claimed = {*self.data["legs"], *(["rl"] if self.rl else [])}
        silent = [leg for leg in LEGS if leg not in claimed]
        legs = [f"not claimed: {', '.join(silent)}"] if silent else []
        return "; ".join([*filter(None, [", ".join(model)]), *legs])

    @property
    def series(self) -> Mapping[str, str]:
        """Upstream -> name of its patch series."""
        return self.data["series"]

    @property
    def leaves(self) -> int:
        """Leaves of a reduction over ranks."""
        return self.data["contract"]["reduction_leaves"]

    @property
    def attention_partition(self) -> int:
        """Keys in one partition of attention."""
        return self.data["contract"]["attention_partition"]

    @property
    def vocabulary_leaves(self) -> int:
        """Leaves of the sum over the vocabulary."""
        return self.data["contract"]["vocabulary_leaves"]

    @property
    def gdn_schedule(self) -> str | None:
        """`chunk_row` or `cpr`; None for a model without Gated DeltaNet layers."""
        return self.data["contract"].get("gdn_schedule")

    @property
    def trainer_tp(self) -> tuple[int, ...]:
        """Tensor-parallel sizes of the trainer to prove."""
        return tuple(self.data["layouts"]["trainer_tp"])

    @property
    def rollout_tp(self) -> tuple[int, ...]:
        """Tensor-parallel sizes of the rollout engine to prove."""
        return tuple(self.data["layouts"]["rollout_tp"])

    @property
    def engine(self) -> Mapping[str, int]:
        """Sizes that the rollout engine is started with."""
        return self.data["engine"]

    @property
    def legs(self) -> dict[str, Leg]:
        """What each leg must show, by its letter."""
        known = ("tokens", "hazards", "control")
        return {
            name: Leg(
                leg["tokens"],
                tuple(leg["hazards"]),
                leg["control"],
                {key: value for key, value in leg.items() if key not in known},
            )
            for name, leg in self.data["legs"].items()
        }

    @property
    def rl(self) -> Mapping[str, Any] | None:
        """Settings of the RL run; None for a case without one."""
        return self.data.get("rl")

    @property
    def refits_only(self) -> bool:
        """Whether the case claims leg E alone: then its RL run is all that runs."""
        return set(self.data["legs"]) == {"E"}

    @property
    def optimizer(self) -> str:
        """Optimizer of the RL run: `adam`, or `sgd` without momentum."""
        return (self.rl or {}).get("optimizer", "adam")

    @property
    def run(self) -> Mapping[str, int]:
        """Sizes of a recorded run that differ from `gates.sizes.Size.full`."""
        return self.data.get("run", {})

    @property
    def digest(self) -> str:
        """sha256 of the canonical document; comments and layout of the YAML do not count."""
        return canonical.digest(self.data)

    def hf_config(self) -> dict[str, Any]:
        """Arguments of the Hugging Face config class, decimal strings turned into floats."""
        values = dict(self.config)
        for name in _DECIMAL_FIELDS:
            if name in values:
                values[name] = float(values[name])
        return values


def decimal(value: float) -> str:
    """A real number as a recipe writes it: shortest decimal, whole numbers without a point, and no
    zero before an exponent (1e-6, where Python writes 1e-06)."""
    if float(value).is_integer():
        return str(int(value))
    return re.sub(r"e(-?)\+?0*", r"e\1", repr(float(value)))


def qualified(verdict: str, scope: str) -> str:
    """A verdict with the `Recipe.scope` that it holds in: `EQUAL (not claimed: D)`."""
    return f"{verdict} ({scope})" if scope else verdict


def schema() -> dict[str, Any]:
    """The JSON schema of a recipe."""
    return canonical.load_schema("samebits", "recipe.schema.json")


def cases_folder() -> Path:
    """`cases/` of the checkout whose patches and builds are used (`Workspace.find`)."""
    from samebits.patching.workspace import Workspace

    return Workspace.find().root / "cases"


def known_cases() -> list[str]:
    """Names of all cases that have a recipe; a folder that starts with `_` is no case."""
    found = cases_folder().glob("*/recipe.yaml")
    return sorted(p.parent.name for p in found if not p.parent.name.startswith("_"))


def find(case: str | Path) -> Path:
    """The recipe file of a case name, a case folder or a recipe file."""
    return _find(case).resolve()


def _find(case: str | Path) -> Path:
    """As `find`, before symbolic links are followed. A bare name is a case before it is a folder
    of the working directory; one that starts with `_` is a form to fill in, and no case."""
    given = Path(case)
    if os.sep not in str(case) and given.name not in ("recipe.yaml", "..", ""):
        cases = [] if given.name.startswith("_") else [cases_folder() / given]
        candidates = [folder / "recipe.yaml" for folder in (*cases, given)]
    else:
        candidates = [given, given / "recipe.yaml"]
    for candidate in candidates:
        if candidate.is_file() and candidate.name == "recipe.yaml":
            return Path(os.path.abspath(candidate))
    raise Refused(
        "SB0322",
        seen=f"no case {str(case)!r}",
        required=f"one of: {', '.join(known_cases()) or '(none found)'}; or a recipe.yaml",
        hint="samebits case list",
    )


def load(case: str | Path) -> Recipe:
    """Load and validate the recipe of a case (name, folder or file)."""
    asked = _find(case)
    path = asked.resolve()
    try:
        data = yaml.load(path.read_text(), _StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refused(
            "SB0314",
            seen=f"{path}: {' '.join(str(error).split())}",
            required="valid YAML",
            hint="samebits explain SB0314",
        ) from None
    canonical.encode(data, str(path))  # refuses floats before the schema can call them numbers
    canonical.check_schema(data, schema(), "SB0314", str(path))
    for name in _DECIMAL_FIELDS:
        if name in data["model"]["config"]:
            # A dimension has one spelling, or a recipe would differ from a contract by a zero.
            _decimal(data["model"]["config"][name], f"{path}, model/config/{name}")
            data["model"]["config"][name] = decimal(float(data["model"]["config"][name]))
    if "rl" in data:
        _decimal(data["rl"]["learning_rate"], f"{path}, rl/learning_rate")
    for place in (asked, path):
        _check_folder(data["case"], place)
    return Recipe(path, data)


def _check_folder(case: str, path: Path) -> None:
    """A case is called as its folder of `cases/`; one that starts with `_` is a form to fill in."""
    folder = path.parent
    if folder.parent.name != "cases" or folder.name == case or folder.name.startswith("_"):
        return
    raise Refused(
        "SB0324",
        seen=f"{path}: case {case}",
        required=f"case {folder.name}, the name of its folder",
        hint="samebits explain SB0324",
    )


def _decimal(text: str, where: str) -> None:
    try:
        ok = float(text) > 0 and float(text) != float("inf")
    except ValueError:
        ok = False
    if not ok:
        raise Refused(
            "SB0314",
            seen=f"{where} is {text!r}",
            required="a positive decimal number in quotes",
            hint="samebits explain SB0314",
        )
