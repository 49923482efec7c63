"""Streams meet on (sequence, position) and compare bit patterns."""

import numpy as np
import pytest

from samebits.errors import Refused
from samebits.gates.oracle import distance
from samebits.gates.streams import Stream, compare


def _bits(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


def _stream(*values: float, sequence: int = 0, first: int = 1, tokens=None, digests=None) -> Stream:
    stream = Stream()
    tokens = list(range(len(values))) if tokens is None else tokens
    stream.add(sequence, first, tokens, _bits(*values), digests)
    return stream


def test_only_positions_that_both_hold_are_compared():
    found = compare(_stream(-1, -2, -3), _stream(-2, -3, -4, first=2, tokens=[1, 2, 3]))
    assert (found.tokens, found.mismatches, found.first) == (2, 0, None)
    assert found.left_digest == found.right_digest


def test_zero_and_negative_zero_differ():
    found = compare(_stream(0.0), _stream(-0.0))
    assert found.mismatches == 1 and found.first is not None
    assert (found.first.left, found.first.right) == ("00000000", "80000000")


def test_a_nan_never_passes():
    assert compare(_stream(float("nan")), _stream(float("nan"))).mismatches == 1


def test_only_finite_numbers_count_as_finite_mismatches():
    nan, inf = float("nan"), float("inf")
    found = compare(_stream(-1, nan, -inf, -4, nan), _stream(-2, -2, -3, -4, nan))
    assert (found.mismatches, found.finite) == (4, 1)


def test_a_row_with_a_nan_never_passes_whatever_its_digest():
    nan, rows = float("nan"), np.array([[1, 2], [3, 4]], np.uint64)
    left, right = _stream(-1, nan, digests=rows), _stream(-2, nan, digests=rows)
    found = compare(left, right, "row")
    assert (found.tokens, found.mismatches, found.finite) == (2, 1, 0)
    other = _stream(-1, nan, digests=rows + np.uint64(1))
    found = compare(left, other, "row")
    assert (found.mismatches, found.finite) == (2, 1)


def test_the_first_difference_is_first_in_sequence_and_position():
    left, right = Stream(), Stream()
    for sequence in (3, 1):  # out of order
        left.add(sequence, 4, [7, 8], _bits(-1, -2))
        right.add(sequence, 4, [7, 8], _bits(-1, -2 - sequence))
    first = compare(left, right).first
    assert first is not None
    assert (first.sequence, first.position, first.token) == (1, 5, 8)


def test_other_tokens_are_refused():
    with pytest.raises(Refused, match="SB0901"):
        compare(_stream(-1, tokens=[4]), _stream(-1, tokens=[5]))


def test_another_sampled_token_is_a_mismatch_and_ends_its_sequence():
    left, right = Stream(), Stream()
    for sequence in (1, 2):
        left.add(sequence, 4, [7, 8, 9], _bits(-1, -2, -3))
    right.add(1, 4, [7, 6, 5], _bits(-1, -2, -4))  # another token of equal probability
    right.add(2, 4, [7, 8, 9], _bits(-1, -2, -3))
    found = compare(left, right, sampled=True)
    assert (found.tokens, found.mismatches) == (5, 1)
    assert found.first is not None and found.first.position == 5


def test_a_position_twice_is_an_error():
    stream = _stream(-1)
    stream.extend(_stream(-1))
    with pytest.raises(ValueError, match="twice"):
        stream.columns()


def test_a_row_needs_a_value_for_each_token():
    with pytest.raises(ValueError, match="2 tokens, 1 values"):
        _stream(-1, tokens=[1, 2])


def test_whole_rows_are_compared_by_digest_where_both_have_one():
    rows = np.array([[1, 2], [3, 4], [0, 0]], np.uint64)
    other = np.array([[1, 2], [3, 5], [9, 9]], np.uint64)
    found = compare(_stream(-1, -2, -3, digests=rows), _stream(-9, -9, -9, digests=other), "row")
    assert (found.tokens, found.mismatches, found.values) == (2, 1, None)
    assert found.first is not None and found.first.position == 2
    assert (found.first.left, found.first.right) == (f"{4:016x}{3:016x}", f"{5:016x}{3:016x}")


def test_a_stream_survives_a_file(tmp_path):
    stream = _stream(-1, -2, sequence=5)
    stream.save(tmp_path / "s.npz")
    again = Stream.load(tmp_path / "s.npz")
    assert compare(stream, again).tokens == 2
    assert compare(stream.shifted(10), again.shifted(10)).tokens == 2
    assert compare(stream.shifted(10), again).tokens == 0


def test_distance_to_the_oracle_is_mean_and_largest():
    tokens, mean, largest = distance(_stream(-1.0, -2.0), _stream(-1.0, -2.5))
    assert (tokens, mean, largest) == (2, 0.25, 0.5)


def test_distance_without_common_tokens_is_not_zero():
    tokens, mean, largest = distance(_stream(-1.0), _stream(-1.0, sequence=1))
    assert tokens == 0 and np.isnan(mean) and np.isnan(largest)
