"""`python -m samebits.bench.gpu [--out FILE] [--only AREA]`: bit gates on a Hopper GPU, then times.

Nothing is timed while a gate is red. Both sides of a row run in CUDA graphs, in turns, in one
process; a time is the median of its replays. Operands are random normal numbers; where they would
fit in L2, several sets are used in rotation. Rows have the form of `samebits.bench.run`. A row of
bandwidth compares with bytes / 4.3 TB/s, this chip's rate for a large copy. With --only, the gates
and rows of one area; the other rows of FILE are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from samebits import files
from samebits.bench import (
    gpu_attention,
    gpu_fa3,
    gpu_gates,
    gpu_gdn_ahead,
    gpu_gdn_layer_times,
    gpu_gdn_times,
    gpu_gdn_train,
    gpu_head,
    gpu_hybrid,
    gpu_public,
    gpu_window,
)
from samebits.bench.gpu_timing import Calls, Row, medians, row
from samebits.bench.pages import BANDWIDTH
from samebits.errors import SamebitsError
from samebits.ops import gemm, gpu
from samebits.ops.attention import triton as attention
from samebits.ops.attention.sm90 import kernels as attention_kernels
from samebits.ops.logprob import triton as logprob
from samebits.ops.rms_norm import triton as rms_norm
from samebits.ops.rotary import triton as rotary
from samebits.ops.silu_mul import triton as silu_mul
from samebits.plan import ReductionPlan

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "lm_head": (151936, 4096),
}
ROWS = (1, 8, 64, 256, 4096, 16384)
LEAF_TARGETS = {2: 1.10, 4: 1.15, 8: 1.25}
CACHED = 150 << 20  # bytes that L2 cannot serve


def gemm_rows() -> Iterator[Row]:
    """Column-parallel, lm_head (fp32 output), and row-parallel by leaves, against cuBLAS."""
    for name, (n, k) in SHAPES.items():
        copies = CACHED // (n * k * 2) + 2
        weights = [(torch.randn(n, k, device="cuda") * 0.02).bfloat16() for _ in range(copies)]
        for m in ROWS:
            x = torch.randn(m, k, device="cuda").bfloat16()
            used = weights if m <= 256 else weights[:1]
            rounds = max(1, 12 // len(used)) if m <= 256 else 2
            sets = used * rounds
            native: Calls = [partial(torch.mm, x, w.t()) for w in sets]
            one = gemm.lm_head if name == "lm_head" else gemm.linear
            sides: list[Calls] = [native, [partial(one, x, w) for w in sets]]
            counts = tuple(LEAF_TARGETS) if name in ("o", "down") else ()
            for leaves in counts:
                plan = ReductionPlan(leaves)
                sides.append([partial(gemm.row_parallel, x, w, plan) for w in sets])
            theirs, plain, *folded = medians(sides)
            shape = f"gemm {name} {m} x {k} x {n} bf16"
            yield row(shape, plain, "cuBLAS, bf16 output", theirs, 1.10)
            for leaves, time in zip(counts, folded, strict=True):
                work = f"{shape}, {leaves} leaves"
                yield row(work, time, "cuBLAS, bf16 output", theirs, LEAF_TARGETS[leaves])


def element_rows() -> Iterator[Row]:
    """Norms, rotary, silu_mul and logprob, against the bytes they must move."""

    def bandwidth(work: str, size: int, calls: Calls, target: float | None = 1.25) -> Row:
        # Starting a graph takes microseconds: 16 calls share it.
        many = list(calls) * (16 // len(calls))
        time = size / BANDWIDTH
        return row(work, medians([many])[0], "bytes / 4.3 TB/s", time, target)

    weight = torch.randn(4096, device="cuda").bfloat16()
    small = weight[:128].contiguous()
    for tokens in (8192, 32768):
        sets = [torch.randn(tokens, 4096, device="cuda").bfloat16() for _ in range(4)]
        size = tokens * 4096 * 2
        shape = f"{tokens} x 4096 bf16"
        calls: Calls = [partial(rms_norm.rms_norm, x, weight, 1e-6) for x in sets]
        yield bandwidth(f"rms_norm {shape}", 2 * size, calls)
        calls = [
            partial(rms_norm.add_rms_norm, x, h, weight, 1e-6)
            for x, h in zip(sets, sets[1:] + sets[:1], strict=True)
        ]
        yield bandwidth(f"rms_norm with residual {shape}", 4 * size, calls)
        heads = [x.view(tokens, 32, 128) for x in sets]
        calls = [partial(rms_norm.rms_norm, x, small, 1e-6) for x in heads]
        yield bandwidth(f"rms_norm per head {tokens} x 32 x 128 bf16", 2 * size, calls)
        table = torch.randn(tokens, 128, device="cuda")
        position = torch.arange(tokens, device="cuda")
        calls = [partial(rotary.apply, x, position, table) for x in heads]
        yield bandwidth(f"rotary {tokens} x 32 x 128 bf16", 2 * size, calls)
        calls = [partial(silu_mul.silu_mul, x) for x in sets]
        yield bandwidth(f"silu_mul {tokens} x 2048 bf16", size * 3 // 2, calls)
        del sets, heads, calls
    wide = [torch.randn(8192, 24576, device="cuda").bfloat16() for _ in range(2)]
    calls = [partial(silu_mul.silu_mul, x) for x in wide]
    yield bandwidth("silu_mul 8192 x 12288 bf16", 8192 * 12288 * 6, calls)
    del wide
    for rows in (64, 4096):
        logits = torch.randn(rows, 151936, device="cuda") * 3
        target = torch.randint(0, 151936, (rows,), device="cuda")
        plan = ReductionPlan(8)
        calls = [partial(logprob.selected, logits, target, plan)]
        yield bandwidth(f"logprob {rows} x 151936 fp32", rows * 151936 * 4, calls, None)


def _native_step(backend: SDPBackend, leaves: Any, grad: torch.Tensor) -> Any:
    q, k, v = leaves
    return torch.autograd.grad(gpu_attention.sdpa(backend, q, k, v, True), leaves, grad)


def _step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dy: torch.Tensor, *cut: Any) -> Any:
    rows, back = attention_kernels(q.shape[2])
    norms = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    y = rows.varlen(q, k, v, *cut, norms=norms)
    return back.gradients(q, k, v, y, norms, dy, *cut)


def attention_rows() -> Iterator[Row]:
    """32 query heads, 8 key heads of 128, against torch's operators and FlashAttention 3 of vLLM.

    torch's read contiguous keys; the others read pages of 16 in random order where ours do.
    """
    heads, key_heads, size = 32, 8, 128
    natives = {
        "torch SDPA, flash": SDPBackend.FLASH_ATTENTION,
        "torch SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    }

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    fa3 = gpu_fa3.at_hand()

    def compare(
        work: str, ours: Any, native: Any, target: float, other: Any = None
    ) -> Iterator[Row]:
        theirs = {name: partial(native, backend) for name, backend in natives.items()}
        if other is not None:
            theirs[gpu_fa3.NAME] = other
        times = medians([*([call] for call in theirs.values()), [ours]])
        for against, time in zip(theirs, times, strict=False):
            yield row(work, times[-1], against, time, target)

    tokens = 8192
    q = torch.randn(tokens, heads, size, device="cuda").bfloat16()
    k, v = (torch.randn(tokens, key_heads, size, device="cuda").bfloat16() for _ in range(2))
    kc, vc, table = gpu_attention.pages(k, v, 16)
    starts, lengths, scale = integers(0, tokens), integers(tokens), size**-0.5
    native = partial(gpu_attention.sdpa, q=q.transpose(0, 1)[None], k=k.transpose(0, 1)[None])
    native = partial(native, v=v.transpose(0, 1)[None], causal=True)
    cut = starts, tokens, scale
    packed = partial(attention_kernels(size)[0].varlen, q, k, v, *cut)
    paged = partial(attention.paged, q, kc, vc, table[None], starts, lengths, tokens, scale)
    shape = f"{tokens} x {heads}/{key_heads} x {size} bf16"
    other = gpu_fa3.packed(q, k, v, starts, tokens) if fa3 else None
    yield from compare(f"attention forward {shape}, packed", packed, native, 1.25, other)
    if fa3:
        other = gpu_fa3.paged(q, kc, vc, table[None], starts, lengths, tokens, tokens, splits=0)
    yield from compare(f"attention forward {shape}, pages of 16", paged, native, 1.25, other)
    dy = torch.randn_like(q)
    leaves = [x.transpose(0, 1)[None].detach().requires_grad_() for x in (q, k, v)]
    native = partial(_native_step, leaves=leaves, grad=dy.transpose(0, 1)[None])
    ours = partial(_step, q, k, v, dy, *cut)
    yield from compare(f"attention forward and backward {shape}, packed", ours, native, 1.25)
    del leaves, dy, native, other, ours
    for requests, tokens in ((256, 2048), (4, 32768)):
        of_keys = (requests, tokens, key_heads, size)
        q = torch.randn(requests, heads, size, device="cuda").bfloat16()
        k, v = (torch.randn(of_keys, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        table = torch.randperm(requests * tokens // 16, device="cuda").int().view(requests, -1)
        lengths, starts = integers(*[tokens] * requests), integers(*range(requests + 1))
        kc, vc = (x.view(-1, 16, key_heads, size) for x in (k, v))
        ours = partial(attention.decode, q, kc, vc, table, starts, lengths, tokens, scale)
        # [R, G, T, D] in memory: the layout torch reads fastest.
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
        native = partial(gpu_attention.sdpa, q=q[:, :, None], k=k, v=v, causal=False)
        name = f"attention decode, {requests} sequences of {tokens}, pages of 16"
        other = gpu_fa3.paged(q, kc, vc, table, starts, lengths, 1, tokens) if fa3 else None
        yield from compare(name, ours, native, 1.10, other)
        del k, v, kc, vc, ours, native, other


AREAS: dict[str, tuple[Callable[[], Iterator[str]], Callable[[], Iterator[Row]]]] = {
    "elements": (gpu_gates.element_gates, element_rows),
    "attention": (gpu_attention.gates, attention_rows),
    "gemm": (gpu_gates.gemm_gates, gemm_rows),
    "head": (gpu_head.gates, gpu_head.rows),
    "gdn": (gpu_gdn_ahead.gates, gpu_gdn_times.rows),
    "gdn-train": (gpu_gdn_train.gates, gpu_gdn_train.rows),
    "gdn-layer": (gpu_gdn_layer_times.gates, gpu_gdn_layer_times.rows),
    "window": (gpu_window.gates, gpu_window.rows),
}

PUBLIC = {"public": gpu_public.AREAS, "hybrid": gpu_hybrid.AREAS}


def main(arguments: list[str] | None = None) -> int:
    """Exit code as everywhere: 0 done, 1 different, 2 refused, 3 not observed."""
    parser = argparse.ArgumentParser(prog="python -m samebits.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the rows (default: under $OUT)")
    parser.add_argument(
        "--only", choices=(*AREAS, *PUBLIC), help="one area; public, hybrid: gates only"
    )
    options = parser.parse_args(arguments)
    out = options.out
    if out is None:
        out = Path(os.environ.get("OUT", ".")) / "bench-gpu.json"
    areas = [AREAS[options.only]] if options.only in AREAS else list(AREAS.values())
    try:
        gpu.prepare(0)
        if options.only in PUBLIC:
            return gpu_public.report(gpu_public.isolated(PUBLIC[options.only]))
        for gates, _ in areas:
            for line in gates():
                print(line, flush=True)
    except SamebitsError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    torch.cuda.empty_cache()  # the gates leave large blocks; time on memory of its own
    old = json.loads(out.read_text()) if options.only and out.exists() else []
    rows: list[Row] = []
    for _, source in areas:
        for found in source():
            rows.append(found)
            # After every row: a machine may be taken away before the last.
            files.write_atomic(out, (json.dumps(merged(old, rows), indent=1) + "\n").encode())
            met = {None: "-", True: "met", False: "MISSED"}[found["met"]]
            print(
                f"{found['work']:58} {found['ours']:9.1f} us  {found['ratio']:6.3f}  {met}",
                flush=True,
            )
    return 0


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """`old` without the rows that `new` measures again, then `new`."""

    def key(row: Row) -> tuple[str, str]:
        return row["work"], row["against"]["name"]

    again = {key(row) for row in new}
    return [row for row in old if key(row) not in again] + new


if __name__ == "__main__":
    sys.exit(main())
