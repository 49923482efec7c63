"""Traces of recurrent layers, whose products the engines fuse differently."""

import numpy as np
import pytest

from samebits import trace

KEYS, VALUES, HEADS, HIDDEN, TOKENS = 4, 8, 2, 6, 3
CONFIG = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "hidden_size": HIDDEN,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": KEYS // 2,
    "linear_value_head_dim": VALUES // HEADS,
}
MIXED = (KEYS, KEYS, VALUES)
# The trainer's order of calls in a layer, with the parts of each output that ranks split.
LAYER = {
    "norm.rms_zero_centred": (),
    "gemm.column": (*MIXED, VALUES, HEADS, HEADS),
    "gdn.conv": MIXED,
    "gdn.l2_norm": (KEYS, KEYS),
    "gdn.gate": (HEADS, HEADS),
    "gdn.core": (VALUES,),
    "norm.gated": (VALUES,),
    "gemm.row": (),
}
REST = {"norm.rms_zero_centred": (), "gemm.column": (6, 6), "act.silu_mul": (6,), "gemm.row": ()}


@pytest.fixture
def outputs():
    """(region, output, parts) of a model of one recurrent layer."""
    draw = np.random.default_rng(0)
    layer = [*LAYER.items(), *REST.items()]
    named = [("embedding", ()), *layer, ("norm.rms_zero_centred", ()), ("gemm.lm_head", (8,))]
    return [
        (region, draw.integers(0, 65536, (TOKENS, sum(parts) or HIDDEN)), parts)
        for region, parts in named
    ]


def _in_parts(outputs):
    """As the rollout calls them: two products, norms of q and of k, the gate before them."""
    cut = {"gemm.column": sum(MIXED) + VALUES, "gdn.l2_norm": KEYS}
    found, gate = [], outputs[5]
    assert gate[0] == "gdn.gate"
    for region, output, parts in outputs:
        if region == "gdn.gate":
            continue
        if region == "gdn.l2_norm":
            found.append(gate)
        at = cut.get(region)
        if at is None or (len(parts) == 2 and region == "gemm.column"):
            found.append((region, output, parts))
            continue
        count = 4 if region == "gemm.column" else 1
        found.append((region, output[:, :at], parts[:count]))
        found.append((region, output[:, at:], parts[count:]))
    return found


def _write(folder, outputs, rank=None, ranks=2):
    folder.mkdir(parents=True)
    for index, (region, output, parts) in enumerate(outputs):
        if parts and rank is not None:
            pieces = np.split(output, np.cumsum(parts)[:-1], axis=1)
            mine = [np.array_split(piece, ranks, axis=1)[rank] for piece in pieces]
            output = np.concatenate(mine, axis=1)
        found = {"position": np.arange(TOKENS), "input": np.arange(TOKENS, dtype=np.uint64)}
        if region.startswith("gemm"):
            found["weight"] = np.array([3], np.uint64)
        np.savez(folder / f"0000-{index:04d}.{region}.npz", output=output, **found)


def _load(folder, *, trainer: bool):
    return trace.load(folder, trace.Columns(CONFIG, trainer=trainer))


def test_both_engines_meet_call_by_call(tmp_path, outputs):
    _write(tmp_path / "trainer", outputs)
    _write(tmp_path / "rollout", _in_parts(outputs))
    trainer = _load(tmp_path / "trainer", trainer=True)
    rollout = _load(tmp_path / "rollout", trainer=False)
    assert trace.first_difference(trainer, rollout) is None
    assert [call.region for call in rollout if call.layer == 0] == [*LAYER, *REST]
    # The weights of a product in parts are those of the whole.
    assert [int(call.operands["weight"][0]) for call in rollout if "gemm.c" in call.region] == [
        6,
        3,
    ]


@pytest.mark.parametrize("region", [name for name in LAYER if name.startswith("gdn")])
def test_a_difference_is_named_by_its_column_of_the_whole(tmp_path, outputs, region):
    _write(tmp_path / "trainer", outputs)
    changed = [(r, o.copy(), p) for r, o, p in outputs]
    ((output,)) = [o for r, o, _ in changed if r == region]
    output[1, -1] ^= 1
    _write(tmp_path / "rollout", _in_parts(changed))
    found = trace.first_difference(
        _load(tmp_path / "trainer", trainer=True), _load(tmp_path / "rollout", trainer=False)
    )
    assert found is not None
    last = sum(LAYER[region]) - 1
    assert (found.layer, found.region, found.element) == (0, region, (1, last))


def test_ranks_of_both_engines_are_joined(tmp_path, outputs):
    _write(tmp_path / "one", outputs)
    for rank in range(2):
        _write(tmp_path / "trainer" / f"rank{rank}", outputs, rank)
        _write(tmp_path / "rollout" / f"rank{rank}", _in_parts(outputs), rank)
    one = _load(tmp_path / "one", trainer=True)
    for name in ("trainer", "rollout"):
        assert (
            trace.first_difference(one, _load(tmp_path / name, trainer=name == "trainer")) is None
        )
