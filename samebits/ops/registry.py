"""Which implementation computes which region, what its constants are, and how often it ran.

Operators register one `Implementation` per (region, platform): a package for "cpu", its module
`sm90` for Hopper GPUs. The contract binds
implementations by id and by the content hash of their sources; `served` counts prove that a bound
region really ran.
"""

from __future__ import annotations

import collections
import hashlib
import importlib
import importlib.util
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samebits.errors import Refused

# Regions of arithmetic of a decoder with full attention in every layer, in forward order.
DENSE = (
    "embedding",
    "norm.rms",
    "gemm.column",
    "gemm.row",
    "rope",
    "attention",
    "act.silu_mul",
    "gemm.lm_head",
    "logprob",
)

# The same, with a bias on the projection of queries, keys and values and nowhere else.
BIASED = (*DENSE[:2], "gemm.bias", *DENSE[2:])

# Gated DeltaNet layers beside gated full attention; norms over the hidden size are zero-centred.
HYBRID = (
    "embedding",
    "norm.rms_zero_centred",
    "gemm.column",
    "gemm.row",
    "gdn.conv",
    "gdn.l2_norm",
    "gdn.gate",
    "gdn.core",
    "norm.gated",
    "rope",
    "attention",
    "attention.gate",
    "act.silu_mul",
    "gemm.lm_head",
    "logprob",
)

_BY_ARCHITECTURE = {"llama": DENSE, "qwen2": BIASED, "qwen3": DENSE, "qwen3_5_text": HYBRID}

# Every region that a contract can bind.
REGIONS = tuple(dict.fromkeys(BIASED + HYBRID))

# Regions with operators, laws and probes that neither engine routes a layer to: no architecture has
# one, so no contract can bind it, and models that need it stay refused.
UNROUTED = ("attention.window",)

# What one class of an engine computes as a whole: a control aligns all of these or none. The state
# that vLLM keeps of a recurrent layer has the form of the core's schedule, and its convolution, its
# l2 norm, its gate and the norm of its output read or write what that class hands on.
TOGETHER = ("gdn.conv", "gdn.l2_norm", "gdn.gate", "gdn.core", "norm.gated")

# The operator packages that register implementations when imported.
OPERATORS = (
    "embedding",
    "rms_norm",
    "gemm",
    "rotary",
    "attention",
    "silu_mul",
    "logprob",
    "conv1d",
    "l2_norm",
    "gdn_gate",
    "gdn",
    "gated_rms_norm",
    "output_gate",
    "window_attention",
)


def regions_of(architecture: str) -> tuple[str, ...]:
    """The regions that a model of this architecture computes with, in forward order."""
    return _BY_ARCHITECTURE[architecture]


@dataclass(frozen=True)
class Implementation:
    """One way to compute a region.

    id         e.g. "gemm.row.cpu.1"; the number goes up when bits change
    constants  int or str only: what the schedule fixes (lanes, partition length, leaf count source)
    modules    dotted module names whose source decides the bits; hashed into the contract
    probe      no arguments -> 128-bit digest (int) of outputs for fixed inputs (known-answer test)
    """

    region: str
    id: str
    platform: str
    constants: Mapping[str, int | str]
    modules: tuple[str, ...]
    probe: Callable[[], int] = field(compare=False)

    def content_hash(self) -> str:
        """sha256 over the sources of `modules`, in the listed order."""
        digest = hashlib.sha256()
        for name in self.modules:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise Refused(
                    "SB0404",
                    seen=f"implementation {self.id} names module {name}, which has no source",
                    required="an importable module",
                    hint="pip install -e . --no-deps",
                )
            digest.update(name.encode() + b"\0" + Path(spec.origin).read_bytes() + b"\0")
        return digest.hexdigest()


_implementations: dict[tuple[str, str], Implementation] = {}
_served: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()


def register(implementation: Implementation) -> Implementation:
    """Add an implementation; a second one for a (region, platform) is a programming error."""
    key = (implementation.region, implementation.platform)
    if implementation.region not in REGIONS + UNROUTED or key in _implementations:
        raise RuntimeError(f"cannot register {implementation.id} for {key}")
    _implementations[key] = implementation
    return implementation


# Platform -> modules that register its implementations.
_MODULES = {
    "cpu": tuple(f"samebits.ops.{name}" for name in OPERATORS),
    "sm90": tuple(f"samebits.ops.{name}.sm90" for name in OPERATORS),
}


def load_all(platform: str = "cpu") -> None:
    """Import what registers the implementations of `platform`; SB0405 for an unknown one.

    Those of "sm90" need Triton, and no GPU.
    """
    if platform not in _MODULES:
        raise Refused(
            "SB0405",
            seen=f"platform {platform}",
            required=f"one of {', '.join(_MODULES)}",
            hint="samebits explain SB0405",
        )
    for name in _MODULES[platform]:
        importlib.import_module(name)


def implementations(platform: str = "cpu") -> dict[str, Implementation]:
    """Region -> implementation for one platform, in forward order: what contracts can bind."""
    return _registered(platform, REGIONS)


def unrouted(platform: str = "cpu") -> dict[str, Implementation]:
    """As `implementations`, of the regions that no contract can bind."""
    return _registered(platform, UNROUTED)


def _registered(platform: str, regions: tuple[str, ...]) -> dict[str, Implementation]:
    load_all(platform)
    found = {region: _implementations.get((region, platform)) for region in regions}
    return {region: impl for region, impl in found.items() if impl is not None}


def count_served(region: str, rows: int = 1) -> None:
    """Called by every operator on each call; read back by gates (a bound region must be served).

    A call inside of a CUDA graph counts when it is captured, not when it is replayed.
    """
    with _lock:
        _served[region] += rows


def served() -> dict[str, int]:
    """Region -> rows or tokens computed in this process since `reset_served`."""
    with _lock:
        return dict(_served)


def reset_served() -> None:
    """Forget all counts of `served`."""
    with _lock:
        _served.clear()
