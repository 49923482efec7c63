"""This process's platform, and binding a contract to the operators that are installed in it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from samebits import bits, runtime
from samebits.contract import canonical
from samebits.errors import Refused

if TYPE_CHECKING:
    from samebits.contract.model import Contract
    from samebits.ops.registry import Implementation

# Platform -> fields of its description that name a version; `evidence.required` compares them.
VERSIONS = {
    "cpu": ("torch", "numpy", "numba", "llvmlite"),
    "sm90": ("torch", "cuda", "triton", "ptxas"),
}
# Platform -> all fields of its description.
FIELDS = {
    "cpu": ("kind", "machine", "isa", *VERSIONS["cpu"]),
    "sm90": ("kind", "machine", "chip", "compute_capability", *VERSIONS["sm90"]),
}


def here(wanted: str) -> bool:
    """Whether this process can run operators of `wanted`; looks at the chip, starts nothing."""
    if wanted == "cpu":
        return True
    import torch

    from samebits.ops import gpu

    return torch.cuda.is_available() and torch.cuda.get_device_capability() == gpu.CAPABILITY


def require(wanted: str) -> None:
    """Refuse a platform that this machine is not: SB0451 for the chip, SB0450 for the assembler."""
    if wanted == "sm90":
        from samebits.ops import gpu

        gpu.prepare(0)


def describe(kind: str = "cpu") -> dict[str, str]:
    """What can move bits on a platform: the chip, and what computes or compiles on it (`FIELDS`).

    cpu    instruction set, torch, numpy, Numba and its LLVM
    sm90   the GPU's name, torch and the CUDA that it was built with, Triton, the assembler; no
           driver, because kernels reach it assembled. Refuses as `require`.
    """
    import torch

    found = {"kind": kind, "machine": platform.machine()}
    if kind == "cpu":
        found["isa"] = torch.backends.cpu.get_cpu_capability()
    else:
        require(kind)
        found |= _describe_gpu()
    return found | {
        name: metadata.version(name) for name in VERSIONS[kind] if name not in ("cuda", "ptxas")
    }


def _describe_gpu() -> dict[str, str]:
    import torch

    from samebits.ops import gpu

    version = gpu.ptxas_version(gpu.ptxas())
    assert version is not None  # `gpu.ptxas` refuses one that does not run
    return {
        "chip": torch.cuda.get_device_name(0),
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "cuda": str(torch.version.cuda),
        "ptxas": ".".join(map(str, version)),
    }


@dataclass(frozen=True)
class Binding:
    """Outcome of `Contract.bind` in one process.

    status   `known`: every probe equals its recorded answer; `new platform`: some have no record
             here, so both engines must show equal `answers`; `planted fault`: a negative control,
             whose answers are not judged
    """

    role: str
    status: str
    platform: str
    description: Mapping[str, str]
    answers: Mapping[str, str]

    def check_peer(self, answers: Mapping[str, str]) -> None:
        """Refuse unless the other engine's probes gave the same answers."""
        differing = sorted(
            region
            for region in {*self.answers, *answers}
            if self.answers.get(region) != answers.get(region)
        )
        if differing:
            raise Refused(
                "SB0320",
                seen=f"probe answers of the two engines differ for {', '.join(differing)}",
                required="equal answers, recorded or not",
                hint="samebits doctor",
            )


def _check_installed(entry: Mapping, region: str, installed: Mapping[str, Implementation]) -> None:
    implementation = installed.get(region)
    if implementation is None or implementation.id != entry["implementation"]:
        raise Refused(
            "SB0308",
            seen=f"{region}: {implementation.id if implementation else 'nothing'} is installed",
            required=f"{entry['implementation']}, which the contract binds",
            hint="samebits explain SB0308",
        )
    content = implementation.content_hash()
    if content != entry["content_hash"]:
        raise Refused(
            "SB0309",
            seen=f"{region}: source of {implementation.id} has hash {content[:16]}..",
            required=f"{entry['content_hash'][:16]}.., which the contract binds",
            hint="samebits explain SB0309",
        )


def run_probes(
    installed: Mapping[str, Implementation], told: Callable[[str, int, int], None] | None = None
) -> dict[str, str]:
    """Region -> 128-bit digest of its probe's outputs. Served counts are left as they were.

    told   called before each probe with its region, how many are behind it, and how many there are
    """
    from samebits.ops import registry

    before = registry.served()
    answers = dict[str, str]()
    for region, implementation in installed.items():
        if told is not None:
            told(region, len(answers), len(installed))
        answers[region] = bits.hex_digest(implementation.probe())
    registry.reset_served()
    for region, rows in before.items():
        registry.count_served(region, rows)
    return answers


def bind(
    contract: Contract, role: str, implementations: Mapping[str, Implementation] | None = None
) -> Binding:
    """Check every bound implementation by id and source, run the probes, judge the answers.

    `implementations` defaults to those registered for the contract's platform. Refuses a contract
    of another platform than this process's (SB0327), a missing or other implementation (SB0308),
    changed source (SB0309) or a wrong answer (SB0310).
    """
    from samebits.contract.model import ROLES
    from samebits.ops import registry

    if contract.platform != runtime.platform():
        raise Refused(
            "SB0327",
            seen=f"contract of {contract.case}, platform {contract.platform}",
            required=f"platform {runtime.platform()}, which this process computes on",
            hint="samebits explain SB0327",
        )
    require(contract.platform)
    cases = ROLES[role]
    available = (
        registry.implementations(contract.platform) if implementations is None else implementations
    )
    bound = {
        region: contract.entry(region)
        for region in contract.regions
        if set(cases) & set(contract.entry(region)["cases"])
    }
    for region, entry in bound.items():
        _check_installed(entry, region, available)
    description = describe(contract.platform)
    key = canonical.digest(description)
    answers = run_probes({region: available[region] for region in bound})
    if runtime.fault() is not None:
        return Binding(role, "planted fault", key, description, answers)
    recorded = contract.data["platforms"].get(key, {"known_answers": {}})["known_answers"]
    for region, answer in answers.items():
        if recorded.get(region, answer) != answer:
            raise Refused(
                "SB0310",
                seen=f"{region}: probe answered {answer}",
                required=f"{recorded[region]}, recorded for this platform",
                hint="samebits doctor",
            )
    status = "known" if set(recorded) >= set(answers) else "new platform"
    return Binding(role, status, key, description, answers)
