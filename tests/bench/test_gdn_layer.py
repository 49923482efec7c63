"""The layer of Gated DeltaNet that the GPU benchmark times: ours and the native one, on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, pad, silu, softplus

pytest.importorskip("triton")

from samebits.bench import gpu_gdn_layer as layer
from samebits.bench import gpu_gdn_layer_times as times
from samebits.bench.gpu_gdn_layer import LEAVES, Native, Pass, Sizes
from samebits.ops import gdn
from samebits.ops.gdn import errors, oracle

SIZES = Sizes(hidden=64, key_heads=2, heads=4, size=16)
COUNT, STEPS = 3, 4
STARTS = [sequence * STEPS for sequence in range(COUNT + 1)]


def gated(a, b, A_log, dt_bias):
    return -A_log.exp() * softplus(a + dt_bias), b.sigmoid()


def unit(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def chunk(
    q, k, v, g, beta, *, scale, A_log, dt_bias,
    use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
):  # fmt: skip
    assert use_qk_l2norm_in_kernel and use_gate_in_kernel and use_beta_sigmoid_in_kernel
    rows = (unit(q[0]), unit(k[0]), v[0], *gated(g[0], beta[0], A_log, dt_bias))
    o, _ = oracle.recurrence(rows, [0, q.shape[1]], scale)
    return o[None].to(q.dtype), None


def recurrent(
    q, k, v, g, *, beta, scale, initial_state, output_final_state, A_log, dt_bias,
    use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
):  # fmt: skip
    assert use_qk_l2norm_in_kernel and use_gate_in_kernel and use_beta_sigmoid_in_kernel
    rows = (unit(q[:, 0]), unit(k[:, 0]), v[:, 0], *gated(g[:, 0], beta[:, 0], A_log, dt_bias))
    o, moved = oracle.recurrence(rows, range(len(q) + 1), scale, initial_state)
    return o[:, None].to(q.dtype), moved


def convolution(x, weight, *, activation):
    assert activation == "silu"
    padded = pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return silu(conv1d(padded, weight[:, None], groups=len(weight))).transpose(1, 2), None


def update(x, cache, *, weight, activation):
    assert activation == "silu"
    cache.copy_(torch.cat([cache[..., 1:], x[..., None]], -1))
    return silu((cache * weight).sum(-1)), cache


def norm(x, g, weight, bias, *, activation, eps):
    assert bias is None and activation == "swish"
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight * silu(g)


STAND_INS = Native(convolution, update, chunk, recurrent, norm)


def drawn(rows, dtype):
    values = layer.drawn(SIZES, rows, "cpu")
    return {name: x.to(dtype) if x.dtype != torch.float32 else x for name, x in values.items()}


def both(passes, values, rows):
    """Relative errors of the output and of every gradient."""
    law = Pass("exact", (), ("out",), lambda: (layer.exact(SIZES, [0, rows], doubles),))
    doubles = {name: x.double().requires_grad_() for name, x in values.items()}
    values = {name: x.requires_grad_() for name, x in values.items()}
    found = times.gradient_step(passes, values)()
    truth = times.gradient_step([law], doubles)()
    assert len(found) == 1 + len(LEAVES)
    return [errors.relative(a, b) for a, b in zip(found, truth, strict=True)]


@pytest.mark.parametrize("schedule", gdn.SCHEDULES)
def test_our_training_layer_is_the_layer(schedule):
    rows = 70
    passes = layer.trained(SIZES, torch.tensor([0, rows]), schedule)
    assert max(both(passes, drawn(rows, torch.bfloat16), rows)) < times.ERROR["train"]


def test_the_native_training_layer_is_the_layer():
    rows = 20
    passes = layer.natively_trained(SIZES, STAND_INS)
    assert max(both(passes, drawn(rows, torch.float32), rows)) < 1e-5


@pytest.mark.parametrize("schedule", gdn.SCHEDULES)
def test_our_decoding_layer_is_the_layer(schedule):
    values = drawn(COUNT * STEPS, torch.bfloat16)
    at = layer.fresh(SIZES, schedule, COUNT, "cpu")
    passes = layer.decoded(SIZES, at, schedule)
    found = []
    for done in range(STEPS):
        at.context.fill_(done)
        found.append(layer.run(passes, values | {"x": values["x"][done::STEPS]}))
    o = torch.stack(found, 1).flatten(0, 1)
    assert errors.relative(o, layer.exact(SIZES, STARTS, values)) < times.ERROR["decode"]


def test_the_native_decoding_layer_is_the_layer():
    values = drawn(COUNT * STEPS, torch.float32)
    there = layer.natively_fresh(SIZES, COUNT, "cpu")
    there.windows[:] = [window.float() for window in there.windows]
    passes = layer.natively_decoded(SIZES, there, STAND_INS)
    found = []
    for done in range(STEPS):
        after, _ = layer.traced(passes, values | {"x": values["x"][done::STEPS]})
        there.states.copy_(after["moved"])
        found.append(after["out"])
    o = torch.stack(found, 1).flatten(0, 1)
    assert errors.relative(o, layer.exact(SIZES, STARTS, values)) < 1e-5


def test_an_error_of_the_layer_is_seen():
    """The law tells a wrong decay from a right one, at the bound of the gate."""
    values = drawn(12, torch.float32)
    truth = layer.exact(SIZES, [0, 12], values)
    other = layer.exact(SIZES, [0, 12], values | {"A_log": values["A_log"] + 0.5})
    assert errors.relative(other, truth) > times.ERROR["train"]
    assert errors.relative(layer.exact(SIZES, [0, 6, 12], values), truth) > times.ERROR["decode"]


def test_a_pass_goes_both_ways_by_itself():
    values = drawn(5, torch.bfloat16)
    passes = layer.trained(SIZES, torch.tensor([0, 5]), "chunk_row")
    _, read = layer.traced(passes, values)
    for one, operands in zip(passes, read, strict=True):
        found = times.both_ways(one, operands)()
        assert [x.shape for x in found] == [x.shape for x in operands]


def test_a_native_layer_that_is_wrong_has_no_row(monkeypatch):
    found = {("train", False): 1e-3, ("train", True): 1.0, ("decode", False): 1e-3}
    monkeypatch.setattr(
        times, "layer_errors", lambda mode, native: {"o": found.get((mode, native), 1e-3)}
    )
    monkeypatch.setattr(times, "step", lambda mode, native: (mode, native))
    monkeypatch.setattr(times, "medians", lambda sides: [200.0, 100.0])
    monkeypatch.setattr(times, "pass_rows", lambda: iter(()))
    monkeypatch.setattr(times.gpu_gdn_fla, "tune_briefly", lambda: None)
    (row,) = times.rows()
    assert row["work"] == "gdn chunk_row, layer decode 256 x 1, 32 heads"
    assert (row["ratio"], row["target"], row["met"]) == (0.5, 1.0, True)


def test_our_wrong_layer_is_red(monkeypatch):
    monkeypatch.setattr(times, "parts", list)
    monkeypatch.setattr(times.gpu_gdn_ahead, "compiled", lambda area, parts: iter(()))
    monkeypatch.setattr(times.gpu_gdn_fla, "tune_briefly", lambda: None)
    monkeypatch.setattr(times, "layer_errors", lambda mode, native: {"o": float("nan")})
    with pytest.raises(times.Different, match="SB0440"):
        list(times.gates())
