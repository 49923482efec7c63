"""Torch operators of an engine's passes: their kinds, their regions, and when they are counted."""

import pytest
import torch

from samebits.trace import operators
from samebits.trace.operators import MOVES, POINTWISE, REDUCES, Operator, Scored

X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda: X.t(), MOVES),
        (lambda: torch.cat([X, X]), MOVES),
        (lambda: X[torch.tensor([1])], MOVES),
        (lambda: X.argmax(-1), MOVES),
        (lambda: X.clone().copy_(X), MOVES),
        (lambda: torch.ones_like(X), MOVES),
        (lambda: X.new_ones(2), MOVES),
        (lambda: X.bfloat16(), POINTWISE),
        (lambda: X + X, POINTWISE),
        (lambda: X.exp(), POINTWISE),
        (lambda: X.sum(), REDUCES),
        (lambda: X @ X.t(), REDUCES),
        (lambda: X.softmax(-1), REDUCES),
        (lambda: X.cumsum(-1), REDUCES),
    ],
)
def test_kinds(call, wanted):
    tally = operators.Tally()
    with tally:
        call()
    found = [place[2] for place in tally.counts]
    assert found[-1] == wanted and REDUCES not in found[:-1]


class Engine:
    def score(self, x):
        return region(x).sum()


def region(x):
    return inner(x) + 1


def inner(x):
    return x * 2


@pytest.fixture
def passes(monkeypatch, tmp_path):
    """`Engine.score` tallied into a folder; a switch says whether a recording is on."""
    monkeypatch.setitem(operators._PASSES, "trainer", (__name__, "Engine"))
    monkeypatch.setattr(Engine, "score", Engine.score)
    switch = {"on": True}
    tally = operators.install("trainer", lambda: switch["on"], tmp_path)
    for name in ("region", "inner"):
        monkeypatch.setitem(globals(), name, tally.scoped(globals()[name], name))
    return tmp_path, switch


def test_operators_belong_to_the_outermost_region(passes):
    folder, _ = passes
    Engine().score(X)
    Engine().score(X)
    assert operators.load(folder) == (
        Operator("forward", None, REDUCES, "aten.sum.default", 2),
        Operator("forward", "region", POINTWISE, "aten.add.Tensor", 2),
        Operator("forward", "region", POINTWISE, "aten.mul.Tensor", 2),
    )


def test_nothing_is_counted_while_no_recording_is_on(passes):
    folder, switch = passes
    switch["on"] = False
    Engine().score(X)
    assert operators.load(folder) == ()


def test_a_new_recording_starts_afresh(passes):
    folder, _ = passes
    Engine().score(X)
    (made,) = folder.glob("operators.*.json")
    made.unlink()
    Engine().score(X)
    assert {one.count for one in operators.load(folder)} == {1}


def test_passes_are_wrapped_once(passes):
    folder, _ = passes
    wrapped = Engine.score
    operators.install("trainer", lambda: True, folder)
    assert Engine.score is wrapped


def test_calls_that_make_log_probabilities_are_counted_by_rows(passes, monkeypatch):
    folder, _ = passes
    tally = operators.install("trainer", lambda: True, folder)
    assert operators.load_scored(folder) == ()

    def selected(logits):
        return log_softmax(logits)[:, 0]

    log_softmax = tally.scoring(lambda logits: logits.log_softmax(-1), "log_softmax")
    selected = tally.scoring(selected, "selected")
    monkeypatch.setattr(Engine, "score", lambda self, x: selected(x) + log_softmax(x[:1])[0, 0])
    monkeypatch.setattr(
        Engine,
        "score",
        operators._tallied(Engine.score, "forward", tally, lambda: True, folder),
    )
    for _ in range(2):
        Engine().score(X)
    assert operators.load_scored(folder) == (
        Scored("forward", "log_softmax", 1, 2),
        Scored("forward", "selected", 2, 2),
    )
