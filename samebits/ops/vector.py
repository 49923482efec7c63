"""Vector micro-kernels as explicit LLVM IR: the inner loops of the CPU matrix operators.

A dot product has LANES partial sums: lane l sums the terms k = l, l + LANES, ... ascending by fp32
fma from +0; lanes are then folded as `scalar.fold_lanes` does, ((0+1)+(2+3))+.... A tile computes
several dot products side by side, which moves no rounding: each keeps its own lanes. LLVM splits a
16-lane vector into what the machine has (two AVX2 registers or one AVX-512 register).
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from samebits.ops.scalar import LANES, narrow

_F32 = ir.FloatType()
_I64 = ir.IntType(64)


def _vec(width: int, element: ir.Type = _F32) -> ir.VectorType:
    return ir.VectorType(element, width)


def _splat(value: float, width: int) -> ir.Constant:
    return ir.Constant(_vec(width), [ir.Constant(_F32, value)] * width)


def _fma(builder, width: int, a, b, c):
    t = _vec(width)
    fn = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(t, [t, t, t]), f"llvm.fma.v{width}f32"
    )
    return builder.call(fn, [a, b, c])


def _shuffle(builder, a, b, mask: list[int]):
    return builder.shuffle_vector(a, b, ir.Constant(_vec(len(mask), ir.IntType(32)), mask))


def _data(context, builder, array_type, array):
    return context.make_array(array_type)(context, builder, value=array).data


def _load(builder, base, element, offset, width: int):
    """`width` fp32 values at base[offset...]; bf16 bits (uint16) are widened, which is exact."""
    at = builder.gep(base, [offset])
    if element == types.float32:
        return builder.load(builder.bitcast(at, _vec(width).as_pointer()), align=4)
    raw = builder.load(builder.bitcast(at, _vec(width, ir.IntType(16)).as_pointer()), align=2)
    i32 = _vec(width, ir.IntType(32))
    sixteen = ir.Constant(i32, [16] * width)
    return builder.bitcast(builder.shl(builder.zext(raw, i32), sixteen), _vec(width))


# Fold levels over two 8-wide vectors: positions of the left and of the right operand of each sum.
# Masks stay inside 128-bit halves, or move whole halves, where a shuffle is one instruction.
_EVEN, _ODD = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
_LOW, _HIGH = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
_FOLD_ORDER = (0, 1, 4, 5, 2, 3, 6, 7)  # fed in this order, sum i comes out at position i


def _fold(builder, accumulators: list) -> list:
    """Fold each 16-lane accumulator to ((0+1)+(2+3))+...; returns scalars."""

    def pairwise(level: list, left: list[int], right: list[int]) -> list:
        return [
            builder.fadd(_shuffle(builder, a, b, left), _shuffle(builder, a, b, right))
            for a, b in zip(level[::2], level[1::2], strict=True)
        ]

    sums = []
    for start in range(0, len(accumulators), 8):
        part = accumulators[start : start + 8]
        filled = part + [part[0]] * (8 - len(part))
        level = []
        for i in _FOLD_ORDER:
            for half in (0, 8):
                lanes = list(range(half, half + 8))
                level.append(_shuffle(builder, filled[i], filled[i], lanes))
        # Lane pairs, fours, eights (their halves lie 128 bits apart by then), sixteen.
        for left, right in ((_EVEN, _ODD), (_EVEN, _ODD), (_LOW, _HIGH), (_EVEN, _ODD)):
            level = pairwise(level, left, right)
        for i in range(len(part)):
            sums.append(builder.extract_element(level[0], ir.Constant(ir.IntType(32), i)))
    return sums


def dot_tile(rows: int, cols: int):
    """A micro-kernel for `rows` x `cols` dot products.

    tile(x, x_at, x_stride, w, w_at, w_stride, steps, out, out_at, out_stride) writes
    out[out_at + i * out_stride + j] = dot(x row i, w row j) over steps * LANES terms. x is flat
    fp32; w is flat fp32, or uint16 holding bf16 (same bits: widening is exact); out is flat fp32.
    """

    @intrinsic
    def tile(typingctx, x, x_at, x_stride, w, w_at, w_stride, steps, out, out_at, out_stride):
        n = types.int64
        signature = types.void(x, n, n, w, n, n, n, out, n, n)

        def codegen(context, builder, sig, args):
            xs, x0, xd, ws, w0, wd, count, outs, o0, od = args
            x_type, w_type = sig.args[0], sig.args[3]
            x_data = _data(context, builder, x_type, xs)
            w_data = _data(context, builder, w_type, ws)
            o_data = _data(context, builder, sig.args[7], outs)
            x_rows = [
                builder.gep(x_data, [builder.add(x0, builder.mul(xd, _I64(i)))])
                for i in range(rows)
            ]
            w_rows = [
                builder.gep(w_data, [builder.add(w0, builder.mul(wd, _I64(j)))])
                for j in range(cols)
            ]
            slots = [
                cgutils.alloca_once_value(builder, _splat(0.0, LANES)) for _ in range(rows * cols)
            ]
            for slot in slots:
                builder.store(_splat(0.0, LANES), slot)
            with cgutils.for_range(builder, count) as loop:
                k = builder.mul(loop.index, _I64(LANES))
                left = [_load(builder, p, x_type.dtype, k, LANES) for p in x_rows]
                for j in range(cols):
                    right = _load(builder, w_rows[j], w_type.dtype, k, LANES)
                    for i in range(rows):
                        slot = slots[i * cols + j]
                        builder.store(
                            _fma(builder, LANES, left[i], right, builder.load(slot)), slot
                        )
            sums = _fold(builder, [builder.load(slot) for slot in slots])
            for i in range(rows):
                row = builder.gep(o_data, [builder.add(o0, builder.mul(od, _I64(i)))])
                for j in range(cols):
                    builder.store(sums[i * cols + j], builder.gep(row, [_I64(j)]))
            return context.get_dummy_value()

        return signature, codegen

    return tile


@intrinsic
def widen_row(typingctx, source, source_at, target, target_at, steps):
    """target[target_at + i] = source[source_at + i], i < steps * LANES; flat bf16 bits to fp32."""
    signature = types.void(source, types.int64, target, types.int64, types.int64)

    def codegen(context, builder, sig, args):
        src, s0, dst, d0, count = args
        source_data = _data(context, builder, sig.args[0], src)
        target_data = _data(context, builder, sig.args[2], dst)
        with cgutils.for_range(builder, count) as loop:
            k = builder.mul(loop.index, _I64(LANES))
            values = _load(builder, source_data, types.uint16, builder.add(s0, k), LANES)
            at = builder.gep(target_data, [builder.add(d0, k)])
            builder.store(values, builder.bitcast(at, _vec(LANES).as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, codegen


def axpy_tile(rows: int, vectors: int):
    """A micro-kernel for `rows` x (`vectors` * 8) weighted row sums, each one fma chain.

    tile(p, p_at, p_stride, v, v_at, v_stride, terms, out, out_at, out_stride) continues
    out[i, d] = fma(p[i, j], v[j, d], out[i, d]) for j = 0 .. terms - 1, ascending. v is flat fp32,
    or uint16 holding bf16; p and out are flat fp32.
    """
    width = 8

    @intrinsic
    def tile(typingctx, p, p_at, p_stride, v, v_at, v_stride, terms, out, out_at, out_stride):
        n = types.int64
        signature = types.void(p, n, n, v, n, n, n, out, n, n)

        def codegen(context, builder, sig, args):
            ps, p0, pd, vs, v0, vd, count, outs, o0, od = args
            v_type = sig.args[3]
            p_data = _data(context, builder, sig.args[0], ps)
            v_base = builder.gep(_data(context, builder, v_type, vs), [v0])
            o_data = _data(context, builder, sig.args[7], outs)
            p_rows, targets, slots = [], [], []
            for i in range(rows):
                p_rows.append(builder.gep(p_data, [builder.add(p0, builder.mul(pd, _I64(i)))]))
                row = builder.gep(o_data, [builder.add(o0, builder.mul(od, _I64(i)))])
                for d in range(vectors):
                    at = builder.gep(row, [_I64(d * width)])
                    targets.append(builder.bitcast(at, _vec(width).as_pointer()))
                    slots.append(cgutils.alloca_once(builder, _vec(width)))
                    builder.store(builder.load(targets[-1], align=4), slots[-1])
            with cgutils.for_range(builder, count) as loop:
                row = builder.gep(v_base, [builder.mul(loop.index, vd)])
                values = [
                    _load(builder, row, v_type.dtype, _I64(d * width), width)
                    for d in range(vectors)
                ]
                zero = ir.Constant(ir.IntType(32), 0)
                for i in range(rows):
                    weight = builder.load(builder.gep(p_rows[i], [loop.index]))
                    one = builder.insert_element(
                        ir.Constant(_vec(width), ir.Undefined), weight, zero
                    )
                    weights = _shuffle(builder, one, one, [0] * width)
                    for d in range(vectors):
                        slot = slots[i * vectors + d]
                        builder.store(
                            _fma(builder, width, weights, values[d], builder.load(slot)), slot
                        )
            for slot, target in zip(slots, targets, strict=True):
                builder.store(builder.load(slot), target, align=4)
            return context.get_dummy_value()

        return signature, codegen

    return tile


def store(out, at, value):
    """out[at] = an fp32 value: as it is, or rounded to bf16 bits where `out` holds uint16."""
    raise NotImplementedError("only inside kernels")


@overload(store, inline="always")
def _store(out, at, value):
    if out.dtype == types.uint16:

        def put(out, at, value):
            out[at] = narrow(value)
    else:

        def put(out, at, value):
            out[at] = value

    return put
