"""Drop the GPU code of other chips from a shared library, keeping its size and every offset.

A library built for many chips holds them all in its section `.nv_fatbin`, as containers of entries
(machine code of one compute capability, or PTX). Of each container the entries that the chip can
run are moved to its front and its length is shortened to them; what follows is zero and takes no
room in a compressed archive. Code that stays is the released code, byte for byte.
"""

from __future__ import annotations

import struct

SECTION = b".nv_fatbin"
MAGIC = 0xBA55ED50
_PTX, _CODE = 1, 2
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, length of this header, length of the entries
_ENTRY = struct.Struct("<HHIQ")  # kind, version, length of this header, length of the content
_CAPABILITY = 28  # offset of the compute capability in an entry: 90 for 9.0


def thin(library: bytes, capability: int) -> bytes:
    """`library` (an ELF file of 64 bits) with code for compute capability `capability` / 10 only.

    A container without machine code of that capability keeps the newest PTX that the driver can
    compile for it; one that has neither keeps its smallest entry, which the chip cannot load.
    ValueError for a layout that is not understood.
    """
    start, size = _section(library)
    out = bytearray(library)
    at, end = start, start + size
    while at + _CONTAINER.size <= end:
        magic, _, header, length = _CONTAINER.unpack_from(library, at)
        if magic != MAGIC:
            if any(library[at : at + 8]):
                raise ValueError(f"no container at {at:#x} of the library")
            at += 8  # containers are aligned to 8 bytes
            continue
        first, after = at + header, at + header + length
        if after > end:
            raise ValueError(f"a container at {at:#x} that passes the end of its section")
        kept = b"".join(_chosen(_entries(library, first, after), capability))
        out[first:after] = kept.ljust(length, b"\0")
        _CONTAINER.pack_into(out, at, *_CONTAINER.unpack_from(library, at)[:3], len(kept))
        at = after
    return bytes(out)


def _section(library: bytes) -> tuple[int, int]:
    """Offset and size of `.nv_fatbin`; (0, 0) where there is none."""
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("not an ELF file of 64 bits")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    count, names = struct.unpack_from("<HH", library, 0x3C)
    sections = [struct.unpack_from("<IIQQQQIIQQ", library, table + 64 * i) for i in range(count)]
    for section in sections:
        name = sections[names][4] + section[0]
        if library[name : library.index(b"\0", name)] == SECTION:
            return section[4], section[5]
    return 0, 0


def _entries(library: bytes, at: int, end: int) -> list[tuple[int, int, bytes]]:
    """(kind, compute capability, bytes with header) of every entry of a container."""
    found = []
    while at < end:
        kind, _, header, length = _ENTRY.unpack_from(library, at)
        after = at + header + length
        if kind not in (_PTX, _CODE) or after > end:
            raise ValueError(f"an entry of kind {kind} at {at:#x} of the library")
        (capability,) = struct.unpack_from("<I", library, at + _CAPABILITY)
        found.append((kind, capability, library[at:after]))
        at = after
    return found


def _chosen(entries: list[tuple[int, int, bytes]], capability: int) -> list[bytes]:
    code = [raw for kind, has, raw in entries if kind == _CODE and has == capability]
    if code:
        return code
    portable = [(has, raw) for kind, has, raw in entries if kind == _PTX and has <= capability]
    if portable:
        newest = max(has for has, _ in portable)
        return [raw for has, raw in portable if has == newest]
    return [min((raw for _, _, raw in entries), key=len)] if entries else []
