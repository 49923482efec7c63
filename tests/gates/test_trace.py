"""Traces: how passes and ranks of one sequence are joined, and where two sides part."""

import itertools

import numpy as np
import pytest

from samebits import trace

HEADS, KV_HEADS, SIZE = 4, 2, 2
HIDDEN, FFN, VOCAB = 8, 6, 10
Q, K = HEADS * SIZE, KV_HEADS * SIZE
CONFIG = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "hidden_size": HIDDEN,
}
TOKENS = 6
# (region, widths of the parts that ranks split, 0 for what every rank has)
LAYER = [
    ("norm.rms", 0),
    ("gemm.column", (Q, K, K)),
    ("norm.rms", (Q,)),
    ("norm.rms", (K,)),
    ("rope", (Q,)),
    ("rope", (K,)),
    ("attention", (Q,)),
    ("gemm.row", 0),
    ("norm.rms", 0),
    ("gemm.column", (FFN, FFN)),
    ("act.silu_mul", (FFN,)),
    ("gemm.row", 0),
]
ROLLOUT = trace.Columns(CONFIG, trainer=False)
TRAINER = trace.Columns(CONFIG, trainer=True)


def _forward(layers: int = 2, seed: int = 0):
    """(region, output, widths of its parts) of one forward pass of the rollout on one rank."""
    draw = np.random.default_rng(seed)

    def output(width: int, dtype=np.uint16):
        return draw.integers(0, 65536, (TOKENS, width)).astype(dtype)

    calls = [("embedding", output(HIDDEN), 0)]
    for _ in range(layers):
        calls += [(r, output(sum(parts) if parts else HIDDEN), parts) for r, parts in LAYER]
    return [
        *calls,
        ("norm.rms", output(HIDDEN), 0),
        ("gemm.lm_head", output(VOCAB, np.uint32), (VOCAB,)),
    ]


def _write(folder, calls, rows=range(TOKENS), step=0):
    """One pass over some rows of the sequence."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.array(rows)
    for index, (region, output, _) in enumerate(calls):
        found = {"input": rows.astype(np.uint64), "position": rows}
        if region.startswith("gemm"):
            found["weight"] = np.array([7], np.uint64)
        path = folder / f"{step:04d}-{index:04d}.{region}.npz"
        np.savez(path, output=output[rows], **found)


def _changed(calls, index: int, *places: tuple[int, int]):
    region, output, parts = calls[index]
    output = output.copy()
    for place in places:
        output[place] ^= 1
    return [*calls[:index], (region, output, parts), *calls[index + 1 :]]


def _shards(calls, rank: int, ranks: int = 2):
    """What one of several ranks holds of every output."""
    found = []
    for region, output, parts in calls:
        ends = np.cumsum([0, *(parts or (output.shape[1],))])
        pieces = [output[:, a:b] for a, b in itertools.pairwise(ends)]
        mine = [np.split(p, ranks, axis=1)[rank] for p in pieces] if parts else pieces
        found.append((region, np.concatenate(mine, axis=1), parts))
    return found


@pytest.fixture
def calls():
    return _forward()


@pytest.fixture
def whole(tmp_path, calls):
    _write(tmp_path / "whole", calls)
    return trace.load(tmp_path / "whole", ROLLOUT)


def test_equal_traces_have_no_difference(tmp_path, calls, whole):
    _write(tmp_path / "b", calls)
    assert trace.first_difference(whole, trace.load(tmp_path / "b", ROLLOUT)) is None


def test_layers_are_numbered_by_their_row_products(whole):
    layers = [(call.region, call.layer) for call in whole]
    regions = [region for region, _ in LAYER]
    assert layers[0] == ("embedding", None)
    assert layers[1:13] == [(region, 0) for region in regions]
    assert layers[13:25] == [(region, 1) for region in regions]
    assert layers[25:] == [("norm.rms", None), ("gemm.lm_head", None)]


def test_the_first_difference_names_layer_region_and_element(tmp_path, calls, whole):
    assert calls[19][0] == "attention"
    _write(tmp_path / "b", _changed(calls, 19, (4, 5)))
    b = trace.load(tmp_path / "b", ROLLOUT)
    found = trace.first_difference(whole, b)
    assert found is not None
    assert (found.layer, found.region, found.element) == (1, "attention", (4, 5))
    assert int(found.left, 16) ^ int(found.right, 16) == 1
    assert int(found.left, 16) == calls[19][1][4, 5]
    assert (found.differing, found.elements) == (1, TOKENS * Q)
    assert found.operands == {"input": f"{4:016x}"}
    assert trace.first_difference(whole, b, rows=4) is None  # later tokens are not looked at


def test_passes_over_parts_of_a_sequence_are_one(tmp_path, calls, whole):
    _write(tmp_path / "b", calls, range(4))
    _write(tmp_path / "b", calls[:-1], [4], step=1)  # inside a prompt: no logits
    _write(tmp_path / "b", calls, [5], step=2)
    b = trace.load(tmp_path / "b", ROLLOUT)
    assert trace.first_difference(whole, b) is None
    b[-1].output[-1, 0] ^= 1
    found = trace.first_difference(whole, b)
    assert found is not None
    assert (found.region, found.element) == ("gemm.lm_head", (5, 0))


def test_a_row_that_was_computed_again_is_compared_too(tmp_path, calls, whole):
    _write(tmp_path / "b", calls)
    _write(tmp_path / "b", _changed(calls, 8, (2, 1)), range(1, 4), step=1)
    b = trace.load(tmp_path / "b", ROLLOUT)
    for left, right in ((whole, b), (b, whole)):
        found = trace.first_difference(left, right)
        assert found is not None
        assert (found.layer, found.region, found.element) == (0, "gemm.row", (2, 1))
        assert found.differing == 1


def test_the_earliest_position_comes_first(tmp_path, calls, whole):
    changed = _changed(calls, 8, (4, 0), (2, 3))
    _write(tmp_path / "b", changed, [4, 5])
    _write(tmp_path / "b", changed, [0, 1, 2, 3], step=1)
    found = trace.first_difference(trace.load(tmp_path / "b", ROLLOUT), whole)
    assert found is not None and found.element == (2, 3)


def test_sides_without_a_common_position_prove_nothing(tmp_path, calls):
    _write(tmp_path / "a", calls, [0, 1])
    _write(tmp_path / "b", calls, [2, 3])
    a, b = (trace.load(tmp_path / name, ROLLOUT) for name in "ab")
    with pytest.raises(ValueError, match="no position in common"):
        trace.first_difference(a, b)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no row of the sequence"):
        trace.load(tmp_path / "empty", ROLLOUT)


def test_different_call_sequences_are_refused(tmp_path, calls, whole):
    _write(tmp_path / "b", [*calls[:6], *calls[7:]])
    with pytest.raises(ValueError, match="call 6 is rope of layer 0"):
        trace.first_difference(whole, trace.load(tmp_path / "b", ROLLOUT))
    _write(tmp_path / "c", calls)
    _write(tmp_path / "c", [*calls[:6], *calls[7:]], step=1)
    with pytest.raises(ValueError, match="passes of one sequence call"):
        trace.load(tmp_path / "c", ROLLOUT)


def test_a_side_that_kept_fp32_is_compared_as_such(tmp_path, calls, whole):
    region, output, parts = calls[7]
    wide = output.astype(np.uint32) << 16
    wide[3, 1] |= 5
    _write(tmp_path / "b", [*calls[:7], (region, wide, parts), *calls[8:]])
    found = trace.first_difference(whole, trace.load(tmp_path / "b", ROLLOUT))
    assert found is not None and (found.element, found.differing) == ((3, 1), 1)
    assert (found.left, found.right) == (f"{output[3, 1]:04x}", f"{output[3, 1]:04x}0005")


# --- ranks ----------------------------------------------------------------------------------------


def test_ranks_are_joined_into_what_one_rank_computes(tmp_path, calls, whole):
    for rank in range(2):
        _write(tmp_path / "b" / f"rank{rank}", _shards(calls, rank))
    b = trace.load(tmp_path / "b", ROLLOUT)
    assert [call.output.shape for call in b] == [call.output.shape for call in whole]
    assert trace.first_difference(whole, b) is None


def test_a_product_with_a_bias_is_joined_as_one_without(tmp_path, calls):
    biased = [("gemm.bias" if parts == (Q, K, K) else r, o, parts) for r, o, parts in calls]
    _write(tmp_path / "whole", biased)
    for rank in range(2):
        _write(tmp_path / "b" / f"rank{rank}", _shards(biased, rank))
    whole, b = (trace.load(tmp_path / name, ROLLOUT) for name in ("whole", "b"))
    assert [call.region for call in whole].count("gemm.bias") == 2
    assert trace.first_difference(whole, b) is None
    assert b[2].operands["weight"].tolist() == [7 + 7]
    where = {"first": True, "linear": False}
    for columns in (ROLLOUT, TRAINER):
        assert columns.sections("gemm.bias", **where) == columns.sections("gemm.column", **where)
    assert np.array_equal(
        TRAINER.order("gemm.bias", **where), TRAINER.order("gemm.column", **where)
    )


def test_digests_of_what_ranks_hold_are_added(tmp_path, calls):
    for rank in range(2):
        folder = tmp_path / f"rank{rank}"
        _write(folder, _shards(calls, rank), range(4))
        _write(folder, _shards(calls, rank), range(4, TOKENS), step=1)
        for path in folder.glob("*.gemm.row.npz"):
            found = dict(np.load(path))
            parts = {"input.part": found["input"] + 1, "weight.part": found["weight"] + 1}
            found |= {"input": found["input"] + rank, "weight": found["weight"] + rank}
            np.savez(path, **found, **{k: v.astype(np.uint64) for k, v in parts.items()})
    (product, *_) = (c for c in trace.load(tmp_path, ROLLOUT) if c.region == "gemm.row")
    assert product.operands["weight"].tolist() == [8 + 8]
    assert product.operands["input"].tolist() == [2 * (row + 1) for row in range(TOKENS)]


def test_a_difference_on_one_rank_is_named_by_its_column_of_the_whole(tmp_path, calls, whole):
    changed = _changed(calls, 2, (3, Q + K - 1))  # the last column of k, which rank 1 holds
    for rank in range(2):
        _write(tmp_path / "b" / f"rank{rank}", _shards(changed, rank))
    found = trace.first_difference(whole, trace.load(tmp_path / "b", ROLLOUT))
    assert found is not None
    assert (found.layer, found.region, found.element) == (0, "gemm.column", (3, Q + K - 1))


def test_copies_that_ranks_hold_are_all_compared(tmp_path, calls, whole):
    _write(tmp_path / "b" / "rank0", _shards(calls, 0))
    _write(tmp_path / "b" / "rank1", _shards(_changed(calls, 8, (1, 2)), 1))
    b = trace.load(tmp_path / "b", ROLLOUT)
    for left, right in ((whole, b), (b, whole), (b, b)):
        found = trace.first_difference(left, right)
        assert found is not None
        assert (found.region, found.element) == ("gemm.row", (1, 2))
        assert found.operands["weight"] == f"{7:016x}"


def test_ranks_of_different_calls_are_refused(tmp_path, calls):
    _write(tmp_path / "b" / "rank0", _shards(calls, 0))
    _write(tmp_path / "b" / "rank1", _shards(calls, 1), range(3))
    with pytest.raises(ValueError, match="ranks made different calls"):
        trace.load(tmp_path / "b", ROLLOUT)


# --- the trainer's fused projection ---------------------------------------------------------------


def test_fused_projections_are_brought_into_one_column_order(tmp_path, calls, whole):
    order = TRAINER.order("gemm.column", first=True, linear=False)
    assert sorted(order) == list(range(Q + 2 * K))
    # Groups of (q, q, k, v), two columns each: the queries of the second group start at column 8.
    assert list(order[:8]) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert list(order[8:]) == [4, 5, 12, 13, 6, 7, 14, 15]
    fused = list(calls)
    for index in (2, 14):
        region, output, _ = calls[index]
        stored = np.empty_like(output)
        stored[:, order] = output
        fused[index] = (region, stored, (Q + 2 * K,))
    _write(tmp_path / "one", fused)
    for rank in range(2):
        _write(tmp_path / "two" / f"rank{rank}", _shards(fused, rank))
    for name in ("one", "two"):
        loaded = trace.load(tmp_path / name, TRAINER)
        assert trace.first_difference(loaded, whole) is None


def test_gates_stand_behind_the_queries_of_their_group_in_the_trainer():
    linear = {f"linear_{n}": 1 for n in ("num_key_heads", "num_value_heads")}
    linear |= {f"linear_{n}_head_dim": 2 for n in ("key", "value")}
    order = trace.Columns(CONFIG | linear, trainer=True).order(
        "gemm.column", first=True, linear=False
    )
    # Groups of (q, q, gate, gate, k, v), two columns each; the rollout has q, gate head by head.
    assert list(order[:8]) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert list(order[8:16]) == [12, 13, 16, 17, 14, 15, 18, 19]
    assert list(order[16:]) == [8, 9, 20, 21, 10, 11, 22, 23]
