"""The cost model of gated delta nets against counts: it is held by what kernels execute.

Hopper kernels: traffic and products under Triton's interpreter (`gdn_counted.py`). Decoding on the
CPU: the multiply-adds of the bound kernels, run as plain Python. Native forms, which have no kernel
here: a walk over their passes. Each count comes with outputs that are right.
"""

from __future__ import annotations

import ast
import math
import subprocess
import sys
import types
from pathlib import Path

import interpreter
import numpy as np
import pytest
import torch

from samebits.bench import gdn_cost
from samebits.bench.gdn_cost import Cost, Layer
from samebits.ops import gdn, jit
from samebits.ops.gdn import cpu, oracle, scenarios

each_schedule = pytest.mark.parametrize("schedule", gdn.SCHEDULES)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


# --- Hopper kernels, interpreted

COUNTED = Layer(key_heads=1, value_heads=2, key_dim=16, value_dim=128, chunk=8, block=4)


@pytest.fixture(scope="module")
def counted():
    pytest.importorskip("triton")
    return interpreter.run("gdn_counted.py")


def totals(cost: Cost, of: Layer) -> dict[str, float]:
    """Of one chunk of all value heads, as they are counted."""
    whole = cost.times(of.chunk * of.value_heads)
    return {"multiply_adds": whole.multiply_adds, "read": whole.read, "written": whole.written}


def require_counts(found: dict[str, float], cost: Cost, names=("read", "written")) -> None:
    assert found["error"] < 2e-3
    wanted = totals(cost, COUNTED)
    assert {x: found[x] for x in names} == pytest.approx({x: wanted[x] for x in names}, rel=1e-12)


@each_schedule
def test_prefill_moves_and_multiplies_what_the_model_says(counted, schedule):
    cost = gdn_cost.prefill(schedule, COUNTED)
    require_counts(counted[f"prefill {schedule}"], cost, ("multiply_adds", "read", "written"))


def test_the_backward_moves_and_multiplies_what_the_model_says(counted):
    cost = gdn_cost.train("cpr", COUNTED) + gdn_cost.prefill("cpr", COUNTED).times(-1)
    require_counts(counted["backward"], cost, ("multiply_adds", "read", "written"))


@each_schedule
def test_decoding_moves_what_the_model_says(counted, schedule):
    require_counts(counted[f"decode {schedule}"], gdn_cost.decode(schedule, COUNTED))


# --- the CPU's kernels as plain Python

KERNELS = (
    *("_snapshot", "_decays", "_update_row", "_close", "_boundary"),
    *("_recur", "_chunk_row", "_cpr"),
)


class PlainKernels:
    """The functions of `cpu.py` uncompiled, with counting primitives and a chunk of their own."""

    def __init__(self, chunk: int, block: int) -> None:
        self.multiply_adds = 0
        self.env = dict(vars(cpu)) | {
            "CHUNK": chunk,
            "BLOCK": block,
            "fma": self.fma,
            "_chains": self.chains,
            "narrow": self.narrow,
            "widen": self.widen,
            "exp2_32": np.exp2,
        }
        for name in KERNELS:
            self.env[name] = types.FunctionType(getattr(cpu, name).py_func.__code__, self.env)

    def fma(self, a, b, c):
        self.multiply_adds += 1
        return np.float32(float(a) * float(b) + float(c))

    @staticmethod
    def widen(bits):
        return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)[()]

    @staticmethod
    def narrow(x):
        bits = int(np.float32(x).view(np.uint32))
        return np.uint16(bits + 0x7FFF + (bits >> 16 & 1) >> 16)

    def chains(self, p, p_at, p_stride, rows, v, v_at, v_stride, terms, out, o_at, o_stride, width):
        self.multiply_adds += rows * terms * width
        for i in range(rows):
            line = out[o_at + i * o_stride :][:width]
            for j in range(terms):
                right = v[v_at + j * v_stride :][:width]
                right = self.widen(right) if right.dtype == np.uint16 else right
                line += p[p_at + i * p_stride + j] * right


@each_schedule
def test_decoding_multiplies_what_the_model_says(monkeypatch, schedule):
    of = Layer(key_heads=1, value_heads=2, key_dim=16, value_dim=32, chunk=32, block=8)
    monkeypatch.setattr(gdn, "CHUNK", of.chunk)
    monkeypatch.setattr(gdn, "BLOCK", of.block)
    q, k, v, g, beta = scenarios.make("n", of.chunk, 1, 2, of.key_dim, of.value_dim)
    spec = gdn.state_spec(schedule, 1, 2, of.key_dim, of.value_dim)
    state = [torch.zeros((1, *shape), dtype=dtype) for _, shape, dtype in spec]
    state[0].normal_(generator=torch.Generator().manual_seed(1))
    wanted, final = oracle.recurrence([q, k, v, g, beta], [0, of.chunk], 0.25, state[0].clone())
    o = torch.zeros_like(v, dtype=gdn.OUTPUTS[schedule])
    plain = PlainKernels(of.chunk, of.block)
    plain.env[f"_{schedule}"](
        *(jit.as_numpy(x).reshape(-1) for x in (q, k, v, g, beta, o)),
        *(jit.as_numpy(x).reshape(-1) for x in state),
        np.array([x.stride(0) for x in state]),
        *(np.array(x) for x in ([0], [0, of.chunk], [0], [False])),
        *(1, 2, of.key_dim, of.value_dim, np.float32(0.25), 0, 1),
    )
    assert error(o, wanted) < 1e-2 and error(state[0], final) < 1e-2
    assert plain.multiply_adds == totals(gdn_cost.decode(schedule, of), of)["multiply_adds"]


# --- native forms, walked


class Tally:
    """Memory whose elements count once in each launch, and products that count themselves."""

    def __init__(self) -> None:
        self.multiply_adds = self.read = self.written = 0
        self.arrays: list[Memory] = []

    def array(self, data: np.ndarray, width: int) -> Memory:
        self.arrays.append(Memory(data, width))
        return self.arrays[-1]

    def dot(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        self.multiply_adds += a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b

    def launch(self) -> None:
        """The end of one."""
        for x in self.arrays:
            self.read += x.width * int(x.read.sum())
            self.written += x.width * int(x.written.sum())
            x.read[:] = x.written[:] = False


class Memory:
    def __init__(self, data: np.ndarray, width: int) -> None:
        self.data, self.width = data, width
        self.read, self.written = np.zeros(data.shape, bool), np.zeros(data.shape, bool)

    def __getitem__(self, at) -> np.ndarray:
        self.read[at] = True
        return self.data[at].copy()

    def __setitem__(self, at, value) -> None:
        self.written[at] = True
        self.data[at] = value


def walk_operands(tally: Tally, of: Layer, tokens: int):
    rows = scenarios.make("n", tokens, of.key_heads, of.value_heads, of.key_dim, of.value_dim)
    wanted, _ = oracle.recurrence(rows, [0, tokens], 1.0)
    widths = (2, 2, 2, 4, 4)
    arrays = [tally.array(x.double().numpy(), w) for x, w in zip(rows, widths, strict=True)]
    return arrays, tally.array(np.zeros(wanted.shape), 2), wanted


def walk_inverse(tally: Tally, lower: np.ndarray, of: Layer) -> np.ndarray:
    x = np.zeros_like(lower)
    for first in range(0, of.chunk, of.block):
        block = slice(first, first + of.block)
        rows = np.eye(of.chunk)[block]
        if first:
            rows -= tally.dot(np.where(np.arange(of.chunk) < first, lower[block], 0), x)
        for j in range(of.block - 1):
            rows -= tally.dot(lower[block, first + j][:, None], rows[j][None])
        x[block] = rows
    return x


def walk_native_chunk(of: Layer, chunks: int) -> tuple[Tally, float]:
    tally, c = Tally(), of.chunk
    (q, k, v, g, beta), o, wanted = walk_operands(tally, of, chunks * c)
    heads, group = of.value_heads, of.value_heads // of.key_heads
    shape = (chunks, heads)
    gamma = tally.array(np.zeros((*shape, c)), 4)
    t = tally.array(np.zeros((*shape, c, c)), 2)
    w = tally.array(np.zeros((*shape, c, of.key_dim)), 2)
    u = tally.array(np.zeros((*shape, c, of.value_dim)), 2)
    new = tally.array(np.zeros((*shape, c, of.value_dim)), 2)
    entry = tally.array(np.zeros((*shape, of.key_dim, of.value_dim)), 2)
    places = [
        (n, h, slice(n * c, n * c + c), h // group) for n in range(chunks) for h in range(heads)
    ]

    def decay(x):
        return np.tril(np.exp(x[:, None] - x[None]))

    for n, h, at, key_head in places:
        gamma[n, h] = x = np.cumsum(g[at, h])
        keys = k[at, key_head]
        lower = np.tril(beta[at, h][:, None] * tally.dot(keys, keys.T) * decay(x), -1)
        t[n, h] = walk_inverse(tally, lower, of)
    tally.launch()
    for n, h, at, key_head in places:
        b, square = beta[at, h][:, None], t[n, h]
        w[n, h] = tally.dot(square, b * np.exp(gamma[n, h])[:, None] * k[at, key_head])
        u[n, h] = tally.dot(square, b * v[at, h])
    tally.launch()
    states = np.zeros((heads, of.key_dim, of.value_dim))
    for n, h, at, key_head in places:
        x, entry[n, h] = gamma[n, h], states[h]
        new[n, h] = rows = u[n, h] - tally.dot(w[n, h], states[h])
        kept = np.exp(x[-1] - x)[:, None] * k[at, key_head]
        states[h] = np.exp(x[-1]) * states[h] + tally.dot(kept.T, rows)
    tally.launch()
    tile = gdn_cost.NATIVE_COLUMNS
    for n, h, at, key_head in places:
        for first in range(0, of.value_dim, tile):
            columns = slice(first, first + tile)
            queries, x = q[at, key_head], gamma[n, h]
            scores = tally.dot(queries, k[at, key_head].T) * decay(x)
            reach = np.exp(x)[:, None] * tally.dot(queries, entry[n, h][:, columns])
            new_rows = new[n, h, :, columns]
            o[at, h, columns] = reach + tally.dot(scores, new_rows)
    tally.launch()
    return tally, error(torch.from_numpy(o.data), wanted)


def walk_native_recurrent(of: Layer, tokens: int, width: int) -> tuple[Tally, float]:
    tally = Tally()
    (q, k, v, g, beta), o, wanted = walk_operands(tally, of, tokens)
    state = tally.array(np.zeros((of.value_heads, of.key_dim, of.value_dim)), width)
    for n in range(tokens):
        for h in range(of.value_heads):
            key_head = h // (of.value_heads // of.key_heads)
            key = k[n, key_head][:, None]
            s = np.exp(g[n, h]) * state[h]
            delta = beta[n, h] * (v[n, h][None] - tally.dot(key.T, s))
            state[h] = s = s + tally.dot(key, delta)
            o[n, h] = tally.dot(q[n, key_head][None], s)[0]
        tally.launch()
    return tally, error(torch.from_numpy(o.data), wanted)


def test_the_native_chunk_form_costs_what_the_model_says():
    of = Layer(key_heads=2, value_heads=4, key_dim=16, value_dim=128, chunk=16, block=4)
    tally, wrong = walk_native_chunk(of, 3)
    assert wrong < 1e-12
    wanted = totals(gdn_cost.prefill("native chunk", of).times(3), of)
    found = {name: getattr(tally, name) for name in wanted}
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("form, width", [(gdn_cost.DECODE[0], 4), (gdn_cost.DECODE[1], 2)])
def test_the_native_recurrence_costs_what_the_model_says(form, width):
    of = Layer(key_heads=2, value_heads=4, key_dim=16, value_dim=32, chunk=8, block=4)
    tally, wrong = walk_native_recurrent(of, of.chunk, width)
    assert wrong < 1e-12
    wanted = totals(gdn_cost.decode(form, of), of)
    assert {name: getattr(tally, name) for name in wanted} == pytest.approx(wanted, rel=1e-12)


# --- states

LAYERS = (Layer(2, 4), Layer(), Layer(4, 4, 64, 32), Layer(1, 6, 16, 128, width=3))


@pytest.mark.parametrize("of", LAYERS)
@each_schedule
def test_state_bytes_are_those_of_the_operator(of, schedule):
    heads = of.key_heads, of.value_heads, of.key_dim, of.value_dim
    spec = gdn.state_spec(schedule, *heads, "sm90")
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in spec]
    assert gdn_cost.state_bytes(schedule, of) == sum(sizes)
    alive = 3 if schedule == "chunk_row" else 1
    assert gdn_cost.boundary_bytes(schedule, of) == sum(sizes[:alive])


@pytest.mark.engine
def test_native_states_are_those_of_vllm():
    """Its own shape function, taken out of the tree's source: importing vLLM takes seconds."""
    from samebits.patching import tree_path

    source = tree_path("vllm", "qwen3.5-tiny") / "vllm/model_executor/layers/mamba/mamba_utils.py"
    (function,) = [
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "gated_delta_net_state_shape"
    ]
    function.decorator_list = []
    env = {"divide": lambda a, b: a // b}
    exec(compile(ast.Module([function], []), str(source), "exec"), env)
    calculator = types.SimpleNamespace(_orient_conv_shape=lambda dim, rows: (rows, dim))
    for of in LAYERS:
        heads = (of.key_heads, of.value_heads, of.key_dim, of.value_dim)
        window, state = env["gated_delta_net_state_shape"](calculator, 1, *heads, of.width)
        assert 2 * math.prod(window) == gdn_cost.window_bytes(of)
        for form, width in zip(gdn_cost.STATES, (4, 2), strict=False):
            assert gdn_cost.state_bytes(form, of) == width * math.prod(state)


# --- pages


def test_the_readme_has_the_tables_that_the_command_prints():
    printed = subprocess.run(
        [sys.executable, "-m", "samebits.bench.gdn_cost"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    page = Path(gdn.__file__).with_name("README.md").read_text()
    assert printed.startswith("| mode |")
    assert all(table in page for table in printed.strip().split("\n\n"))
