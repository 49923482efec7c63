"""What every CPU kernel shares: the compiler settings, the fma primitive, the thread pool.

Numba compiles without fastmath, so LLVM may not reassociate, contract or approximate: the order
written in a kernel is the order executed, on any x86-64 with FMA. Threads split independent
rows or columns and never a sum, so the thread count cannot move bits.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic


def _cache_folder() -> Path:
    """Where compiled kernels are kept: one folder for each state of all operator sources.

    Numba looks at a kernel's own file only; a kernel that inlines a changed function from another
    file would be taken from the cache with its old bits.
    """
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in [root.parent / "bits.py", *sorted(root.rglob("*.py"))]:
        digest.update(
            str(path.relative_to(root.parent)).encode() + b"\0" + path.read_bytes() + b"\0"
        )
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "samebits" / "kernels" / digest.hexdigest()[:16]


config.CACHE_DIR = str(_cache_folder())

# nogil: kernels run side by side in our own threads; cache: compiled once per machine.
kernel = njit(nogil=True, fastmath=False, error_model="numpy", cache=True, boundscheck=False)


@intrinsic
def fma(typingctx, a, b, c):
    """fl32(a * b + c), one rounding (IEEE 754 fusedMultiplyAdd), fp32 scalars."""
    signature = types.float32(types.float32, types.float32, types.float32)

    def codegen(context, builder, sig, args):
        f32 = ir.FloatType()
        fn = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(f32, [f32, f32, f32]), "llvm.fma.f32"
        )
        return builder.call(fn, args)

    return signature, codegen


_pool: tuple[int, concurrent.futures.ThreadPoolExecutor] | None = None


def _executor(workers: int) -> concurrent.futures.ThreadPoolExecutor:
    global _pool
    key = os.getpid()  # a forked child must not reuse its parent's threads
    if _pool is None or _pool[0] != key:
        _pool = (key, concurrent.futures.ThreadPoolExecutor(workers, "samebits"))
    return _pool[1]


def parallel_for(body: Callable[[int, int], None], total: int, grain: int = 1) -> None:
    """Call `body(start, stop)` over [0, total), cut at multiples of `grain`.

    Spans run on as many threads as torch uses.

    `body` must release the GIL (a `kernel`) and its results must not depend on the cut.
    """
    workers = min(torch.get_num_threads(), max(1, total // max(1, grain)))
    if workers <= 1:
        body(0, total)
        return
    per = -(-total // workers)
    per = -(-per // grain) * grain
    spans = [(s, min(s + per, total)) for s in range(0, total, per)]
    pool = _executor(torch.get_num_threads())
    others = [pool.submit(body, *span) for span in spans[1:]]
    try:
        body(*spans[0])  # the caller works too: it would only wait
    finally:
        concurrent.futures.wait(others)
    for other in others:
        other.result()


def as_numpy(x: torch.Tensor) -> np.ndarray:
    """Zero-copy view for kernels: bf16 as uint16, everything else as itself. Must be contiguous."""
    x = x.detach()
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
