import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.contract import canonical
from samebits.errors import Refused

scalars = st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"))
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@settings(max_examples=100, deadline=None)
@given(values)
def test_bytes_are_stable_and_decode_to_the_same_value(value):
    data = canonical.encode(value)
    assert canonical.decode(data, "x") == value
    assert canonical.encode(canonical.decode(data, "x")) == data


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(min_size=1), st.integers(), min_size=2))
def test_key_order_does_not_move_the_digest(value):
    assert canonical.digest(value) == canonical.digest(dict(reversed(value.items())))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(value=st.floats(width=32))
def test_bit_patterns_carry_every_float(dtype, value):
    record = canonical.float_bits(value, dtype)
    assert canonical.float_bits(canonical.from_bits(record), dtype) == record


@pytest.mark.parametrize(
    ("text", "error_id"),
    [
        ('{"a":1.0}\n', "SB0305"),
        ('{"a":NaN}\n', "SB0305"),
        ('{"a":1e3}\n', "SB0305"),
        ('{"a":-Infinity}\n', "SB0305"),
        ('{"a":1,"a":1}\n', "SB0306"),
        ('{"a":1', "SB0303"),
        ("", "SB0303"),
        ('{"a": 1}\n', "SB0321"),
        ('{"b":1,"a":1}\n', "SB0321"),
        ('{"a":1}', "SB0321"),
        ('{"a":1}\n\n', "SB0321"),
    ],
)
def test_what_is_not_canonical_is_refused(text, error_id):
    with pytest.raises(Refused) as refused:
        canonical.decode(text.encode(), "file")
    assert refused.value.error_id == error_id


def test_bytes_that_are_not_utf8_are_refused():
    with pytest.raises(Refused, match="SB0303"):
        canonical.decode(b'{"a":"\xff"}\n', "file")


def test_a_float_is_not_encoded():
    with pytest.raises(Refused, match=r"a\.b\[1\]"):
        canonical.encode({"a": {"b": [1, 0.5]}})


def test_non_ascii_text_is_written_as_utf8():
    assert json.loads(canonical.encode({"a": "\u00e9"})) == {"a": "\u00e9"}
    assert "\u00e9".encode() in canonical.encode({"a": "\u00e9"})
