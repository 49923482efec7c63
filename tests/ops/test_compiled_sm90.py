"""The order of K in a compiled product is asked for, and a permuted one is caught."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import compiled_sm90
import triton
import triton.language as tl

from samebits.ops import gpu


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, M: tl.constexpr):
    """c [M, 64] fp32 = a [M, 64] in bf16 times b [64, 64] bf16."""
    i, j = tl.arange(0, M)[:, None], tl.arange(0, 64)
    a = tl.load(a_ptr + i * 64 + j[None, :]).to(tl.bfloat16)
    b = tl.load(b_ptr + j[:, None] * 64 + j[None, :])
    tl.store(c_ptr + i * 64 + j[None, :], tl.dot(a, b))


def compiled(dtype: torch.dtype, rows: int):
    a, b = torch.zeros(rows, 64, dtype=dtype), torch.zeros(64, 64).bfloat16()
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": torch.zeros(rows, 64), "M": rows}
    return compiled_sm90.compiled(_product, arguments)


@pytest.fixture(autouse=True)
def assembler(monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(gpu.ptxas()))


def test_operand_of_bytes_in_registers_is_caught():
    with pytest.raises(AssertionError, match="_product: K by 4 neighbours"):
        compiled(torch.int8, 16)


def test_operand_of_bytes_of_a_warpgroup_passes():
    ((a, _),) = compiled_sm90.PRODUCT.findall(compiled(torch.int8, 64).asm["ttgir"])
    assert "kWidth = 2" in a


@pytest.mark.parametrize(("rows", "instruction"), [(16, "mma.sync"), (64, "wgmma.mma_async")])
def test_operand_of_halfwords_passes(rows, instruction):
    code = compiled(torch.bfloat16, rows)
    assert instruction in code.asm["ptx"]
    assert compiled_sm90.PRODUCT.search(code.asm["ttgir"])


def test_product_without_a_width_is_caught():
    code = compiled(torch.bfloat16, 16)
    text, ptx = code.asm["ttgir"], code.asm["ptx"]
    assert "kWidth = 2" in text
    with pytest.raises(AssertionError, match="no width"):
        compiled_sm90.require_ascending("k", text.replace(", kWidth = 2", ""), ptx)


def test_product_that_is_not_seen_is_caught():
    code = compiled(torch.bfloat16, 64)
    text, ptx = code.asm["ttgir"], code.asm["ptx"]
    hidden = text.replace("tt.dot", "tt.other").replace("warp_group_dot", "other")
    with pytest.raises(AssertionError, match="0 operands"):
        compiled_sm90.require_ascending("k", hidden, ptx)
