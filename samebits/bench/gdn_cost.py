"""What a layer of gated delta nets costs: multiply-adds, bytes moved, bytes of state.

    python -m samebits.bench.gdn_cost --key-heads 16 --value-heads 32

prints the tables of `ops/gdn/README.md`. A model of the core alone: no projection, convolution,
norm or gate. What it counts:

FLOPs     2 for each multiply-add of a product, a recurrence or a step of the inverse, as the
          kernels execute them; single products and sums, exp2 and addresses are left out. Prefill
          and training compute whole tiles on the GPU, decoding the rows and columns of `cpu.py`.
bytes     of `ops/gdn/triton*.py`: each element that a launch reads or writes counts once for that
          launch, however often it is touched. Lengths are whole chunks; what a sequence or a
          segment of it pays once (first and last states) is left out.
native    has no kernel here. chunk: the usual chunk form by w = T (beta exp2(gamma) k) and T (beta
          v), with the T of the other two; its backward is taken to be theirs. Recurrent: one token
          with the state read and written in place.

Costs are for one chunk and one value head until they are divided by the tokens of the chunk; what
value heads share (q, k, the key rows kept) is divided among them. Decoding is the mean over all
positions in a chunk, so the row that closes it is in there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from samebits.ops.gdn import tiles_sm90 as tiles

PREFILL = ("native chunk", "cpr", "chunk_row")
DECODE = ("native recurrent, fp32 state", "native recurrent, bf16 state", "cpr", "chunk_row")
STATES = ("native, fp32 state", "native, bf16 state", "cpr", "chunk_row")
NATIVE_COLUMNS = 64  # of v in a block of its outputs
_KIB = 1024


@dataclass(frozen=True)
class Layer:
    """Heads and sizes of one layer; `block` rows of the inverse, `width` taps of the convolution"""

    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    chunk: int = 64
    block: int = 16
    width: int = 4

    @property
    def keys(self) -> float:
        """Elements of one row of k (or q) that fall to one value head."""
        return self.key_dim * self.key_heads / self.value_heads

    def tiles(self, columns: int) -> int:
        """Blocks of this many columns of v, each of which computes the products of q and k."""
        return self.value_dim // min(columns, self.value_dim)

    @property
    def square(self) -> int:
        """Elements of one state."""
        return self.key_dim * self.value_dim


@dataclass(frozen=True)
class Cost:
    """Multiply-adds, bytes read and bytes written."""

    multiply_adds: float
    read: float
    written: float

    @property
    def flops(self) -> float:
        """Two for each multiply-add."""
        return 2 * self.multiply_adds

    @property
    def moved(self) -> float:
        """Bytes read and written."""
        return self.read + self.written

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.multiply_adds + other.multiply_adds,
            self.read + other.read,
            self.written + other.written,
        )

    def times(self, factor: float) -> Cost:
        """This many of them."""
        return Cost(self.multiply_adds * factor, self.read * factor, self.written * factor)


def _native_prepare(of: Layer) -> Cost:
    """Native: gamma and T from k, g and beta, in one pass."""
    c, b = of.chunk, of.block
    inverse = (c // b - 1) * b * c * c + c // b * (b - 1) * b * c
    return Cost(c * c * of.key_dim + inverse, 2 * c * of.keys + 8 * c, 4 * c + 2 * c * c)


def _prepare(of: Layer) -> Cost:
    """gamma with its decays, L once for each key head, T from L."""
    c, b = of.chunk, of.block
    begin = Cost(0, 12 * c, 16 * c)
    products = c * c * of.key_dim * of.key_heads / of.value_heads
    lower = Cost(products, 2 * c * of.keys + 8 * c, 4 * c * b + 2 * c * c)
    steps = c * c * (b - 1) // 2
    # Rows of L and T before the last block, and of L those of the last; the factors; a product.
    read = 2 * (c - b) * (c + b) + 2 * c * (b - 1) + 4 * b * c
    solve = Cost((c // b - 1) * b * c * c + steps, read, 4 * b * c + 2 * c * c)
    return begin + lower + solve


def _fold_into_t(of: Layer) -> Cost:
    """Native: w and T (beta v)."""
    c, k, v = of.chunk, of.key_dim, of.value_dim
    read = 2 * c * c + 8 * c + 2 * c * of.keys + 2 * c * v
    return Cost(c * c * (k + v), read, 2 * c * (k + v))


def _native_scan(of: Layer) -> Cost:
    """Native: boundary states and u, from w and T (beta v)."""
    c, k, v = of.chunk, of.key_dim, of.value_dim
    read = 2 * c * of.keys + 2 * c * (k + v) + 4 * c
    return Cost(2 * c * of.square, read, 2 * of.square + 2 * c * v)


def _scan(of: Layer, raw: bool) -> Cost:
    """Boundary states, and u unless `raw`, from T and the operands."""
    c, v = of.chunk, of.value_dim
    read = 2 * c * of.keys + 2 * c * v + 12 * c + 2 * c * c
    written = 4 * of.square if raw else 2 * of.square + 2 * c * v
    return Cost(2 * c * of.square + c * c * v, read, written)


def _rows(of: Layer, native: bool) -> Cost:
    """Outputs by the chunk form; those of chunk_row are fp32, by scores of two parts."""
    c, v = of.chunk, of.value_dim
    read = 4 * c * of.keys + 4 * c + 2 * c * v + 2 * of.square
    scores = c * c * of.key_dim
    if native:
        return Cost(scores * of.tiles(NATIVE_COLUMNS) + c * c * v + c * of.square, read, 2 * c * v)
    scores *= of.tiles(tiles.ROWS.columns)
    return Cost(scores + 2 * c * c * v + c * of.square, read + 4 * c, 4 * c * v)


def _recur(of: Layer) -> Cost:
    """Outputs by the recurrence, from the fp32 boundary states."""
    c, v = of.chunk, of.value_dim
    read = 4 * c * of.keys + 2 * c * v + 8 * c + 4 * of.square
    return Cost(3 * c * of.square, read, 2 * c * v)


def _inner(of: Layer) -> Cost:
    """What outputs give to the gradient of u inside of a chunk."""
    c, v = of.chunk, of.value_dim
    scores = c * c * of.key_dim * of.tiles(tiles.INNER.columns)
    return Cost(scores + c * c * v, 4 * c * of.keys + 2 * c * v + 4 * c, 2 * c * v)


def _reverse(of: Layer) -> Cost:
    """Gradients of the boundary states and of R, last chunk first."""
    c, v = of.chunk, of.value_dim
    read = 4 * c * of.keys + 4 * c * v + 12 * c + 2 * c * c
    return Cost(3 * c * of.square + c * c * v, read, 2 * of.square + 2 * c * v)


def _gradients(of: Layer) -> Cost:
    """Gradients of the operands."""
    c, k, v = of.chunk, of.key_dim, of.value_dim
    read = 4 * c * of.keys + 8 * c * v + 16 * c + 4 * of.square
    work = 3 * c * of.square + c * c * (4 * k + 2 * v)
    return Cost(work, read, 2 * c * v + 8 * c + 4 * c * of.keys)


def prefill(form: str, of: Layer) -> Cost:
    """Per token and value head, forms of `PREFILL`."""
    first, *passes = {
        "native chunk": (
            *(_native_prepare(of), _fold_into_t(of)),
            *(_native_scan(of), _rows(of, native=True)),
        ),
        "cpr": (_prepare(of), _scan(of, raw=True), _recur(of)),
        "chunk_row": (_prepare(of), _scan(of, raw=False), _rows(of, native=False)),
    }[form]
    return sum(passes, first).times(1 / of.chunk)


def train(form: str, of: Layer) -> Cost:
    """`prefill`, and a backward that computes boundary states and u again."""
    backward = _scan(of, raw=False) + _inner(of) + _reverse(of) + _gradients(of)
    return prefill(form, of) + backward.times(1 / of.chunk)


def decode(form: str, of: Layer) -> Cost:
    """Per token and value head, forms of `DECODE`; the mean over a chunk, its closing included."""
    once = _decode_once(form, of)
    if form.startswith("native"):
        state = of.square * (4 if "fp32" in form else 2)
        return once + Cost(3 * of.square, state, state)
    step = _decode_cpr if form == "cpr" else _decode_chunk_row
    total = sum((step(i, of) for i in range(of.chunk)), Cost(0, 0, 0))
    return once + total.times(1 / of.chunk)


def _decode_once(form: str, of: Layer) -> Cost:
    """q, k, v, g, beta; o"""
    width = 4 if form == "chunk_row" else 2
    return Cost(0, 4 * of.keys + 2 * of.value_dim + 8, width * of.value_dim)


def decode_step(i: int, of: Layer) -> Cost:
    """chunk_row, per token and value head: of row i of a chunk, the last of which closes it."""
    return _decode_once("chunk_row", of) + _decode_chunk_row(i, of)


def _inverse_row(i: int, of: Layer) -> int:
    """Multiply-adds of row i of X: whole squares of earlier blocks, then its own block."""
    first = i // of.block * of.block
    return first * first + (i - first) * (first + of.block)


def _kept_keys(rows: int, of: Layer) -> float:
    """Bytes of the keys kept before this row, which are read by whole groups of 8."""
    return 2 * of.keys * ((rows + 7) // 8 * 8)


def _decode_cpr(i: int, of: Layer) -> Cost:
    c, v = of.chunk, of.value_dim
    step = Cost(3 * of.square, 4 * of.square, 0)
    if i < c - 1:
        return step + Cost(0, 0, 4 * of.square + 2 * of.keys + 2 * v + 8)
    work = c * c * of.key_dim + 2 * c * of.square
    work += sum(_inverse_row(j, of) + (j + 1) * v for j in range(c))
    rows = _kept_keys(i, of) + i * (2 * v + 8)
    return step + Cost(work, 4 * of.square + rows, 4 * of.square)


def _decode_chunk_row(i: int, of: Layer) -> Cost:
    """Three launches: row i of T and of the scores, what needs the state, and the closing.

    The state is kept in planes: bf16, what that leaves of fp32, and a bit of ties.
    """
    c, v = of.chunk, of.value_dim
    first = i // of.block * of.block
    reached = (i + 16) // 16 * 16  # `cpu.py` multiplies keys in vectors of 16
    work = 2 * of.keys * reached + 2 * of.square + _inverse_row(i, of) + 3 * (i + 1) * v
    handed = 6 * c + 4  # the row of T and two parts of that of the scores, bf16; exp2(gamma_i)
    kept = _kept_keys(i, of) + 4 * i + first * 2 * c + (i - first) * 4 * c
    again = 4 * of.keys + 4  # q, k, beta
    read = kept + again + handed + 2 * of.square + i * 4 * v
    written = handed + 6 * c + 4 + 2 * of.keys + 4 * v
    if i == c - 1:
        work += c * of.square
        planes = 4 * of.square + of.square // 8
        read += planes + 2 * c * v + 2 * c * of.keys + 4 * c
        written += planes
    return Cost(work, read, written)


def window_bytes(of: Layer) -> int:
    """The convolution's last inputs, bf16: the same for all."""
    channels = 2 * of.key_heads * of.key_dim + of.value_heads * of.value_dim
    return 2 * (of.width - 1) * channels


def state_bytes(form: str, of: Layer) -> int:
    """One layer's state of one sequence on sm90, forms of `STATES`, without the convolution's
    window."""
    c, v = of.chunk, of.value_dim
    if form.startswith("native"):
        return of.value_heads * of.square * (4 if "fp32" in form else 2)
    keys = 2 * c * of.key_heads * of.key_dim
    if form == "cpr":
        return keys + of.value_heads * (8 * of.square + 8 * c + 2 * c * v)
    rows = 4 * of.block * c + 4 * c + 4 * c * v + 2 * c * c
    return keys + of.value_heads * (4 * of.square + of.square // 8 + rows)


def boundary_bytes(form: str, of: Layer) -> int:
    """Of `state_bytes`, those alive where a chunk ends."""
    ties = of.value_heads * of.square // 8 if form == "chunk_row" else 0
    return state_bytes(form if form.startswith("native") else "native, fp32 state", of) + ties


def tables(of: Layer) -> str:
    """Work per token and state per sequence, in Markdown."""
    lines = [
        "| mode | form | kFLOPs a head | KiB read | KiB written | MFLOPs a layer | MiB a layer |",
        "|---" * 7 + "|",
    ]
    for mode, price, forms in (
        ("train", train, PREFILL),
        ("prefill", prefill, PREFILL),
        ("decode", decode, DECODE),
    ):
        for form in forms:
            head = price(form, of)
            layer = head.times(of.value_heads)
            lines.append(
                f"| {mode} | {form} | {head.flops / 1e3:.0f} | {head.read / _KIB:.2f} "
                f"| {head.written / _KIB:.2f} | {layer.flops / 1e6:.2f} "
                f"| {layer.moved / _KIB**2:.3f} |"
            )
    window = window_bytes(of)
    stock = state_bytes(STATES[0], of) + window
    lines += [
        "",
        "| state of a sequence | KiB a head | KiB a layer | of stock, fp32 | alive at a boundary |",
        "|---" * 5 + "|",
    ]
    for form in STATES:
        size, alive = state_bytes(form, of), boundary_bytes(form, of) + window
        lines.append(
            f"| {form} | {size / of.value_heads / _KIB:.2f} | {(size + window) / _KIB:.0f} "
            f"| {(size + window) / stock:.2f} | {alive / _KIB:.0f} |"
        )
    return "\n".join(lines)


def main(
    key_heads: Annotated[int, typer.Option(min=1)] = Layer.key_heads,
    value_heads: Annotated[int, typer.Option(min=1)] = Layer.value_heads,
    key_dim: Annotated[int, typer.Option(min=1)] = Layer.key_dim,
    value_dim: Annotated[int, typer.Option(min=1)] = Layer.value_dim,
    chunk: Annotated[int, typer.Option(min=16)] = Layer.chunk,
) -> None:
    """Print the cost of one layer of gated delta nets."""
    if value_heads % key_heads or chunk % Layer.block:
        raise typer.BadParameter("value heads must be a multiple of key heads, a chunk one of 16")
    print(tables(Layer(key_heads, value_heads, key_dim, value_dim, chunk)))


if __name__ == "__main__":
    typer.run(main)
