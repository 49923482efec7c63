"""The recorder on real operators: one layer of a model, computed whole and in pages of a batch."""

import importlib

import numpy as np
import pytest
import torch

from samebits import faults, trace
from samebits.ops import rotary, samples
from samebits.plan import ReductionPlan
from samebits.trace import digests, record

HEADS, SIZE, HIDDEN, VOCAB, BLOCK = 2, 16, 32, 24, 4
CONFIG = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": SIZE,
    "hidden_size": HIDDEN,
}
WANTED = [3, 9, 4, 9, 5, 20, 7]
OTHER = [3, 9, 4, 8, 8]


@pytest.fixture
def operators(monkeypatch, tmp_path):
    """Operators with recorders; the folder that they watch does not exist yet."""
    for region in record.REGIONS.values():
        module = importlib.import_module(f"samebits.{region.module}")
        for name in region.functions:
            monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    monkeypatch.setenv("SAMEBITS_TRACE", str(tmp_path / "live"))
    trace.install()
    return tmp_path / "live"


class Model:
    """Calls operators as the engines do: attention, then an MLP, then the output layer."""

    def __init__(self):
        self.keys = torch.zeros(16, BLOCK, HEADS, SIZE, dtype=torch.bfloat16)
        self.values = self.keys.clone()
        shapes = {
            "embedding": (VOCAB, HIDDEN),
            "norm": (HIDDEN,),
            "qkv": (3 * HEADS * SIZE, HIDDEN),
            "out": (HIDDEN, HEADS * SIZE),
            "up": (2 * HIDDEN, HIDDEN),
            "down": (HIDDEN, HIDDEN),
            "head": (VOCAB, HIDDEN),
        }
        self.weights = {
            name: samples.bf16(shape, seed, -3, 0)
            for seed, (name, shape) in enumerate(shapes.items())
        }

    def step(self, batch, *, whole: bool = False, projected=None):
        """A pass over (tokens, first position, pages) of every request; logits of the last rows,
        or of the rows `projected`."""
        from samebits.ops import attention, embedding, gemm, rms_norm, silu_mul

        w, plan = self.weights, ReductionPlan(2)
        ids = torch.tensor([t for tokens, *_ in batch for t in tokens])
        counts = torch.tensor([len(tokens) for tokens, *_ in batch])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        positions = torch.cat([torch.arange(len(t)) + p for t, p, _ in batch])
        x = embedding.lookup(ids[None] if whole else ids, w["embedding"]).reshape(len(ids), -1)
        qkv = gemm.linear(rms_norm.rms_norm(x, w["norm"], 1e-6), w["qkv"])
        q, k, v = qkv.unflatten(-1, (3, HEADS, SIZE)).unbind(1)
        table = rotary.table(64, SIZE, 1e4)
        q, k = (rotary.apply(part, positions, table) for part in (q, k))
        if whole:
            out = attention.varlen(q, k, v, starts, 0.25)
        else:
            pages = torch.zeros(len(batch), 4, dtype=torch.int64)
            for row, (_, _, blocks) in enumerate(batch):
                pages[row, : len(blocks)] = torch.tensor(blocks)
            owner = torch.repeat_interleave(torch.arange(len(batch)), counts)
            place = pages[owner, positions // BLOCK], positions % BLOCK
            self.keys[place], self.values[place] = k, v
            lengths = positions[starts[1:] - 1] + 1
            out = attention.paged(q, self.keys, self.values, pages, starts, lengths, 0.25)
        x = x + gemm.row_parallel(out.flatten(1), w["out"], plan)
        hidden = gemm.linear(rms_norm.rms_norm(x, w["norm"], 1e-6), w["up"])
        x = x + gemm.row_parallel(silu_mul.silu_mul(hidden), w["down"], plan)
        x = rms_norm.rms_norm(x, w["norm"], 1e-6)
        gemm.lm_head(x[starts[1:] - 1], w["head"])
        for rows in projected or ():
            gemm.lm_head(x[rows], w["head"])

    def padded(self, batch):
        """A pass over padded sequences of one length, as the trainer makes it; logits of all rows
        that predict a token, but for those of padding."""
        from samebits.ops import attention, embedding, gemm, rms_norm, silu_mul

        w, plan = self.weights, ReductionPlan(2)
        b, s = len(batch), len(batch[0])
        x = embedding.lookup(torch.tensor(batch), w["embedding"]).transpose(0, 1)
        qkv = gemm.linear(rms_norm.rms_norm(x, w["norm"], 1e-6), w["qkv"])
        q, k, v = qkv.unflatten(-1, (3, HEADS, SIZE)).unbind(2)
        positions, table = torch.arange(s).repeat_interleave(b), rotary.table(64, SIZE, 1e4)
        q, k = (
            rotary.apply(part.reshape(s * b, HEADS, SIZE), positions, table).view(part.shape)
            for part in (q, k)
        )
        rows = [part.transpose(0, 1).reshape(b * s, HEADS, SIZE) for part in (q, k, v)]
        out = attention.varlen(*rows, torch.arange(b + 1) * s, 0.25)
        out = out.view(b, s, -1).transpose(0, 1)
        x = x + gemm.row_parallel(out, w["out"], plan)
        hidden = gemm.linear(rms_norm.rms_norm(x, w["norm"], 1e-6), w["up"])
        x = x + gemm.row_parallel(silu_mul.silu_mul(hidden), w["down"], plan)
        x = rms_norm.rms_norm(x, w["norm"], 1e-6).reshape(s * b, -1)
        wanted = [
            t * b + i for i, tokens in enumerate(batch) for t in range(sum(map(bool, tokens)) - 1)
        ]
        for part in torch.tensor(wanted).split(4):
            gemm.lm_head(x[part][:, None], w["head"])


def _recorded(operators, *passes, **options):
    """Calls of WANTED in passes of a model."""
    model = Model()
    model.step([([1, 2], 0, [0])])  # before the recording
    trace.start(operators, WANTED)
    for batch in passes:
        model.step(batch, **options)
    kept = operators.with_name(f"kept-{len(list(operators.parent.iterdir()))}")
    operators.rename(kept)
    model.step([([1, 2], 0, [0])])  # after it
    return trace.load(kept, trace.Columns(CONFIG, trainer=False))


WHOLE = [(WANTED, 0, [1, 2])]


def test_a_sequence_in_a_batch_is_the_sequence_alone(operators):
    alone = _recorded(operators, WHOLE, projected=[slice(0, 6)])
    assert [call.positions.tolist() for call in alone[:-1]] == [[*range(7)]] * 12
    assert sorted(alone[-1].positions.tolist()) == [*range(7)]
    packed = _recorded(
        operators, [(OTHER, 0, []), (WANTED, 0, [])], whole=True, projected=[slice(5, 11)]
    )
    decoded = _recorded(
        operators,
        [(OTHER, 0, [5, 6]), (WANTED[:3], 0, [1])],
        [(WANTED[3:6], 3, [1, 2]), ([9], 5, [5, 6])],
        [([7], 6, [5, 6]), ([7], 6, [1, 2])],
    )
    assert sorted(decoded[0].positions.tolist()) == [*range(7)]
    assert decoded[-1].positions.tolist() == [2, 5, 6]  # a row of logits for each piece
    for other in (packed, decoded):
        assert trace.first_difference(alone, other) is None
        assert trace.first_difference(other, alone) is None


def test_logits_of_requests_with_one_prompt_are_told_apart(operators):
    twins = [(WANTED, 0, [1, 2]), (WANTED, 0, [3, 4])]
    found = _recorded(operators, twins, projected=[slice(0, 6), slice(7, 13)])
    assert sorted(found[-1].positions.tolist()) == sorted([*range(7)] * 2)


def test_what_a_fault_returns_is_recorded_as_the_call_that_it_stands_for(operators, monkeypatch):
    right = _recorded(operators, WHOLE)
    monkeypatch.setitem(faults._WHOLE_ROWS, "cpu", 1)
    cut = _with_fault(operators, monkeypatch, "k_cut_by_rows")  # calls another region inside
    assert [call.region for call in cut] == [call.region for call in right]
    turned = _with_fault(operators, monkeypatch, "rope_base_doubled")
    found = trace.first_difference(right, turned)
    assert found is not None
    assert (found.layer, found.region, found.element[0]) == (0, "rope", 1)  # position 0: no turn
    row, column = found.element
    assert found.left == f"{right[3].output[row, column]:04x}" != found.right
    assert " left, " in found.operands["angles"] and " left, " not in found.operands["input"]


def _with_fault(operators, monkeypatch, name):
    """Calls of WANTED where a fault was planted before the recorder was installed."""
    with monkeypatch.context() as patch:
        for region in record.REGIONS.values():
            module = importlib.import_module(f"samebits.{region.module}")
            for function in region.functions:
                patch.setattr(module, function, getattr(module, function).__wrapped__)
        patch.setattr(rotary, "table", rotary.table)
        patch.setenv("SAMEBITS_FAULT", name)
        faults.install()
        trace.install()
        return _recorded(operators, WHOLE)


def test_a_constant_of_one_side_is_an_operand_that_differs(operators, monkeypatch):
    from samebits.ops import rms_norm

    right = _recorded(operators, WHOLE)
    traced = rms_norm.rms_norm
    with monkeypatch.context() as patch:
        patch.setattr(rms_norm, "rms_norm", lambda x, weight, eps: traced(x, weight, eps=1e-2))
        other = _recorded(operators, WHOLE)
    found = trace.first_difference(right, other)
    assert found is not None and found.region == "norm.rms"
    assert found.operands["eps"] == "1e-06 left, 0.01 right"
    assert not {"scale", "plan"} & set(found.operands)  # they agree, or are of another region
    assert " left, " not in found.operands["input"]


def test_padded_sequences_are_taken_apart(operators):
    """Megatron's batches: [tokens, batch, features], but sequence by sequence inside attention."""
    model = Model()
    trace.start(operators, WANTED)
    model.step([(WANTED, 0, [1, 2])])
    alone = operators.rename(operators.with_name("alone"))
    batch = [tokens + [0] * (9 - len(tokens)) for tokens in (OTHER, WANTED, OTHER[:2])]
    trace.start(operators, WANTED)
    model.padded(batch)
    padded = operators.rename(operators.with_name("padded"))
    a, b = (trace.load(folder, trace.Columns(CONFIG, trainer=False)) for folder in (alone, padded))
    assert all(call.positions.tolist() == [*range(7)] for call in b[:-1])
    assert b[-1].positions.tolist() == [*range(6)]
    b = [*b[:-1], a[-1]]  # alone, the output layer had the last row only
    assert trace.first_difference(a, b) is None


def test_a_product_with_a_bias_is_a_region_of_its_own(operators):
    """Its bias is an operand as its weight is, in any order of the columns."""
    from samebits.ops import gemm

    x, w, bias = samples.bf16((2, 8), 1), samples.bf16((6, 8), 2), samples.bf16((6,), 3)
    other, order = bias.clone(), torch.tensor([3, 1, 0, 2, 5, 4])
    other[4] *= 2
    model, found = Model(), []
    for weight, shift in ((w, bias), (w[order], bias[order]), (w, other), (w, None)):
        trace.start(operators, WANTED[:2])
        model.step([(WANTED[:2], 0, [1])])
        gemm.linear(x, weight, shift)
        kept = operators.rename(operators.with_name(f"kept{len(found)}"))
        (path,) = kept.glob("0000-0013.*.npz")
        found.append((path.name.split(".", 1)[1], np.load(path)["weight"].tolist()))
    regions, digest = zip(*found, strict=True)
    assert regions == (*["gemm.bias.npz"] * 3, "gemm.column.npz")
    assert digest[0] == digest[1] and len({*map(str, digest)}) == 3


def test_weights_digest_alike_in_any_order_of_rows():
    rows = np.random.default_rng(0).integers(0, 65536, (6, 8)).astype(np.uint16)
    total = digests.of_rows(rows).sum(dtype=np.uint64)
    assert digests.of_rows(rows[::-1]).sum(dtype=np.uint64) == total
    rows[2, 3] ^= 1
    assert digests.of_rows(rows).sum(dtype=np.uint64) != total


def test_digests_of_parts_add_up_to_that_of_the_row(operators, monkeypatch):
    """Two ranks, one after the other: what each is given of a row-parallel product."""
    from samebits.ops import gemm
    from samebits.trace.columns import operands

    x, w = samples.bf16((2, 8), 1), samples.bf16((5, 8), 2)
    model, recorded = Model(), []
    for columns, rank in ((slice(0, 8), None), (slice(0, 4), 0), (slice(4, 8), 1)):
        monkeypatch.setattr(record, "_rank", lambda rank=rank: rank)
        trace.start(operators, WANTED[:2])
        model.step([(WANTED[:2], 0, [1])])
        gemm.row_parallel(x[:, columns].contiguous(), w[:, columns].contiguous(), ReductionPlan(1))
        kept = operators.rename(operators.with_name(f"kept{rank}"))
        (path,) = kept.rglob("0000-0013.gemm.row.npz")
        recorded.append(dict(np.load(path)))
    whole, *ranks = recorded
    assert "input.part" not in whole and not np.array_equal(whole["input"], ranks[0]["input"])
    joined = operands("gemm.row", ranks)
    assert joined["input"].tolist() == whole["input"].tolist()
    assert joined["weight"].tolist() == whole["weight"].tolist()
