"""Hopper kernels of windowed attention where there is no GPU: control flow, and code for sm90.

As `test_dense_triton.py`: neither says anything about a bit on a chip.
"""

from __future__ import annotations

import interpreter
import pytest
import torch

pytest.importorskip("triton")

import compiled_sm90
from test_dense_triton import SHARED, TOLERANCE, bf16, integers, no_gpu  # noqa: F401

from samebits.errors import Refused
from samebits.ops.attention import triton as whole
from samebits.ops.attention import triton_backward as whole_backward
from samebits.ops.window_attention import sm90
from samebits.ops.window_attention import triton as attention
from samebits.ops.window_attention import triton_backward as backward

COUNTS = {"attended": 14, "gradients": 12}  # of `window_interpreted.py`


@pytest.fixture(scope="module")
def errors():
    return interpreter.run("window_interpreted.py")


@pytest.mark.parametrize("part", COUNTS)
def test_interpreted(errors, part):
    assert len(errors[part]) == COUNTS[part]
    assert all(error <= TOLERANCE for error in errors[part].values()), errors[part]


def operands(size: int):
    """q, packed keys, pages, and tables of two requests of 20 tokens."""
    tables = torch.zeros(2, 3, dtype=torch.int32), integers(0, 20, 40), integers(20, 20)
    return bf16(40, 9, size), bf16(40, 3, size), bf16(4, 16, 3, size), tables


def launches(size: int):
    q, k, pages, tables = operands(size)
    at, norms = integers(0, 40), torch.zeros(9, 40)
    with compiled_sm90.recorded(attention, backward, whole, whole_backward) as recorders:
        for given in (None, norms):
            attention.varlen(q, k, k, at, 40, 0.1, 16, norms=given)
        backward.gradients(q, k, k, q, norms, q, at, 40, 0.1, 16)
        attention.paged(q, pages, pages, *tables, 20, 0.1, 16)
        attention.decode(q[:2], pages, pages, *tables, 512, 0.1, 300)
    return [(r.kernel, grid, arguments) for r in recorders for grid, arguments in r.calls]


@pytest.mark.parametrize("size", attention.ROWS)
def test_every_kernel_compiles_for_sm90(no_gpu, size):  # noqa: F811
    seen = set()
    for kernel, grid, arguments in launches(size):
        if kernel.__name__ in ("_partitions", "_finish"):
            assert arguments["COUNT"] == 2  # of 512 keys, the most that a window of 300 touches
        if kernel.__name__ == "_partitions":
            assert grid == (2, 3, 2)
        code = compiled_sm90.compiled(kernel, arguments)
        assert code.asm["cubin"] and code.metadata.shared <= SHARED
        seen.add(f"{kernel.__module__.removeprefix('samebits.ops.')}.{kernel.__name__}")
    assert seen == {
        "window_attention.triton._rows",
        "window_attention.triton._partitions",
        "attention.triton._finish",
        "attention.triton_backward._delta",
        "window_attention.triton_backward._keys",
        "window_attention.triton_backward._queries",
    }


@pytest.mark.parametrize(
    "window,longest,count", [(1, 900, 1), (256, 900, 2), (257, 900, 2), (258, 900, 3), (258, 40, 1)]
)
def test_decode_launches_the_partitions_that_a_window_can_touch(no_gpu, window, longest, count):  # noqa: F811
    q, _, pages, tables = operands(64)
    with compiled_sm90.recorded(attention) as recorders:
        attention.decode(q[:2], pages, pages, *tables, longest, 0.1, window)
    (grid,) = [c[0] for r in recorders if r.kernel.__name__ == "_partitions" for c in r.calls]
    assert grid[0] == count
    # The most partitions of any run of `window` keys among `longest`.
    ends = range(1, longest + 1)
    touched = [(end - 1) // 256 - max(0, end - window) // 256 + 1 for end in ends]
    assert max(touched) == count


@pytest.mark.parametrize(
    "error_id,changes",
    [
        ("SB0417", {"window": 0}),
        ("SB0417", {"window": -1}),
        ("SB0417", {"window": 2.0}),
        ("SB0417", {"window": True}),
        ("SB0416", {"most": None}),
        ("SB0416", {"longest": 19}),
        ("SB0413", {"out": torch.empty(40, 9, 128).bfloat16()[..., :64]}),
        ("SB0414", {"scale": 0.0}),
        ("SB0414", {"size": 96}),
        ("SB0421", {"heads": 2}),
        ("SB0420", {"lengths": torch.tensor([20, 20])}),
    ],
)
def test_refusals(monkeypatch, no_gpu, error_id, changes):  # noqa: F811
    def require(name, x, dtype):
        if x.dtype != dtype:
            raise Refused("SB0420", seen=name, required=str(dtype), hint="samebits doctor")

    def call(size=64, heads=3, window=16, scale=0.1, most=20, longest=40, out=None, lengths=None):
        q, _, pages, (table, starts, ends) = operands(size)
        caches = pages, (pages if heads == 3 else pages[:, :, :heads])
        ends = ends if lengths is None else lengths
        with compiled_sm90.recorded(attention):
            sm90.paged(
                q, *caches, table, starts, ends, scale, window, out, most=most, longest=longest
            )

    monkeypatch.setattr(sm90.triton.gpu, "require_dtype", require)
    call()
    with pytest.raises(Refused) as caught:
        call(**changes)
    assert caught.value.error_id == error_id


def test_packed_windows_are_refused_before_anything_runs(no_gpu):  # noqa: F811
    q, k, _, _ = operands(64)
    for starts, window, error_id in (
        (integers(0, 40), 0, "SB0417"),
        (integers(0, 39), 4, "SB0415"),
    ):
        with pytest.raises(Refused, match=error_id):
            sm90.varlen(q, k, k, starts, 0.1, window)
