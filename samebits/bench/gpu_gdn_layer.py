"""One layer of Gated DeltaNet as a chain of passes, ours and from native parts; part of
`samebits.bench.gpu`.

Ours calls what the engines call, in their order and shapes: Megatron's layer projects once
(`samebits/hooks/megatron/gdn`), vLLM's twice (`samebits/hooks/vllm/gdn`). Native is cuBLAS and
flash-linear-attention with all that its kernels take in: gates, l2 norm and sigmoid. The three
convolutions of native (of queries, keys, values) spare it three copies behind a single one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import conv1d as convolve
from torch.nn.functional import linear, pad, silu, softplus

from samebits.ops import conv1d, gated_rms_norm, gdn, gdn_gate, gemm, l2_norm
from samebits.ops.gdn import oracle
from samebits.plan import ReductionPlan

EPS = 1e-6
# The plan of Qwen3.5-9B's recipe.
PLAN = ReductionPlan(2)
# What a gradient flows into.
LEAVES = ("x", "w_in", "w_conv", "A_log", "dt_bias", "w_norm", "w_out")

Values = dict[str, torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Sizes:
    """A layer's sizes; Qwen3.5-9B's by default."""

    hidden: int = 4096
    key_heads: int = 16
    heads: int = 32
    size: int = 128
    taps: int = 4

    @property
    def scale(self) -> float:
        """Of the queries."""
        return self.size**-0.5

    @property
    def qkv(self) -> list[int]:
        """Channels of queries, keys and values: those of the convolution."""
        keys = self.key_heads * self.size
        return [keys, keys, self.heads * self.size]

    @property
    def projected(self) -> list[int]:
        """Rows of `w_in`: q, k, v together, z, b, a."""
        return [sum(self.qkv), self.heads * self.size, self.heads, self.heads]

    def of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[..., heads * size] -> [..., heads, size]."""
        return x.unflatten(-1, (-1, self.size))


@dataclass(frozen=True)
class Pass:
    """A part of a layer: reads values by name, and adds others."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    call: Callable[..., Tensors]


@dataclass(frozen=True)
class Native:
    """Kernels of the native layer; flash-linear-attention's by default (`native_kernels`)."""

    conv: Callable[..., Any]
    conv_update: Callable[..., Any]
    chunk: Callable[..., Any]
    recurrent: Callable[..., Any]
    norm: Callable[..., Any]


@dataclass(frozen=True)
class Decoding:
    """Where the states of R sequences lie that have one row each; tables of R, R + 1, R rows."""

    states: list[torch.Tensor]
    window: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    context: torch.Tensor

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the operators take them."""
        return self.slots, self.starts, self.context


@dataclass(frozen=True)
class NativeDecoding:
    """Of R sequences: windows [R, C, W] of q, k and v, states [R, HV, K, V] fp32."""

    windows: list[torch.Tensor]
    states: torch.Tensor


def fresh(sizes: Sizes, schedule: str, count: int, device: str) -> Decoding:
    """Of sequences that have no row yet."""
    platform = "cpu" if device == "cpu" else "sm90"
    geometry = (sizes.key_heads, sizes.heads, sizes.size, sizes.size)
    spec = gdn.state_spec(schedule, *geometry, platform)
    states = [torch.zeros((count, *shape), dtype=kind, device=device) for _, shape, kind in spec]
    window = torch.zeros((count, sizes.taps - 1, sum(sizes.qkv)), device=device).bfloat16()
    of = torch.arange(count + 1, dtype=torch.int32, device=device)
    return Decoding(states, window, of[:-1], of, torch.zeros_like(of[:-1]))


def natively_fresh(sizes: Sizes, count: int, device: str) -> NativeDecoding:
    """Of sequences that have no row yet."""
    windows = [torch.zeros(count, c, sizes.taps, device=device).bfloat16() for c in sizes.qkv]
    shape = (count, sizes.heads, sizes.size, sizes.size)
    return NativeDecoding(windows, torch.zeros(shape, device=device))


def drawn(sizes: Sizes, rows: int, device: str, seed: int = 0) -> Values:
    """x [rows, hidden] and the weights of a layer; all bf16, but A_log."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, by: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=random, device=device) * by).bfloat16()

    hidden, values = sizes.hidden, sizes.heads * sizes.size
    return {
        "x": normal(rows, hidden),
        "w_in": normal(sum(sizes.projected), hidden, by=hidden**-0.5),
        "w_conv": normal(sum(sizes.qkv), sizes.taps, by=sizes.taps**-0.5),
        "A_log": -4 * torch.rand(sizes.heads, generator=random, device=device),
        "dt_bias": normal(sizes.heads, by=0.5),
        "w_norm": 1 + normal(sizes.size, by=0.1),
        "w_out": normal(hidden, values, by=values**-0.5),
    }


def traced(passes: Sequence[Pass], values: Values) -> tuple[Values, list[list[torch.Tensor]]]:
    """All values behind the last pass, and what each pass read."""
    values, read = dict(values), []
    for one in passes:
        operands = [values[name] for name in one.reads]
        read.append(operands)
        values |= zip(one.writes, one.call(*operands), strict=True)
    return values, read


def run(passes: Sequence[Pass], values: Values) -> torch.Tensor:
    """The layer's output [rows, hidden]."""
    return traced(passes, values)[0]["out"]


def _ending(sizes: Sizes, schedule: str) -> list[Pass]:
    """What follows the core, the same in both engines."""
    wide = gdn.OUTPUTS[schedule] == torch.float32

    def norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> Tensors:
        return (gated_rms_norm.gated_rms_norm(o, sizes.of_heads(z), weight, EPS, wide=wide),)

    def out(y: torch.Tensor, weight: torch.Tensor) -> Tensors:
        return (gemm.row_parallel(y.flatten(-2), weight, PLAN),)

    return [Pass("norm", ("o", "z", "w_norm"), ("y",), norm), _out(out)]


def _out(call: Callable[..., Tensors]) -> Pass:
    return Pass("output projection", ("y", "w_out"), ("out",), call)


_GATE = Pass(
    "gate",
    ("a", "b", "A_log", "dt_bias"),
    ("g", "beta"),
    lambda *operands: gdn_gate.gate(*operands),
)


def trained(sizes: Sizes, starts: torch.Tensor, schedule: str) -> list[Pass]:
    """Ours, of packed sequences that start at `starts`, as Megatron's layer."""
    exact = sum(sizes.qkv[:2])

    def project(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
        return gemm.linear(x, weight).split(sizes.projected, -1)

    def norm(qk: torch.Tensor) -> Tensors:
        return l2_norm.l2_norm(sizes.of_heads(qk), wide=True).chunk(2, 1)

    def core(q, k, v, g, beta) -> Tensors:
        v = sizes.of_heads(v)
        return (gdn.varlen(q, k, v, g, beta, starts, sizes.scale, schedule),)

    return [
        Pass("input projections", ("x", "w_in"), ("qkv", "z", "b", "a"), project),
        Pass(
            "convolution",
            ("qkv", "w_conv"),
            ("qk", "v"),
            lambda x, weight: conv1d.varlen(x, weight, starts, exact=exact),
        ),
        Pass("l2 norm", ("qk",), ("q", "k"), norm),
        _GATE,
        Pass("core", ("q", "k", "v", "g", "beta"), ("o",), core),
        *_ending(sizes, schedule),
    ]


def decoded(sizes: Sizes, at: Decoding, schedule: str) -> list[Pass]:
    """Ours, of one row for each sequence, as vLLM's layer; states move on."""
    exact, cut = sum(sizes.qkv[:2]), sum(sizes.projected[:2])

    def project(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
        qkvz, ba = gemm.linear(x, weight[:cut]), gemm.linear(x, weight[cut:])
        return *qkvz.split(sizes.projected[:2], -1), *ba.chunk(2, -1)

    def convolution(qkv: torch.Tensor, weight: torch.Tensor) -> Tensors:
        qk, v = conv1d.advance(qkv, weight, at.window, *at.tables, exact=exact)
        return *qk.chunk(2, -1), v

    def norm(q: torch.Tensor, k: torch.Tensor) -> Tensors:
        return tuple(l2_norm.l2_norm(sizes.of_heads(x), wide=True) for x in (q, k))

    def core(q, k, v, g, beta) -> Tensors:
        rows = (q, k, sizes.of_heads(v), g, beta)
        return (gdn.advance(*rows, at.states, *at.tables, sizes.scale, schedule, most=1),)

    return [
        Pass("input projections", ("x", "w_in"), ("qkv", "z", "b", "a"), project),
        Pass("convolution", ("qkv", "w_conv"), ("raw_q", "raw_k", "v"), convolution),
        Pass("l2 norm", ("raw_q", "raw_k"), ("q", "k"), norm),
        _GATE,
        Pass("core", ("q", "k", "v", "g", "beta"), ("o",), core),
        *_ending(sizes, schedule),
    ]


def native_kernels() -> Native:
    """flash-linear-attention's."""
    from samebits.bench import gpu_gdn_fla

    chunk, recurrent = gpu_gdn_fla.chunk(), gpu_gdn_fla.recurrent()
    from fla.modules.conv.causal_conv1d import causal_conv1d
    from fla.modules.conv.triton.ops import causal_conv1d_update
    from fla.modules.fused_norm_gate import rms_norm_gated

    return Native(causal_conv1d, causal_conv1d_update, chunk, recurrent, rms_norm_gated)


def _native(sizes: Sizes, kernels: Native, project: Any, convolution: Any, core: Any) -> list[Pass]:
    def norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> Tensors:
        z = sizes.of_heads(z)
        return (kernels.norm(o.view(z.shape), z, weight, None, activation="swish", eps=EPS),)

    def out(y: torch.Tensor, weight: torch.Tensor) -> Tensors:
        return (linear(y.flatten(-2), weight),)

    return [
        Pass(
            "input projections", ("x", "w_in"), ("raw_q", "raw_k", "raw_v", "z", "b", "a"), project
        ),
        Pass("convolution", ("raw_q", "raw_k", "raw_v", "w_conv"), ("q", "k", "v"), convolution),
        Pass("core", ("q", "k", "v", "a", "b", "A_log", "dt_bias"), ("o",), core),
        Pass("norm", ("o", "z", "w_norm"), ("y",), norm),
        _out(out),
    ]


def natively_trained(sizes: Sizes, kernels: Native) -> list[Pass]:
    """Native, of one sequence."""
    parts = [*sizes.qkv, *sizes.projected[1:]]

    def project(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
        return linear(x, weight).split(parts, -1)

    def convolution(*operands: torch.Tensor) -> Tensors:
        *rows, weight = operands
        found = zip(rows, weight.split(sizes.qkv), strict=True)
        return tuple(kernels.conv(x[None], w, activation="silu")[0][0] for x, w in found)

    def core(q, k, v, a, b, A_log, dt_bias) -> Tensors:
        rows = (sizes.of_heads(x)[None] for x in (q, k, v))
        o, _ = kernels.chunk(
            *rows, a[None], b[None], scale=sizes.scale, A_log=A_log, dt_bias=dt_bias, **_INSIDE
        )
        return (o,)

    return _native(sizes, kernels, project, convolution, core)


# The kernels of the core take in the l2 norm, the gate and the sigmoid.
_INSIDE = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


def natively_decoded(sizes: Sizes, at: NativeDecoding, kernels: Native) -> list[Pass]:
    """Native, of one row for each sequence; windows move on in place. A new state is written beside
    the old one, which each call reads again."""
    cut, parts = sum(sizes.projected[:2]), [*sizes.qkv, sizes.projected[1]]

    def project(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
        qkvz, ba = linear(x, weight[:cut]), linear(x, weight[cut:])
        return *qkvz.split(parts, -1), *ba.chunk(2, -1)

    def convolution(*operands: torch.Tensor) -> Tensors:
        *rows, weight = operands
        found = zip(rows, at.windows, weight.split(sizes.qkv), strict=True)
        return tuple(
            kernels.conv_update(x, window, weight=w, activation="silu")[0] for x, window, w in found
        )

    def core(q, k, v, a, b, A_log, dt_bias) -> Tensors:
        rows = (sizes.of_heads(x)[:, None] for x in (q, k, v))
        o, moved = kernels.recurrent(
            *rows, a[:, None], beta=b[:, None], scale=sizes.scale, initial_state=at.states,
            output_final_state=True, A_log=A_log, dt_bias=dt_bias, **_INSIDE,
        )  # fmt: skip
        return (o, moved)

    *before, norm, out = _native(sizes, kernels, project, convolution, core)
    kept = before.pop()
    return [*before, Pass(kept.name, kept.reads, ("o", "moved"), kept.call), norm, out]


def exact(sizes: Sizes, starts: Sequence[int], values: Values) -> torch.Tensor:
    """The layer in float64, of packed sequences that start at `starts`; differentiable."""
    x, w_in, w_conv, A_log, dt_bias, w_norm, w_out = (values[name].double() for name in LEAVES)
    qkv, z, b, a = (x @ w_in.T).split(sizes.projected, -1)
    pieces = []
    for start, stop in itertools.pairwise(starts):
        padded = pad(qkv[start:stop].T[None], (sizes.taps - 1, 0))
        pieces.append(convolve(padded, w_conv[:, None], groups=len(w_conv))[0].T)
    q, k, v = (sizes.of_heads(part) for part in silu(torch.cat(pieces)).split(sizes.qkv, -1))
    q, k = (part * (part.square().sum(-1, keepdim=True) + EPS).rsqrt() for part in (q, k))
    g = -A_log.exp() * softplus(a + dt_bias)
    o, _ = oracle.recurrence((q, k, v, g, b.sigmoid()), starts, sizes.scale)
    normed = o * (o.square().mean(-1, keepdim=True) + EPS).rsqrt() * w_norm
    return (normed * silu(sizes.of_heads(z))).flatten(-2) @ w_out.T
