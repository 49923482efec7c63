"""What the Hopper operators compute with torch itself, run on a CPU: ranks, gradients, tables."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from triton import JITFunction

from samebits import bits, ops
from samebits.errors import Refused
from samebits.ops import packed, registry, samples
from samebits.ops.attention import sm90 as attention
from samebits.ops.attention import triton as kernels
from samebits.ops.embedding import cpu, sm90
from samebits.ops.gdn import sm90 as gdn
from samebits.ops.gemm import sm90 as gemm
from samebits.plan import ReductionPlan

GROUP = object()


def test_every_region_has_an_implementation_with_sources():
    found = registry.implementations("sm90")
    assert set(found) == set(registry.REGIONS)
    assert set(registry.unrouted("sm90")) == set(registry.UNROUTED)
    found |= registry.unrouted("sm90")
    for region, implementation in found.items():
        assert implementation.id == f"{region}.sm90.1" and implementation.platform == "sm90"
        assert len(implementation.content_hash()) == 64
        assert any(name.endswith(".sm90") for name in implementation.modules)


def test_every_module_with_a_kernel_is_bound():
    found = registry.implementations("sm90") | registry.unrouted("sm90")
    bound = {name for x in found.values() for name in x.modules}
    names = [x.name for x in pkgutil.walk_packages(ops.__path__, "samebits.ops.")]
    holding = {
        value.__module__
        for name in names
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, JITFunction)
    }
    gradients = {  # no promise of bits
        *("gdn.triton_backward", "gdn.triton_segments", "gdn.gluon_gradients", "gdn.gluon_reverse"),
        *("attention.triton_backward", "attention.gluon_backward"),
        *("window_attention.triton_backward", "conv1d.triton_backward", "l2_norm.triton_backward"),
        *("gated_rms_norm.triton_backward", "sums_backward"),
    }
    mine = {name for name in holding if name.startswith("samebits.")}
    assert mine - bound == {f"samebits.ops.{name}" for name in gradients}


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


@pytest.mark.parametrize("size", [64, 128, 256])
def test_gradients_of_attention_are_given_what_the_forward_left(monkeypatch, size):
    seen = {}

    def varlen(q, k, v, at, longest, scale, norms=None):
        norms.fill_(3)
        return q * 2

    def gradients(name):
        def of(q, k, v, y, norms, dy, at, longest, scale):
            seen[name] = y, norms, dy, at, longest, scale
            return q * 5, k * 6, v * 7

        return of

    for name in ("gluon", "triton"):
        rows = attention.gluon_rows if name == "gluon" else attention.triton
        monkeypatch.setattr(rows, "varlen", varlen)
        monkeypatch.setattr(getattr(attention, f"{name}_backward"), "gradients", gradients(name))
    fused = torch.randn(7, 4 * size).bfloat16().requires_grad_()
    q, k, v = (x.unflatten(1, (-1, size)) for x in fused.split([2 * size, size, size], 1))
    y = attention.varlen(q, k, v, torch.tensor([0, 2, 2, 7]), 0.5)
    y.float().sum().backward()
    (name,) = seen
    assert name == ("triton" if size == 256 else "gluon")
    rows, norms, dy, at, longest, scale = seen[name]
    assert bits.equal(rows, q * 2) and norms.shape == (2, 7) and (norms == 3).all()
    assert bits.equal(dy, torch.ones_like(q)) and at.tolist() == [0, 2, 2, 7]
    assert at.dtype == torch.int32 and (longest, scale) == (5, 0.5)
    both = torch.cat([q * 5, k * 6, v * 7], 1).flatten(1)
    assert bits.equal(fused.grad, both)


def test_rows_that_bulk_copies_cannot_read_are_copied():
    x = samples.bf16((5, 3 * 64 + 8), 1)
    fused = x.view(-1)[: 5 * 192].view(5, 3, 64)
    inside = x[:, 8:].unflatten(1, (3, 64))  # tokens of a wider row: read where they are
    apart = x[:, : 2 * 96].unflatten(1, (2, 96))[..., :64]  # heads are not side by side
    odd = x.view(-1)[1 : 1 + 5 * 192].view(5, 3, 64)  # not at a multiple of 16 bytes
    near = x.view(-1).as_strided((4, 3, 64), (196, 64, 1))  # nor are its tokens
    again = x[:1, :192].unflatten(1, (3, 64)).expand(5, 3, 64)
    one = x.view(-1).as_strided((1, 3, 64), (7, 64, 1))  # a stride that says nothing
    for rows, copied in (
        (fused, False), (inside, False), (apart, True), (odd, True), (near, True),
        (again, True), (one, False), (fused.mT.contiguous().mT, True),
    ):  # fmt: skip
        matrix = kernels.as_matrix(rows)
        assert torch.equal(matrix.view(torch.int16), rows.flatten(1).view(torch.int16))
        assert (matrix.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()) == copied
        assert matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0
        assert matrix.stride(0) >= matrix.shape[1] and matrix.data_ptr() % 16 == 0


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
