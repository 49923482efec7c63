"""What every Hopper kernel needs first: the right chip, the right assembler, one compile policy.

Bits on a GPU are the chip's and the assembler's, so both are checked before a kernel is compiled.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

import torch

from samebits.errors import Refused
from samebits.ops.checks import require_shape

CAPABILITY = (9, 0)
# ptxas 12.8 miscompiles some wgmma descriptors: silently wrong rows.
PTXAS = (12, 9)
# No contraction: a multiplication and an addition become one fma only where a kernel says tl.fma.
POLICY = {"enable_fp_fusion": False}


def ptxas() -> Path:
    """The assembler that kernels are compiled with: TRITON_PTXAS_PATH, else one of Triton's wheel.

    Refuses with SB0450 when it is older than 12.9 or absent.
    """
    import triton

    chosen = os.environ.get("TRITON_PTXAS_PATH")
    wheel = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
    path = Path(chosen) if chosen else wheel
    seen = ptxas_version(path)
    if seen is None or seen < PTXAS:
        raise Refused(
            "SB0450",
            seen=f"ptxas {'.'.join(map(str, seen)) if seen else 'missing'} ({path.name})",
            required=f"ptxas {'.'.join(map(str, PTXAS))} or newer",
            hint="samebits explain SB0450",
        )
    return path


def ptxas_version(path: Path) -> tuple[int, int] | None:
    """(major, minor) that the assembler at `path` reports, None where it does not run."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None


def require_capability(seen: tuple[int, int] | None) -> None:
    """Refuses with SB0451 unless `seen` is 9.0; None stands for no GPU."""
    if seen != CAPABILITY:
        raise Refused(
            "SB0451",
            seen=f"a GPU of compute capability {seen[0]}.{seen[1]}" if seen else "no usable GPU",
            required="compute capability 9.0 (H100, H200)",
            hint="samebits doctor",
        )


@functools.cache
def prepare(index: int) -> int:
    """Check GPU `index` and the assembler once; returns the number of multiprocessors.

    Exports TRITON_PTXAS_PATH, so it must run before Triton compiles anything in this process:
    every launcher of `samebits.ops.*.triton` calls it. Refuses with SB0450, SB0451.
    """
    if not torch.cuda.is_available():
        require_capability(None)
    require_capability(torch.cuda.get_device_capability(index))
    os.environ["TRITON_PTXAS_PATH"] = str(ptxas())
    return torch.cuda.get_device_properties(index).multi_processor_count


def require_dtype(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    """`x` is a tensor of `dtype` on the current CUDA device, else SB0420.

    Triton launches on the current device, wherever the operands are.
    """
    here = x.device.type == "cuda" and x.device.index == torch.cuda.current_device()
    if x.dtype != dtype or not here:
        raise Refused(
            "SB0420",
            seen=f"{name} is {x.dtype} on {x.device}",
            required=f"{dtype} on the current CUDA device",
            hint="samebits explain SB0420",
        )


def require(
    name: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    holds: bool,
    required: str,
    dense: bool = True,
) -> None:
    """`x` is a contiguous tensor of `dtype` on the current CUDA device (SB0420), and `holds` is
    true (SB0421). Without `dense` only its last dimension need be contiguous.
    """
    require_dtype(name, x, dtype)
    require_shape(name, x, holds, required)
    packed = x.is_contiguous() if dense else x.stride(-1) == 1
    require_shape(name, x, packed, f"contiguous memory, not strides {list(x.stride())}")
