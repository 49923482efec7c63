"""What the Hopper operators compute with torch itself, run on a CPU: ranks, gradients, tables."""

from __future__ import annotations

import importlib
import itertools
import pkgutil

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from triton import JITFunction

from samebits import bits, ops
from samebits.errors import Refused
from samebits.ops import packed, registry, samples
from samebits.ops.attention import sm90 as attention
from samebits.ops.embedding import cpu, sm90
from samebits.ops.gdn import sm90 as gdn
from samebits.ops.gemm import sm90 as gemm
from samebits.plan import ReductionPlan

GROUP = object()


def test_every_region_has_an_implementation_with_sources():
    found = registry.implementations("sm90")
    assert set(found) == set(registry.REGIONS)
    for region, implementation in found.items():
        assert implementation.id == f"{region}.sm90.1" and implementation.platform == "sm90"
        assert len(implementation.content_hash()) == 64
        assert any(name.endswith(".sm90") for name in implementation.modules)


def test_every_module_with_a_kernel_is_bound():
    bound = {name for x in registry.implementations("sm90").values() for name in x.modules}
    names = [x.name for x in pkgutil.walk_packages(ops.__path__, "samebits.ops.")]
    holding = {
        value.__module__
        for name in names
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, JITFunction)
    }
    assert {name for name in holding if name.startswith("samebits.")} - bound == {
        "samebits.ops.gdn.triton_backward"  # gradients: no promise of bits
    }


def test_another_platform_is_refused():
    with pytest.raises(Refused, match="SB0405"):
        registry.implementations("sm80")


def test_ranks_of_a_table_select_by_bytes(monkeypatch):
    table = samples.bf16((8, 5), 3)
    table[1], table[6, 2] = -0.0, torch.nan
    ids, parts = torch.tensor([[1, 6], [0, 7]]), []
    monkeypatch.setattr(dist, "all_reduce", lambda x, op, group: parts.append(x.clone()))
    for start in (0, 4):
        sm90._forward(ids, table[start : start + 4], start, GROUP)
    whole = (parts[0] + parts[1]).view(torch.bfloat16)
    assert torch.equal(whole.view(torch.int16), table[ids].view(torch.int16))
    assert parts[0].any() and parts[1].any()


def test_gradient_rows_of_the_table_are_the_cpus():
    ids, grad = torch.tensor([3, 9, 3, 4, 7, 3]), samples.bf16((6, 5), 4)
    for start in (0, 4, 8):
        ours = sm90._weight_grad(ids, grad, 4, start)
        assert bits.equal(ours, cpu.weight_grad(ids, grad, 4, start))


def test_roots_of_ranks_are_folded_in_rank_order(monkeypatch):
    roots = [samples.fp32((3, 4), seed, -30, 30) for seed in range(4)]
    monkeypatch.setattr(gemm, "_product", lambda x, w, leaves, dtype: roots[0])
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)

    def gather(parts, mine, group):
        for part, root in zip(parts, roots, strict=True):
            part.copy_(root)

    monkeypatch.setattr(dist, "all_gather", gather)
    y = gemm._forward(torch.zeros(3, 8), torch.zeros(4, 8), 1, torch.bfloat16, GROUP)
    assert bits.equal(y, ((roots[0] + roots[1]) + (roots[2] + roots[3])).bfloat16())
    assert bits.equal(y, ReductionPlan.fold(roots).bfloat16())


def test_gradients_of_packed_attention_are_those_of_float64():
    starts, scale = np.array([0, 40, 80, 80, 87]), 0.2
    q, grad = torch.randn(87, 4, 16).bfloat16(), torch.randn(87, 4, 16).bfloat16()
    k, v = (torch.randn(87, 2, 16).bfloat16() for _ in range(2))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    parts = []
    for a, b in itertools.pairwise(starts):
        qs, ks, vs = (x[a:b].transpose(0, 1) for x in leaves)
        s = (qs @ ks.repeat_interleave(2, 0).mT) * scale
        s = s.masked_fill(torch.ones(b - a, b - a, dtype=torch.bool).triu(1), -torch.inf)
        parts.append((s.softmax(-1) @ vs.repeat_interleave(2, 0)).transpose(0, 1))
    exact = torch.autograd.grad(torch.cat(parts), leaves, grad.double())

    class Context:
        saved_tensors = (q, k, v)

    Context.starts, Context.scale = starts, scale
    before = torch.are_deterministic_algorithms_enabled()
    ours = attention._Varlen.backward(Context, grad)[:3]
    assert torch.are_deterministic_algorithms_enabled() == before
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).abs().max() < 2**-6 * b.abs().max()


def test_rows_of_single_tokens_find_their_slots():
    slots, context = torch.tensor([5, 6, 2]), torch.tensor([70, 9, 0])
    starts = torch.tensor([0, 1, 1, 2])  # the second sequence asks for nothing
    at, before = gdn._of_rows(4, slots, starts, context)
    assert at.tolist() == [5, 2, -1, -1] and before.tolist()[:2] == [70, 0]


def test_tables_elsewhere_are_refused_and_those_of_the_host_are_checked():
    x = torch.zeros(5, 2)
    assert packed.host_checked(torch.tensor([0, 5]), x).dtype == torch.int32
    with pytest.raises(Refused, match="SB0483"):
        packed.host_checked(torch.tensor([0, 4]), x)
    with pytest.raises(Refused, match="SB0420"):
        packed.on_device(x, slots=torch.zeros(2))
    with pytest.raises(Refused, match="SB0420"):
        packed.on_device(x, slots=torch.zeros(2, dtype=torch.int32, device="meta"))
