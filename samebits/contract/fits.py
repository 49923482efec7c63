"""What a recipe decides of its contract: `build` writes it, a loaded contract must still say it.

Reads no operator and no torch, so that a case is checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from samebits.contract import canonical
from samebits.contract.dims import dims_of

if TYPE_CHECKING:
    from samebits.recipe import Recipe

# What either Gated DeltaNet schedule fixes on a CPU in the regions of a recurrent layer: all their
# constants but the schedule's name. Operators register the same; `build` refuses (SB0319) where
# they do not.
GDN: Mapping[str, Mapping[str, int | str]] = {
    "gdn.conv": {"activation": "silu", "exp": "exp32", "window": "bf16"},
    "gdn.l2_norm": {"lanes": 16},
    "gdn.gate": {"A_log": "fp32", "beta": "fp32", "exp": "exp32"},
    "gdn.core": {
        "chunk": 64,
        "block": 16,
        "boundary_chained": "fp32",
        "boundary_consumed": "bf16; for o of cpr fp32",
        "output": "fp32; of cpr bf16",
        "g": "fp32",
        "beta": "fp32",
    },
}

# On Hopper: as there, but squares of a row are added to their neighbours and then by halves.
GDN_SM90: Mapping[str, Mapping[str, int | str]] = {**GDN, "gdn.l2_norm": {"near": 4}}


def model_of(recipe: Recipe) -> dict[str, Any]:
    """Section `model`: case, architecture, dimensions, and the digest of all that is said of it."""
    dims = dims_of(recipe.config, recipe.architecture)
    return {
        "case": recipe.case,
        "architecture": recipe.architecture,
        "dims": dims,
        "dims_digest": canonical.digest(dims),
        "config_digest": canonical.digest(recipe.data["model"]),
    }


def platform_of(recipe: Recipe) -> dict[str, str]:
    """Field `platform`; none for the CPU, which is what a contract without one is for."""
    return {} if recipe.platform == "cpu" else {"platform": recipe.platform}


def deployment_of(recipe: Recipe) -> dict[str, int | str]:
    """Section `deployment`: sizes that the engine is started with, and how weights travel."""
    return dict(recipe.engine) | {"weight_transport": "shared_memory"}


def sizes_of(recipe: Recipe) -> dict[str, list[int]]:
    """Claimed tensor-parallel sizes of each engine."""
    return {"trainer_tp": sorted(recipe.trainer_tp), "rollout_tp": sorted(recipe.rollout_tp)}


def decisions_of(recipe: Recipe) -> dict[str, Mapping[str, Any]]:
    """Region -> constants that the recipe decides, by itself or by its schedule (`GDN`)."""
    eps = {"eps": canonical.float_bits(float(recipe.config["rms_norm_eps"]))}
    return {
        "gemm.row": {"leaves": recipe.leaves},
        "logprob": {"leaves": recipe.vocabulary_leaves},
        "attention": {"partition": recipe.attention_partition},
        "norm.rms": eps,
        "norm.rms_zero_centred": eps,
        "norm.gated": eps,
        "rope": {"theta": canonical.float_bits(float(recipe.config["rope_theta"]))},
        **(GDN_SM90 if recipe.platform == "sm90" else GDN),
        "gdn.core": {**GDN["gdn.core"], "schedule": recipe.gdn_schedule or ""},
    }


def misfits(data: Mapping[str, Any], recipe: Recipe) -> list[tuple[str, Any, Any]]:
    """(field, value of the contract document, value that the recipe asks for) where they differ.

    A value is None where there is none; a region of `GDN` has no constants but those asked for.
    """
    decisions, found, wanted = decisions_of(recipe), {}, {}
    for name, value in model_of(recipe).items():
        found[f"model.{name}"], wanted[f"model.{name}"] = data["model"][name], value
    found["deployment"], wanted["deployment"] = data["deployment"], deployment_of(recipe)
    found["platform"], wanted["platform"] = data.get("platform", "cpu"), recipe.platform
    for axis, sizes in sizes_of(recipe).items():
        found[axis], wanted[axis] = data["claims"]["topology"][axis]["sizes"], sizes
    for entry in data["composition"]:
        for region in entry["regions"]:
            decided, constants = decisions.get(region, {}), entry["constants"]
            for name in {**decided, **(constants if region in GDN else {})}:
                field = f"{region}.{name}"
                found[field], wanted[field] = constants.get(name), decided.get(name)
    return [(name, found[name], wanted[name]) for name in found if found[name] != wanted[name]]
