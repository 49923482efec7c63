"""conv1d: bits against the reference over any cut into steps, windows and slots, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import bits
from samebits.errors import Refused
from samebits.ops import conv1d, registry, samples
from samebits.ops.conv1d import reference

I64 = torch.int64


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bits.compare(left, right).equal


def garbage(slots: int, taps: int, channels: int) -> torch.Tensor:
    return torch.full((slots, taps - 1, channels), torch.nan).bfloat16()


def starts_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=I64).cumsum(0)


def law(x: torch.Tensor, weight: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.cat([reference.conv1d(part, weight) for part in x.split(lengths)])


def last_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([torch.zeros(rows, x.shape[1]).bfloat16(), x])[len(x) :]


@pytest.mark.parametrize("low,high", [(-4, 4), (-126, -90), (-60, 8), (3, 9), (55, 60)])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_bits_equal_the_reference(taps, low, high):
    lengths = [9, 1, 0, 3, 17]
    x, weight = samples.bf16((30, 83), 1, low, high), samples.bf16((83, taps), 2, -3, 3)
    x[0], x[9], x[10, ::2] = -0.0, 2.0**-130, -0.0
    assert same(conv1d.varlen(x, weight, starts_of(lengths)), law(x, weight, lengths))


def test_many_elements_equal_the_reference():
    x, weight = samples.bf16((300, 640), 1, -3, 3), samples.bf16((640, 4), 2, -2, 1)
    assert same(conv1d.varlen(x, weight, starts_of([300])), reference.conv1d(x, weight))


def test_the_order_of_the_taps_shows():
    # Large terms that cancel: what a small one keeps depends on when it is added.
    x = samples.bf16((400, 64), 1, -3, 3)
    x = torch.where(x.abs() > 1, x.sign() * 2.0**20, x)
    weight = samples.bf16((64, 4), 2, 0, 1).sign()
    law, window = reference.conv1d(x, weight), torch.cat([torch.zeros(3, 64), x.float()])
    newest_first = torch.zeros(400, 64)
    for j in reversed(range(4)):
        newest_first += weight[:, j].float() * window[j : j + 400]
    other = torch.nn.functional.silu(newest_first).bfloat16()
    apart = (law.float() - other.float()).abs() > 2**-4 * law.float().abs()
    assert apart.float().mean() > 0.05
    assert same(conv1d.varlen(x, weight, starts_of([400])), law)


def test_values_are_right():
    x, weight = samples.bf16((50, 32), 1, -3, 3), samples.bf16((32, 4), 2, -3, 1)
    acc = torch.nn.functional.conv1d(
        x.double().T[None], weight.double()[:, None], padding=3, groups=32
    )[0, :, :50].T
    truth = torch.nn.functional.silu(acc)
    out = conv1d.varlen(x, weight, starts_of([50])).double()
    assert (out - truth).abs().max() <= truth.abs().max() * 2**-8
    assert ((out - truth).abs() <= truth.abs() * 2**-8 + 2**-18 * acc.abs().max()).all()


def test_nan_and_infinity_stay_visible_and_in_their_sequence_and_channel():
    x, weight = torch.ones(20, 16).bfloat16(), torch.ones(16, 4).bfloat16()
    x[3, 5], x[4, 6] = torch.nan, -torch.inf
    out = conv1d.varlen(x, weight, starts_of([6, 14]))
    bad = torch.zeros(20, 16, dtype=torch.bool)
    bad[3:6, 5] = bad[4:6, 6] = True
    assert (out.isnan() == bad).all()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_cut_into_steps_slots_and_batches_gives_the_bits_of_whole_sequences(data):
    taps, channels = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 16, 37]))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    seed = data.draw(st.integers(0, 10**6))
    xs = [samples.bf16((n, channels), seed + i, -4, 4) for i, n in enumerate(lengths)]
    weight = samples.bf16((channels, taps), seed + 9, -3, 2)
    window = garbage(6, taps, channels)
    slots = data.draw(st.permutations(range(6)))[: len(xs)]
    done, outs = [0] * len(xs), [[] for _ in xs]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        order = data.draw(st.permutations(range(len(xs))))
        order = order[: data.draw(st.integers(1, len(xs)))]
        takes = [data.draw(st.integers(0, min(6, lengths[i] - done[i]))) for i in order]
        if not any(takes):
            order, takes = [next(i for i, n in enumerate(lengths) if done[i] < n)], [1]
        rows = [xs[i][done[i] : done[i] + n] for i, n in zip(order, takes, strict=True)]
        y = conv1d.advance(
            torch.cat(rows),
            weight,
            window,
            torch.tensor([slots[i] for i in order]),
            starts_of(takes),
            torch.tensor([done[i] for i in order]),
        )
        for i, n, part in zip(order, takes, y.split(takes), strict=True):
            outs[i].append(part)
            done[i] += n
    for i, x in enumerate(xs):
        assert same(torch.cat(outs[i]), reference.conv1d(x, weight))
        if taps > 1:
            assert same(window[slots[i]], last_rows(x, taps - 1))
    idle = [slot for slot in range(6) if slot not in slots]
    assert window[idle].isnan().all()
    whole = torch.cat(xs)
    assert same(conv1d.varlen(whole, weight, starts_of(lengths)), law(whole, weight, lengths))


def test_a_reused_slot_starts_from_zeros():
    x, weight = samples.bf16((8, 16), 1), samples.bf16((16, 4), 2, -3, 2)
    window, slot, start = garbage(1, 4, 16), torch.tensor([0]), torch.tensor([0])
    for rows in (x[:5], x[5:6], x[6:]):
        y = conv1d.advance(rows, weight, window, slot, starts_of([len(rows)]), start)
        assert same(y, reference.conv1d(rows, weight))
        assert same(window[0], last_rows(rows, 3))


def test_a_sequence_without_rows_keeps_its_window_and_rows_past_the_end_give_zeros():
    x, weight = samples.bf16((7, 16), 1), samples.bf16((16, 4), 2, -3, 2)
    window = samples.bf16((3, 3, 16), 3)
    before = window.clone()
    y = conv1d.advance(
        x, weight, window, torch.tensor([2, 0]), starts_of([0, 5]), torch.tensor([0, 0])
    )
    assert same(window[1:], before[1:]) and same(y[:5], reference.conv1d(x[:5], weight))
    assert same(y[5:], torch.zeros(2, 16).bfloat16())


def test_a_window_carved_from_pages_equals_one_of_its_own():
    x, weight = samples.bf16((6, 16), 1), samples.bf16((16, 4), 2, -3, 2)
    pages = torch.full((4, 500), torch.nan).bfloat16()
    carved = pages.as_strided((4, 3, 16), (500, 16, 1), 100)
    own = garbage(4, 4, 16)
    for rows, context in ((x[:2], 0), (x[2:], 2)):
        step = (torch.tensor([3]), starts_of([len(rows)]), torch.tensor([context]))
        assert same(
            conv1d.advance(rows, weight, carved, *step), conv1d.advance(rows, weight, own, *step)
        )
    assert same(carved[3], own[3]) and pages.isnan().sum() == pages.numel() - 48


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_and_strides_do_not_move_bits(threads):
    wide, weight = samples.bf16((700, 900), 1), samples.bf16((640, 4), 2, -3, 2)
    x = wide[:, 100:740]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = conv1d.varlen(x, weight, starts_of([700]))
    finally:
        torch.set_num_threads(before)
    assert not x.is_contiguous()
    some = slice(300, 333)
    assert same(whole[:, some], reference.conv1d(x[:, some].contiguous(), weight[some]))
    one = conv1d.varlen(x[:, some].contiguous(), weight[some], starts_of([700]))
    assert same(whole[:, some], one)


@pytest.mark.parametrize("taps", [1, 4])
def test_gradients_match_float64_and_stay_in_their_sequence(taps):
    lengths = [5, 1, 0, 2, 9]
    x, weight = samples.bf16((17, 20), 1, -3, 2), samples.bf16((20, taps), 2, -3, 1)
    grad = samples.bf16((17, 20), 3, -2, 2)
    x.requires_grad_(), weight.requires_grad_()
    out = conv1d.varlen(x, weight, starts_of(lengths))
    assert same(out, law(x.detach(), weight.detach(), lengths))
    out.backward(grad)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, weight))
    parts = []
    for part in x64.split(lengths):
        rows = torch.cat([torch.zeros(taps - 1, 20).double(), part])
        acc = sum(rows[j : j + len(part)] * w64[:, j] for j in range(taps))
        parts.append(torch.nn.functional.silu(acc))
    torch.cat(parts).backward(grad.double())
    for got, want in ((x.grad, x64.grad), (weight.grad, w64.grad)):
        assert got.dtype == torch.bfloat16
        assert ((got.double() - want).abs() <= want.abs() * 2**-8 + want.abs().max() * 2**-18).all()


def test_refusals():
    x, weight, window = (torch.ones(s).bfloat16() for s in ((5, 8), (8, 4), (3, 3, 8)))
    slots, starts, context = torch.tensor([0, 2]), torch.tensor([0, 2, 5]), torch.tensor([0, 7])
    good = dict(
        x=x, weight=weight, window=window, slots=slots, query_start_loc=starts, context_lens=context
    )
    conv1d.advance(**good)
    for change, key in (
        ({"x": x.float()}, "SB0420"),
        ({"weight": weight.float()}, "SB0420"),
        ({"window": window.float()}, "SB0420"),
        ({"x": x[0]}, "SB0421"),
        ({"x": x[:, :4]}, "SB0421"),
        ({"weight": weight[:, None]}, "SB0421"),
        ({"window": window[:, :2]}, "SB0426"),
        ({"window": window.transpose(1, 2).contiguous().transpose(1, 2)}, "SB0426"),
        ({"window": window[:1].expand(3, 3, 8)}, "SB0426"),
        ({"slots": torch.tensor([0, 3])}, "SB0483"),
        ({"slots": torch.tensor([-1, 0])}, "SB0483"),
        ({"slots": torch.tensor([1, 1])}, "SB0483"),
        ({"slots": torch.tensor([1])}, "SB0483"),
        ({"context_lens": torch.tensor([0, -1])}, "SB0483"),
        ({"query_start_loc": torch.tensor([0, 2, 6])}, "SB0483"),
        ({"query_start_loc": torch.tensor([1, 2, 5])}, "SB0483"),
        ({"query_start_loc": torch.tensor([0, 3, 2])}, "SB0483"),
    ):
        with pytest.raises(Refused, match=key):
            conv1d.advance(**{**good, **change})
    for bad in (torch.tensor([0, 4]), torch.tensor([0, 6])):
        with pytest.raises(Refused, match="SB0483"):
            conv1d.varlen(x, weight, bad)


def test_no_rows_give_no_rows():
    weight, empty = torch.ones(8, 4).bfloat16(), torch.empty(0, 8).bfloat16()
    assert conv1d.varlen(empty, weight, torch.tensor([0])).shape == (0, 8)
    none = torch.empty(0, dtype=I64)
    assert conv1d.advance(empty, weight, garbage(2, 4, 8), none, torch.tensor([0]), none).shape == (
        0,
        8,
    )


def test_probe_and_served_count():
    registry.reset_served()
    x, weight = torch.ones(5, 8).bfloat16(), torch.ones(8, 4).bfloat16()
    conv1d.varlen(x, weight, starts_of([5]))
    conv1d.advance(
        x, weight, garbage(1, 4, 8), torch.tensor([0]), starts_of([3]), torch.tensor([0])
    )
    bound = registry.implementations()["gdn.conv"]
    assert bound.probe() == bound.probe() != 0 and len(bound.content_hash()) == 64
    assert registry.served() == {"gdn.conv": 8}


def test_the_first_channels_may_stay_unrounded():
    x, weight = samples.bf16((200, 40), 1), samples.bf16((40, 4), 2, -3, 2)
    rounded, exact = conv1d.varlen(x, weight, starts_of([200])), reference.unrounded(x, weight)
    for count in (1, 7, 16, 39):
        wide, y = conv1d.varlen(x, weight, starts_of([200]), exact=count)
        assert wide.dtype == torch.float32 and same(wide, exact[:, :count])
        assert same(y, rounded[:, count:])
        window, slots = garbage(2, 4, 40), torch.tensor([1])
        parts = [
            conv1d.advance(
                x[a:b], weight, window, slots, starts_of([b - a]), torch.tensor([a]), exact=count
            )
            for a, b in ((0, 1), (1, 64), (64, 200))
        ]
        for whole, cut in zip((wide, y), zip(*parts, strict=True), strict=True):
            assert same(torch.cat(cut), whole)
    for count in (0, 40):
        shapes = [part.shape for part in conv1d.varlen(x, weight, starts_of([200]), exact=count)]
        assert shapes == [(200, count), (200, 40 - count)]
    for count in (-1, 41):
        with pytest.raises(Refused, match="SB0421"):
            conv1d.varlen(x, weight, starts_of([200]), exact=count)


def test_gradients_of_unrounded_channels_are_those_of_rounded_ones():
    x, weight = samples.bf16((50, 24), 1), samples.bf16((24, 4), 2, -3, 2)
    grad, found = samples.bf16((50, 24), 3, -3, 3), []
    for count in (0, 10):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        wide, y = conv1d.varlen(*leaves, starts_of([20, 30]), exact=count)
        found.append(
            torch.autograd.grad([wide, y], leaves, [grad[:, :count].float(), grad[:, count:]])
        )
    assert all(same(a, b) for a, b in zip(*found, strict=True))
