"""Compiles Triton kernels for sm90 without a GPU, as their launchers would launch them.

A launcher is called on CPU tensors with every kernel replaced by a recorder of its arguments.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia import hopper as gluon
from triton.tools.tensor_descriptor import TensorDescriptor

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    int: "i32",
    bool: "i1",
    float: "fp32",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
# Both operands of a product in Triton's intermediate form, and the instructions it becomes.
PRODUCT = re.compile(
    r"\b(?:tt\.dot|ttng\.warp_group_dot) .* : ((?:tensor|!ttg\.memdesc)<.*>) \* "
    r"((?:tensor|!ttg\.memdesc)<.*>) -> "
)
MMA = re.compile(r"\b(?:w?g?mma)\.(?:mma_async\.)?sync\b")


@dataclass
class Recorder:
    """Stands in for a kernel: kernel[grid](...) notes the call and does nothing."""

    kernel: Any
    calls: list[tuple[tuple[int, ...], dict[str, Any]]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            bound = dict(zip(self.kernel.arg_names, args, strict=False))
            self.calls.append((grid, bound | kwargs))

        return launch


@contextlib.contextmanager
def recorded(*modules: ModuleType) -> Iterator[list[Recorder]]:
    """Every kernel of `modules` that a launcher can launch, recording its calls."""
    recorders = []
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, triton.JITFunction):
                    recorder = Recorder(value)
                    setattr(module, name, recorder)
                    stack.callback(setattr, module, name, value)
                    recorders.append(recorder)
        yield recorders


def compiled(kernel: Any, arguments: dict[str, Any]) -> CompiledKernel:
    """`kernel` for sm90, down to machine code, with the types of these arguments.

    Every matrix product in it takes K in ascending order (`require_ascending`).
    """
    constants = {p.name for p in kernel.params if p.is_constexpr}
    general = {p.name for p in kernel.params if p.do_not_specialize}
    signature, constexprs, attrs = {}, {}, {}
    for position, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name in constants or value is None:  # a launch drops what is None
            signature[name] = "constexpr"
            constexprs[(position,)] = value
        elif isinstance(value, TensorDescriptor | gluon.TensorDescriptor):
            kind = TYPES[value.base.dtype].removeprefix("*") + str(list(value.block_shape))
            layout = f",{value.layout!r}" if kernel.is_gluon() else ""
            signature[name] = f"tensordesc<{kind}{layout}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attrs[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = TYPES[type(value)]
            # As a launch specialises it.
            if type(value) is int and value % 16 == 0 and name not in general:
                attrs[(position,)] = [["tt.divisibility", 16]]
    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    source = form(kernel, signature, constexprs, attrs)
    code = triton.compile(source, target=TARGET, options=options)
    require_ascending(kernel.__name__, code.asm["ttgir"], code.asm["ptx"])
    return code


def require_ascending(name: str, ttgir: str, ptx: str) -> None:
    """Every matrix product of a compiled kernel takes K in ascending order.

    Triton permutes K inside of a tensor core's instructions where an operand in registers comes
    from a load of bytes (`kWidth` 4 in its layout), and the sums are others. An operand in shared
    memory lies there by K, and one of a product by fma has a blocked layout: neither has a width.
    A product of the tensor core that is not seen here is an error as well.
    """
    operands = [operand for pair in PRODUCT.findall(ttgir) for operand in pair]
    on_core = 0
    for operand in operands:
        width = re.search(r"kWidth = (\d+)", operand)
        plain = "#ttg.dot_op" in operand and "parent = #blocked" in operand
        if width:
            assert int(width[1]) in (1, 2), f"{name}: K by {width[1]} neighbours"
        else:
            assert plain or operand.startswith("!ttg.memdesc"), f"{name}: no width in {operand}"
        on_core += not plain
    assert bool(on_core) == bool(MMA.search(ptx)), f"{name}: {on_core} operands of the tensor core"
