"""Hopper kernels of dense models where there is no GPU: control flow, and code for sm90.

Control flow runs under Triton's interpreter in fp32, in a process of its own
(`dense_interpreted.py`). Neither that nor compiling says anything about a bit on a chip.
"""

from __future__ import annotations

import re

import interpreter
import pytest
import torch

pytest.importorskip("triton")

import compiled_sm90

from samebits.errors import Refused
from samebits.ops import gpu
from samebits.ops.attention import gluon_backward, gluon_parts, gluon_rows, triton_backward
from samebits.ops.attention import triton as attention
from samebits.ops.gemm import admission_sm90 as admission
from samebits.ops.gemm import gluon_leaves, kernels_sm90
from samebits.ops.gemm import triton as gemm
from samebits.ops.gemm.operands_sm90 import KINDS
from samebits.ops.logprob import triton as logprob
from samebits.ops.output_gate import triton as output_gate
from samebits.ops.rms_norm import triton as rms_norm
from samebits.ops.rotary import triton as rotary
from samebits.ops.silu_mul import triton as silu_mul
from samebits.plan import ReductionPlan

# What of `dense_interpreted.py` has to be there, and how large its errors may be: fp32 sums.
COUNTS = {
    "products": 24,
    "biased": 8,
    "rows": 6,
    "log_probabilities": 14,
    "digests": 2,
    "attended": 3,
    "gradients": 6,
}
TOLERANCE = 3e-6
SHARED = 227 << 10  # bytes of shared memory that a block of sm90 can have


@pytest.fixture(scope="module")
def errors():
    return interpreter.run("dense_interpreted.py")


@pytest.mark.parametrize("part", COUNTS)
def test_interpreted(errors, part):
    assert len(errors[part]) == COUNTS[part]
    assert all(error <= TOLERANCE for error in errors[part].values()), errors[part]


@pytest.fixture
def no_gpu(monkeypatch):
    """Launchers take CPU tensors: nothing is launched."""
    monkeypatch.setattr(gpu, "prepare", lambda index: 132)
    monkeypatch.setattr(gpu, "require_dtype", lambda name, x, dtype: None)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(gpu.ptxas()))


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def launches(size: int):
    """(kernel, arguments) of the launches of a small dense model with heads of `size`."""
    modules = (
        rms_norm, rotary, silu_mul, attention, gluon_rows, gluon_backward, triton_backward,
        logprob, output_gate,
    )  # fmt: skip
    with compiled_sm90.recorded(*modules) as recorders:
        for centred in (False, True):
            rms_norm.rms_norm(bf16(3, 576), bf16(576), 1e-5, centred)
        rms_norm.add_rms_norm(bf16(3, 576), bf16(3, 576), bf16(576), 1e-5)
        for inverse in (False, True):
            at = torch.zeros(3, dtype=torch.int64)
            rotary.apply(bf16(3, 9, size), at, torch.zeros(8, size), inverse)
        silu_mul.silu_mul(bf16(3, 3072))
        output_gate.output_gate(bf16(3, 576), bf16(3, 576))
        q, k = bf16(40, 9, size), bf16(40, 3, size)
        at, norms = integers(0, 40), torch.zeros(9, 40)
        for given in (None, norms):
            attention.varlen(q, k, k, at, 40, 0.1, norms=given)
            if size in gluon_parts.SIZES:
                gluon_rows.varlen(q, k, k, at, 40, 0.1, given)
        back = gluon_backward if size in gluon_parts.SIZES else triton_backward
        back.gradients(q, k, k, q, norms, q, at, 40, 0.1)
        pages = bf16(4, 16, 3, size)
        tables = torch.zeros(2, 3, dtype=torch.int32), integers(0, 20, 40), integers(20, 20)
        attention.paged(q, pages, pages, *tables, 20, 0.1)
        attention.decode(q[:2], pages, pages, *tables, 512, 0.1)
        attention.ex2(torch.zeros(4))
        logits, targets = torch.zeros(3, 4096), torch.zeros(3, dtype=torch.int64)
        for leaves in (1, 4, 8):
            found, _ = logprob.roots(logits, ReductionPlan(leaves), 4096, targets)
            logprob.roots(logits[:, :64].contiguous(), ReductionPlan(leaves), 64)
        for ranks in (2, 4, 8):
            logprob.fold_ranks(torch.zeros(3, ranks, 2))
        logprob.log_probs(logits, found, 4000)
        for dtype in (torch.float32, torch.bfloat16):
            logprob.gradient(logits, found, targets, torch.zeros(3), 0, 4000, dtype)
        logprob.row_digests(logits, 7, 4000)
    return [(r.kernel, arguments) for r in recorders for _, arguments in r.calls]


@pytest.mark.parametrize("size", attention.ROWS)
def test_every_kernel_of_rows_compiles_for_sm90(no_gpu, size):
    seen = set()
    for kernel, arguments in launches(size):
        code = compiled_sm90.compiled(kernel, arguments)
        assert code.asm["cubin"] and code.metadata.shared <= SHARED
        assert "fma.rn.f32" in code.asm["ptx"] or "fma" not in code.asm["ptx"]
        seen.add(f"{kernel.__module__.removeprefix('samebits.ops.')}.{kernel.__name__}")
    gluon = size in gluon_parts.SIZES
    back = f"attention.{'gluon' if gluon else 'triton'}_backward."
    assert seen == {
        *({"attention.gluon_rows._rows"} if gluon else ()),
        "attention.triton_backward._delta",
        back + "_keys",
        back + "_queries",
        "rms_norm.triton._kernel",
        "rotary.triton._kernel",
        "silu_mul.triton._kernel",
        "output_gate.triton._kernel",
        "attention.triton._rows",
        "attention.triton._partitions",
        "attention.triton._finish",
        "attention.triton._ex2",
        "logprob.triton._pieces",
        "logprob.triton._roots",
        "logprob.triton._fold_ranks",
        "logprob.triton._entries",
        "logprob.triton._gradient",
        "logprob.triton._digest",
    }


# Products of the smallest published model with its heads, and what its leaves make of a step.
PRODUCTS = (
    (960, 576, 1, torch.bfloat16),
    (576, 576, 2, torch.bfloat16),
    (49152, 576, 1, torch.float32),
    (40, 8 * 48, 8, torch.bfloat16),
    (256, 512, 4, torch.bfloat16),
    (256, 256, 2, torch.bfloat16),
    (64, 128, 8, torch.bfloat16),
    (8, 64, 1, torch.float32),
)


@pytest.mark.parametrize("shape", PRODUCTS)
def test_every_unpinned_tile_compiles_for_sm90(no_gpu, shape):
    n, k, leaves, dtype = shape
    with compiled_sm90.recorded(kernels_sm90) as recorders:
        for tile in admission.tiles_of(shape):
            y = torch.empty(300, n, dtype=dtype)
            gemm.launch(tile, bf16(300, k), bf16(n, k), y, leaves)
    (recorder,) = [r for r in recorders if r.calls]
    for _, arguments in recorder.calls:
        code = compiled_sm90.compiled(recorder.kernel, arguments)
        assert code.asm["cubin"] and code.metadata.shared <= SHARED


# With a bias: tiles of the pinned table, tails of N, and a chain of one step.
BIASED = ((6144, 4096), (960, 576), (20, 40), (64, 16))


@pytest.mark.parametrize("n, k", BIASED)
def test_every_tile_compiles_with_a_bias(no_gpu, n, k):
    tiles = admission.biased_tiles_of((n, k, 1, torch.bfloat16))
    assert [t.rows for t in tiles] == sorted({t.rows for t in tiles}) and tiles[-1].rows >= 1 << 24
    with compiled_sm90.recorded(kernels_sm90) as recorders:
        for tile in tiles:
            y = torch.empty(300, -(-n // 8) * 8, dtype=torch.bfloat16)
            gemm.launch(tile, bf16(300, k), bf16(n, k), y, 1, bf16(n))
    (recorder,) = [r for r in recorders if r.calls]
    for tile, (_, arguments) in zip(tiles, recorder.calls, strict=True):
        assert len(arguments["bias_ptr"]) == arguments["N"] == -(-n // 8) * 8
        code = compiled_sm90.compiled(recorder.kernel, arguments)
        assert code.asm["cubin"] and code.metadata.shared <= SHARED, tile
        # One addition for each accumulator, as it is or as an fma with 1: none became the start of
        # its chain.
        added = len(re.findall(r"(?:add|fma)(?:\.rn)?\.f32", code.asm["ptx"]))
        assert added == tile.bm * tile.bn // (32 * tile.warps), tile


def test_no_pinned_shape_is_used_with_a_bias_before_its_own_test(no_gpu, monkeypatch):
    met = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(admission, "_tested", lambda *args: met.append(args) or 1)
    admission.admit(6144, 4096, 1)  # pinned
    with pytest.raises(Refused, match="SB0454"):
        admission.admit(6144, 4096, 1, biased=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(admission, "_admitted", {})
    admission.admit(6144, 4096, 1, biased=True)
    (made,) = admission.admitted()
    assert made.bias and len(met) == len(KINDS) and all(args[-1] for args in met)
    assert admission.tile_for(4, (6144, 4096, 1, torch.bfloat16), biased=True) == made.tiles[1]


def test_every_pinned_tile_in_gluon_compiles_for_sm90(no_gpu):
    with compiled_sm90.recorded(gluon_leaves) as recorders:
        for (n, k, leaves, dtype), tiles in gemm.table().items():
            for tile in (t for t in tiles if t.kind == "gluon"):
                y = torch.empty(1100, n, dtype=dtype)
                gemm.launch(tile, bf16(1100, k), bf16(n, k), y, leaves)
    (recorder,) = [r for r in recorders if r.calls]
    assert {a["LEAVES"] for _, a in recorder.calls} == {4, 8}
    for (blocks,), arguments in recorder.calls:
        code = compiled_sm90.compiled(recorder.kernel, arguments)
        assert code.asm["cubin"] and code.metadata.shared <= SHARED and blocks == 132
        assert "wgmma.mma_async" in code.asm["ptx"]


@pytest.mark.parametrize(
    "k,leaves,dtype,columns",
    [
        (4096, 1, torch.bfloat16, 128),
        (96 * 4, 4, torch.bfloat16, 128),
        (4096, 4, torch.float32, 128),
        (4096, 4, torch.bfloat16, 256),
    ],
)
def test_gluon_refuses_what_it_was_not_written_for(no_gpu, k, leaves, dtype, columns):
    tile = gemm.Tile(4096, "gluon", bm=128, bn=columns, bk=64, warps=4, stages=5)
    with pytest.raises(Refused) as caught:
        gemm.launch(tile, bf16(256, k), bf16(256, k), torch.empty(256, 256, dtype=dtype), leaves)
    assert caught.value.error_id == "SB0453"
