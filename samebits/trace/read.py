"""From the files of a recording to the calls of one sequence, in an order that engines share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from samebits.trace import columns as layouts
from samebits.trace.columns import Columns


@dataclass(frozen=True)
class Call:
    """One region of a sequence's forward passes.

    output     [rows, features] bit patterns
    operands   name -> uint64 digests, one per row, or one in all (a weight)
    positions  [rows] position of each row in the sequence; a row that was computed again, or that
               ranks hold different copies of, is there more than once
    """

    layer: int | None
    region: str
    output: np.ndarray
    operands: Mapping[str, np.ndarray]
    positions: np.ndarray


def load(folder: Path, columns: Columns | None = None) -> list[Call]:
    """Calls of one sequence, over all passes that hold rows of it, and over all ranks.

    columns   how this engine fuses its products; needed for ranks and to meet another engine

    ValueError when the folder holds no pass, or passes or ranks of different calls.
    """
    ranks = [_calls(part) for part in sorted(folder.glob("rank*")) or [folder]]
    if any([_key(c) for c in rank] != [_key(c) for c in ranks[0]] for rank in ranks):
        raise ValueError("ranks made different calls")
    calls: list[Call] = []
    for layer, part in itertools.groupby(zip(*ranks, strict=True), key=lambda c: c[0].layer):
        group = list(part)
        calls += _layer(group, columns) if layer is not None else [_whole(parts) for parts in group]
    return calls


def _key(call: Call) -> tuple:
    return call.layer, call.region, call.positions.tobytes()


# --- one rank -------------------------------------------------------------------------------------


def _calls(folder: Path) -> list[Call]:
    """Passes put end to end, layers numbered, products that an engine cuts put together."""
    passes, logits = [], []
    for _, files in itertools.groupby(sorted(folder.glob("*.npz")), lambda f: f.name[:4]):
        found = list(_contents(files))
        passes.append([call for call in found if call[0] != "gemm.lm_head"])
        logits += [call for call in found if call[0] == "gemm.lm_head"]
    if not passes:
        raise ValueError("the trace holds no row of the sequence")
    steps = []
    for step in zip(*passes, strict=False):
        regions = {region for region, _ in step}
        if len(regions) != 1:
            raise ValueError(f"forward passes of one sequence call {' and '.join(sorted(regions))}")
        steps.append((step[0][0], _end_to_end([found for _, found in step])))
    if any(len(found) != len(passes[0]) for found in passes):
        raise ValueError("forward passes of one sequence make different numbers of calls")
    calls = [_call(*step) for step in _numbered(steps)]
    if logits:
        calls.append(_call(None, "gemm.lm_head", _end_to_end([found for _, found in logits])))
    return calls


def _contents(files) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    for path in files:
        with np.load(path) as stored:
            yield path.stem.split(".", 1)[1], dict(stored)


def _end_to_end(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {
        name: value if name.startswith("weight") else np.concatenate([p[name] for p in parts])
        for name, value in parts[0].items()
    }


def _numbered(steps) -> Iterator[tuple[int | None, str, dict[str, np.ndarray]]]:
    """Number the layers: each ends with its second row-parallel product (MLP down)."""
    layers = sum(region == "gemm.row" for region, _ in steps) // 2
    done = 0
    for region, found in steps:
        inside = region != "embedding" and done // 2 < layers
        yield done // 2 if inside else None, region, found
        done += region == "gemm.row"


def _call(layer: int | None, region: str, found: dict[str, np.ndarray]) -> Call:
    rest = {k: v for k, v in found.items() if k not in ("output", "position")}
    return Call(layer, region, found["output"], rest, found["position"])


# --- one layer on all ranks -----------------------------------------------------------------------


def _whole(parts: Sequence[Call]) -> Call:
    """A call outside the layers: every rank has all of it, but for the logits."""
    one = parts[0]
    return _sharded(parts, (1,)) if one.region == "gemm.lm_head" else _copied(parts)


def _layer(group: Sequence[tuple[Call, ...]], columns: Columns | None) -> list[Call]:
    linear = any(parts[0].region == "gdn.core" for parts in group)
    merged = list(_merged(group))
    # The gate and the norm of queries and keys do not see each other.
    kinds = [parts[0].region for parts in merged]
    if linear and kinds.index("gdn.gate") < kinds.index("gdn.l2_norm"):
        a, b = kinds.index("gdn.gate"), kinds.index("gdn.l2_norm")
        merged[a], merged[b] = merged[b], merged[a]
    calls, products, split = [], 0, False
    for parts in merged:
        region = parts[0].region
        products += region in layouts.PRODUCTS
        split = split or region in layouts.PRODUCTS
        if region == "gemm.row" or not split:
            calls.append(_copied(parts))
        elif columns is None:
            calls.append(_sharded(parts, (1,)))
        else:
            where = {"first": products == 1, "linear": linear}
            order = columns.order(region, **where)
            calls.append(_sharded(parts, columns.sections(region, **where), order))
        split = split and region != "gemm.row"
    return calls


def _merged(group: Sequence[tuple[Call, ...]]) -> Iterator[tuple[Call, ...]]:
    """Put calls of one product that follow each other together, rank by rank."""
    for region, same in itertools.groupby(group, key=lambda parts: parts[0].region):
        if region not in layouts.MERGED:
            yield from same
            continue
        yield tuple(_side_by_side(calls) for calls in zip(*same, strict=True))


def _side_by_side(calls: Sequence[Call]) -> Call:
    one = calls[0]
    if len(calls) == 1:
        return one
    output = np.concatenate([call.output for call in calls], axis=1)
    parts = [call.operands for call in calls]
    return Call(one.layer, one.region, output, layouts.operands(one.region, parts), one.positions)


def _copied(parts: Sequence[Call]) -> Call:
    """What every rank has; all copies are kept where they differ."""
    one = parts[0]
    shared = layouts.operands(one.region, [part.operands for part in parts])
    if all(np.array_equal(part.output, one.output) for part in parts):
        return Call(one.layer, one.region, one.output, shared, one.positions)
    rows = {k: v if k == "weight" else np.tile(v, len(parts)) for k, v in shared.items()}
    output = np.concatenate([part.output for part in parts])
    return Call(one.layer, one.region, output, rows, np.tile(one.positions, len(parts)))


def _sharded(
    parts: Sequence[Call], sections: Sequence[int], order: np.ndarray | None = None
) -> Call:
    one = parts[0]
    output = layouts.joined([part.output for part in parts], sections)
    output = output if order is None else output[:, order]
    shared = layouts.operands(one.region, [part.operands for part in parts])
    return Call(one.layer, one.region, output, shared, one.positions)
