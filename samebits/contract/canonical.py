"""Canonical JSON: one value has one byte string, and nothing ambiguous decodes.

Sorted keys, compact separators, UTF-8, one trailing newline. Floats are forbidden, because their
decimal form depends on who prints it: a float travels as its bit pattern. Decoding is strict: a
duplicate key, a float or NaN literal, or bytes that are not the canonical ones are refused.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import struct
from pathlib import Path
from typing import Any

from samebits.errors import Refused

_PACK = {"float32": (">f", ">I", 8), "float64": (">d", ">Q", 16)}


def float_bits(value: float, dtype: str = "float32") -> dict[str, str]:
    """{"bits": hex of the IEEE pattern, "dtype": dtype}; rounds to nearest even."""
    as_float, _, digits = _PACK[dtype]
    pattern = int.from_bytes(struct.pack(as_float, value), "big")
    return {"bits": f"{pattern:0{digits}x}", "dtype": dtype}


def from_bits(record: dict[str, str]) -> float:
    """Inverse of `float_bits`."""
    as_float, as_int, _ = _PACK[record["dtype"]]
    return struct.unpack(as_float, struct.pack(as_int, int(record["bits"], 16)))[0]


def _refuse_floats(value: Any, where: str, what: str) -> None:
    if isinstance(value, float):
        raise Refused(
            "SB0305",
            seen=f"{what}: {where or 'top level'} is the float {value!r}",
            required="an integer, a string, or a bit pattern",
            hint="samebits explain SB0305",
        )
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_floats(item, f"{where}.{key}".lstrip("."), what)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_floats(item, f"{where}[{index}]", what)


def encode(value: Any, what: str = "value") -> bytes:
    """Canonical bytes of a JSON value without floats."""
    _refuse_floats(value, "", what)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode() + b"\n"


def sha256(data: bytes) -> str:
    """Hexadecimal sha256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def digest(value: Any) -> str:
    """sha256 of the canonical bytes of `value`."""
    return sha256(encode(value))


def read(path: Path, kind: str, hint: str) -> bytes:
    """Bytes of a file of this `kind` ("contract"); SB0303 with `hint` where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(
            "SB0303",
            seen=f"{path}: {error.strerror}",
            required=f"a readable {kind} file",
            hint=hint,
        ) from None


def decode(data: bytes, what: str, *, canonical: bool = True) -> Any:
    """Parse JSON strictly; `canonical` also demands the exact canonical bytes."""

    def no_float(literal: str) -> Any:
        raise Refused(
            "SB0305",
            seen=f"{what} holds the number {literal}",
            required="an integer, a string, or a bit pattern",
            hint="samebits explain SB0305",
        )

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record: dict[str, Any] = {}
        for key, item in pairs:
            if key in record:
                raise Refused(
                    "SB0306",
                    seen=f"{what} has the key {key!r} twice in one object",
                    required="every key once",
                    hint="samebits explain SB0306",
                )
            record[key] = item
        return record

    try:
        value = json.loads(
            data.decode(),
            parse_float=no_float,
            parse_constant=no_float,
            object_pairs_hook=no_duplicates,
        )
    except (ValueError, RecursionError) as error:
        raise Refused(
            "SB0303",
            seen=f"{what}: {error}",
            required="a complete JSON file in UTF-8",
            hint="samebits explain SB0303",
        ) from None
    if canonical and encode(value, what) != data:
        raise Refused(
            "SB0321",
            seen=f"{what} is valid JSON, but not in canonical form",
            required="sorted keys, compact separators, one trailing newline",
            hint="samebits explain SB0321",
        )
    return value


def load_schema(package: str, name: str = "schema.json") -> dict[str, Any]:
    """A JSON schema that lies in `package`."""
    return json.loads(importlib.resources.files(package).joinpath(name).read_text())


def check_schema(value: Any, schema: dict[str, Any], error_id: str, what: str) -> None:
    """Refuse `value` unless it fits the JSON schema; names the first offending field."""
    import jsonschema

    problems = list(jsonschema.Draft202012Validator(schema).iter_errors(value))
    if not problems:
        return
    first = min(problems, key=lambda p: [str(part) for part in p.absolute_path])
    where = "/".join(str(part) for part in first.absolute_path) or "top level"
    raise Refused(
        error_id,
        seen=f"{what}, at {where}: {first.message[:300]}",
        required="the fields of its schema, all of them and no others",
        hint=f"samebits explain {error_id}",
    )
